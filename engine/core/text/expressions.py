"""Regular expressions and patterns of names that a recipe gives. Torch-free.

RE2 matches in time proportional to the text, whatever the expression; Python's own module takes
time that doubles with each letter for expressions such as `(.+)+!`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import translate
from functools import lru_cache
from typing import Any

import re2

MAX_BYTES = 2**20

# What RE2 leaves out, because it cannot be matched in such time.
_UNKNOWN = re.compile(r"\(\?(?:[=!>(]|<[=!])|\\[1-9]|\(\?P=|[*+?}]\+")


class ExpressionError(ValueError):
    """The text is no regular expression of RE2's."""


@lru_cache(maxsize=256)
def compile_expression(text: str) -> Any:
    """Return an expression with `search` and `fullmatch`, as of Python's `re`.

    Raises:
        ExpressionError: what is wrong with it, in a line.
    """
    options = re2.Options()
    options.log_errors = False  # it would write to stderr
    options.max_mem = MAX_BYTES
    try:
        return re2.compile(text, options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode(errors="replace") if type(error) is re2.error else "not UTF-8"
        if _UNKNOWN.search(text):
            reason += " (lookarounds, backreferences and atomic groups could take for ever)"
        raise ExpressionError(reason) from None


def match_names(pattern: str) -> Callable[[str], bool]:
    """Return a test of parameter names: a glob, or `re:` and a regular expression (searched)."""
    if pattern.startswith("re:"):
        expression = compile_expression(pattern[3:])
        return lambda name: expression.search(name) is not None
    glob = re.compile(translate(pattern))
    return lambda name: glob.match(name) is not None
