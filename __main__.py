"""`python -m trainer` is the `trainer` command."""

from .cli.entry import main

if __name__ == "__main__":
    main()
