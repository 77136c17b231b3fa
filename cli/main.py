"""The `trainer` command: finds the command's file, runs it, and turns errors into exit codes.

A command is a file of this folder with one function (or, for a command with sub-commands, a
`typer.Typer`), and one line in `COMMANDS`. The file is imported when its command runs, so it may
import Typer at its top; torch only inside the function.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from ..engine.core.errors import ExitCode, TrainerError
from ..engine.core.text.display import make_lines_printable
from ..engine.launch.ending import end_process, skip_teardown
from ..engine.launch.environment import TRACEBACK
from ..engine.recipe import other_names
from .options import check_paths


class Lazy(NamedTuple):
    """A command that is not imported yet."""

    where: str
    """file of this folder, and the name in it"""
    help: str


COMMANDS = {
    "run": Lazy("run:run", "Train what a recipe describes, or resume where it stopped."),
    "federate": Lazy("federate:app", "Train with clients and a server, in rounds."),
    "validate": Lazy("validate:validate", "Check recipes."),
    "explain": Lazy(
        "explain:explain", "Show a recipe with every default, and where it comes from."
    ),
    "new": Lazy("new:new", "Write a commented starter recipe."),
    "migrate": Lazy("migrate:migrate", "Turn another trainer's settings into a recipe."),
    "list": Lazy("list:list_components", "List components by kind, or the fields of one."),
    "docs": Lazy("docs:docs", "Print the help of a key, a component, a table or a command."),
    "schema": Lazy("schema:schema", "Print the JSON Schema of recipes, for editors."),
    "plan": Lazy("plan:plan", "Show how a run's ranks share it: mesh, placement, traffic."),
    "estimate-memory": Lazy(
        "estimate_memory:estimate_memory", "Estimate the peak memory of a run's ranks."
    ),
    "check-plan": Lazy(
        "check_plan:check_plan", "Compare a run's plan with one process, on this machine's CPU."
    ),
    "precompute": Lazy(
        "precompute:precompute", "Write what a reference or teacher says of all samples."
    ),
    "evaluate": Lazy("evaluate:evaluate", "Measure loss, perplexity and tasks."),
    "data": Lazy("data:app", "Tokenise a corpus, look into it, train a tokenizer."),
    "cache": Lazy("cache:app", "List and prune what data was prepared into."),
    "infer": Lazy("infer:infer", "Predict records with the task of a run."),
    "generate": Lazy("generate:generate", "Sample text from a checkpoint."),
    "status": Lazy("status:status", "Show what runs are doing, or how they ended."),
    "report": Lazy("report:report", "Write one HTML page with plots, comparing runs."),
    "launch": Lazy("launch:app", "Write what starts a run on a cluster."),
    "sweep": Lazy("sweep:sweep", "Run a recipe at each point of a grid of settings."),
    "doctor": Lazy("doctor:doctor", "Check this machine: versions, devices, kernels, disk."),
    "download": Lazy("download:download", "Download a model of the Hugging Face hub."),
    "convert-ckpt": Lazy("convert_ckpt:app", "Convert checkpoints between formats."),
    "checkpoint": Lazy("checkpoint:app", "List, inspect, verify and prune checkpoints."),
}


class LazyGroup(TyperGroup):
    """A group that imports a command's file when it is called, not when it is listed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, lazy in COMMANDS.items():
            self.add_command(TyperCommand(name, help=lazy.help), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called, then resolve as usual."""
        if args and args[0] in COMMANDS:
            self.add_command(import_command(args[0]), args[0])
        elif args and args[0] in other_names.COMMANDS:
            ctx.fail(f"No such command '{args[0]}': here it is {other_names.COMMANDS[args[0]]}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an option of another trainer's gets what to write here."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            option = getattr(error, "option_name", None)
            if isinstance(option, str) and (hint := other_names.find_option(option)):
                error.message += f": {hint}"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise


def import_command(name: str) -> Any:
    """Import the file of a command and return the command."""
    module, attribute = COMMANDS[name].where.split(":")
    found = getattr(import_module(f".{module}", __package__), attribute)
    parent = typer.Typer(add_completion=False, rich_markup_mode=None)
    if isinstance(found, typer.Typer):
        for each in found.registered_commands:
            each.callback = each.callback and check_paths(each.callback)
        parent.add_typer(found, name=name)
    else:
        parent.command(name)(check_paths(found))
    return get_group(parent).commands[name]


app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(f"trainer {__version__}")
        raise typer.Exit


@app.callback()
def trainer(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="show where in the code an error comes from")
    ] = False,
) -> None:
    """Train large models from one TOML file."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit with the code of the public contract."""
    if arguments is None:
        arguments = sys.argv[1:]
        if "run" not in arguments[:2]:  # threads of a run may still have to end
            skip_teardown()
    if "--traceback" in arguments:
        os.environ[TRACEBACK] = "1"
    # Before torch is loaded: its threads sleep while they wait. Spinning ones take the core from
    # those that they wait for, where others use the machine too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Else pydantic looks for plugins of its own in all installed packages, which delays a start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    end_process(_run([each for each in arguments if each != "--traceback"]))


def _run(arguments: list[str]) -> int:
    """Return the exit code of a command line; errors are printed."""
    try:
        get_command(app)(arguments, prog_name="trainer")
    except SystemExit as stop:
        # Typer reports a failure when the reader of our output has closed the pipe.
        is_unread = isinstance(stop.__context__, BrokenPipeError)
        return _flush(ExitCode.DONE if is_unread else _number(stop.code))
    except TrainerError as error:
        if TRACEBACK in os.environ:
            traceback.print_exc()
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return _flush(ExitCode.DONE)
    except Exception as error:
        if TRACEBACK in os.environ:
            traceback.print_exc()
        name = type(error).__name__
        notes = getattr(error, "__notes__", [])
        hint = "; ".join(notes) or "run the same with --traceback to see where"
        text = make_lines_printable(f"error: unexpected {name}: {error}\n  hint: {hint}")
        print(text, file=sys.stderr)
        return ExitCode.FAILED
    return _flush(ExitCode.DONE)


def _number(code: str | int | None) -> int:
    return code if isinstance(code, int) else int(bool(code))


def _flush(code: int) -> int:
    """Write out what was printed; a reader that has gone away is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
