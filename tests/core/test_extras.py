"""Messages and pages name commands that install extras of this package, and of no other."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import tomli

from trainer.engine.core import extras
from trainer.engine.core.extras import DISTRIBUTION, install_command

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = ("README.md", "CONTRIBUTING.md", "docs", "recipes", "engine", "cli", "model_zoo", "kernels")


def texts():
    for name in TEXTS:
        files = [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*")
        for path in files:
            if path.suffix in {".md", ".toml", ".py"}:
                yield path, path.read_text("utf-8")


def test_the_distribution_has_a_name_of_its_own():
    """PyPI's "trainer" is another project's package."""
    assert PROJECT["name"] == DISTRIBUTION != "trainer"


def test_every_text_names_this_distribution_and_extras_that_it_has():
    known, found = PROJECT["optional-dependencies"], 0
    for path, text in texts():
        for name, listed in re.findall(r"""["'` ](\.|trainer[\w-]*)\[([a-z0-9,]+)\]""", text):
            assert name in {".", DISTRIBUTION}, f"{path}: {name}[{listed}]"
            assert set(listed.split(",")) <= known.keys(), path
            found += 1
    assert found > 8


def test_sources_that_are_not_installed_are_named_by_their_folder(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "version", version)
    assert install_command("hf") == f'pip install -e "{ROOT}[hf]"'


def test_an_installed_distribution_is_named(monkeypatch):
    monkeypatch.setattr(extras, "version", lambda name: "0.1.0")
    assert install_command("hf") == 'pip install "trainer-nd[hf]"'


@pytest.mark.matrix
def test_pip_takes_extras_from_what_is_installed():
    """Nothing is looked up: without an index, pip finds the extra's packages."""
    try:
        extras.version(DISTRIBUTION)
    except PackageNotFoundError:
        pytest.skip("trainer runs from its sources")
    words = "install", "--dry-run", "--no-index", f"{DISTRIBUTION}[hf]"
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"Requirement already satisfied: {DISTRIBUTION}[hf]" in done.stdout
