"""Writes the table of torch's optimizers and schedules: `python -m tests.optim.torch_table`.

Recipes are checked by this table, because validation must not import torch. The signatures are read
from the sources of the installed torch and of the oldest supported release, which is downloaded and
not installed; they must be the same.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from tests.torch_names import download

PATH = Path(__file__).parents[2] / "engine" / "optim" / "library" / "torch.json"
OLDEST = "2.11.0"
# The trainer decides these, or a recipe cannot write their value.
NOT_KEYS = {
    "self", "params", "optimizer", "last_epoch", "foreach", "fused", "capturable", "differentiable",
    "maximize", "scale_fn", "scale_mode", "epochs", "steps_per_epoch",
}  # fmt: skip
# What a recipe cannot name: engine/optim/library/table.py says why.
NOT_NAMES = {
    "Optimizer", "Adafactor", "LBFGS", "SparseAdam", "Muon", "LRScheduler", "LambdaLR",
    "MultiplicativeLR", "ChainedScheduler", "SequentialLR", "ReduceLROnPlateau", "SWALR",
    "AveragedModel",
}  # fmt: skip
TYPES = {"bool": "bool", "int": "int", "float": "float", "Iterable[int]": "ints"}


def signatures(sources: dict[str, str]) -> Iterator[tuple[str, str, ast.arguments]]:
    """Yield section, name and arguments of each class that a recipe can name."""
    for file, text in sorted(sources.items()):
        for node in ast.parse(text).body:
            if not isinstance(node, ast.ClassDef) or node.name in NOT_NAMES or node.name[0] == "_":
                continue
            section = "schedules" if file == "lr_scheduler.py" else "optimizers"
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    yield section, node.name, member.args


def describe(annotation: ast.expr, default: ast.expr | None) -> dict[str, Any]:
    """Return the type and the default of an argument."""
    text = ast.unparse(annotation)
    options = [part.strip() for part in re.split(r"\|(?![^\[]*\])", text)]
    found: dict[str, Any] = {}
    if words := re.match(r"Literal\[(.*)\]", text):
        found["words"] = list(ast.literal_eval(f"[{words[1]}]"))
    elif text.startswith("tuple["):
        assert text.count(",") == 1, f"{text} is no pair"
        found["type"] = "pair"
    else:
        known = [TYPES[option] for option in options if option in TYPES]
        assert known, f"{text} is no type of a recipe"
        found["type"] = known[0]
    found |= {"optional": True} if "None" in options else {}
    if default is not None:
        value = eval(compile(ast.Expression(default), "torch", "eval"))  # a constant, as 1.0 / 3
        found["default"] = list(value) if isinstance(value, tuple) else value
    return found


def keys_of(arguments: ast.arguments) -> dict[str, Any]:
    """Return the keys of a class by name."""
    positional: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    pairs = zip(
        [*arguments.args, *arguments.kwonlyargs],
        [*positional, *arguments.defaults, *arguments.kw_defaults],
        strict=True,
    )
    return {
        argument.arg: describe(argument.annotation, default)
        for argument, default in pairs
        if argument.arg not in NOT_KEYS and argument.annotation is not None
    }


def table(sources: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the keys of each optimizer and each schedule in the sources of `torch.optim`."""
    found: dict[str, dict[str, Any]] = {"optimizers": {}, "schedules": {}}
    for section, name, arguments in signatures(sources):
        found[section][name] = keys_of(arguments)
    return found


def installed_sources() -> dict[str, str]:
    folder = Path(torch.__file__).parent / "optim"
    return {path.name: path.read_text("utf-8") for path in folder.glob("*.py")}


def released_sources(version: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder, ZipFile(download(version, Path(folder))) as wheel:
        return {
            name.rpartition("/")[2]: wheel.read(name).decode()
            for name in wheel.namelist()
            if re.fullmatch(r"torch/optim/\w+\.py", name)
        }


def render(found: dict[str, dict[str, Any]]) -> str:
    """Return the table as JSON with a class on each line."""
    sections = []
    for section, classes in found.items():
        rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(classes.items()))
        sections.append(f" {json.dumps(section)}: {{\n{rows}\n }}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


if __name__ == "__main__":
    found = table(installed_sources())
    assert table(released_sources(OLDEST)) == found, "the signatures of the releases differ"
    PATH.write_text(render(found), encoding="utf-8")
