"""The README of each top folder names what is in it, and nothing else."""

import re

import pytest

from tests.architecture.sources import files, name
from tests.docs.walk import ROOT

FOLDERS = ("cli", "engine", "kernels", "model_zoo", "recipes", "benchmarks")
UNNAMED = {"README.md", "__init__.py", "py.typed"}


def entries(folder):
    """Return the files and folders right below a folder; a folder's name ends in a slash."""
    below = [path.relative_to(ROOT / folder) for path in files() if name(path).startswith(folder)]
    return {
        path.parts[0] + "/" * (len(path.parts) > 1) for path in below if path.name not in UNNAMED
    }


def named(folder):
    """Return every word in code style in a folder's README, without `/` at its end."""
    words = re.findall(r"`([^`\n]+)`", (ROOT / folder / "README.md").read_text("utf-8"))
    return {word.strip("/") for word in words}


@pytest.mark.parametrize("folder", FOLDERS)
def test_everything_in_a_folder_is_named(folder):
    assert {entry for entry in entries(folder) if entry.strip("/") not in named(folder)} == set()


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_every_file_that_is_named_is_there(folder):
    words = {word for word in named(folder) if re.fullmatch(r"[\w/]+\.(py|toml)", word)}
    gone = {word for word in words if not any(path.match(f"*/{word}") for path in files())}
    assert gone == set()
