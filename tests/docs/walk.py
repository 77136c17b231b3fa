"""Follows the blocks of a document, one after the other, in a folder of their own."""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from tests.docs.blocks import shape
from tests.docs.warm import start_server
from trainer.cli.main import main
from trainer.engine.recipe.load import load_recipe

ROOT = Path(trainer.__file__).resolve().parent
# What takes a minute or more runs for a few steps; all else is run as it is written.
SHORTER = {
    "recipes/quickstart.toml": "--set run.steps=21 --set metrics.interval=20 "
    "--set data.global_batch=4 --set evaluate.interval=20 --set evaluate.steps=1",
}
FILES = ("text", "json", "jsonl", "jinja")
# Only what hangs takes so long, however busy the machine is.
TIMEOUT_SECONDS = 600


class Walk:
    """Follows a document from its first block to its last, in one folder."""

    def __init__(self, folder):
        self.folder = folder / "clone"
        shutil.copytree(ROOT / "recipes", self.folder / "recipes")
        self.prepare(folder)

    def prepare(self, folder):
        """Make the programs and the environment of commands."""
        programs = folder / "programs"
        programs.mkdir()
        python = programs / "python"
        python.write_text(
            f'#!/bin/sh\nPYTHONPATH="{ROOT}/.dev:$PYTHONPATH" exec "{sys.executable}" "$@"\n'
        )
        python.chmod(0o755)
        self.server = start_server(programs / "trainer", ROOT / ".dev")
        self.environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTHONPATH": "",
        }

    def close(self):
        """End the server that runs its commands."""
        self.server.kill()
        self.server.join()

    def follow(self, block):
        """Do what a block says."""
        if block.language in ("console", "sh"):
            for command, promised in block.commands():
                if "no-run" in block.words:
                    check_options(command)
                else:
                    self.check_command(command, promised, block)
        elif block.language == "toml":
            self.check_recipe(block)
        elif block.language == "python":
            module = block.file_name or "example.py"
            (self.folder / module).write_text(block.text)
            if "no-run" not in block.words:
                self.run(f"PYTHONPATH=. python {module}")
        else:
            assert block.language in FILES, f"no test knows a block of {block.language!r}"
            if block.file_name:
                (self.folder / block.file_name).write_text(block.text)

    def run(self, command, exit_code=0):
        """Run a command line and return the lines that it prints."""
        for recipe, options in SHORTER.items():
            command = command.replace(f"trainer run {recipe}", f"trainer run {recipe} {options}")
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
        assert done.returncode == exit_code, f"{command}\n{done.stdout}"
        return done.stdout.splitlines()

    def check_command(self, command, promised, block):
        """Run a command and compare what it prints, but for the numbers."""
        if command.startswith("make "):
            printed = self.follow_make(command)
        elif command.startswith("python -m pytest "):
            check_paths(command)
            return
        else:
            printed = self.run(command, block.exit_code)
        if "varies" not in block.words:
            shapes = [shape(line) for line in printed]
            missing = [line for line in promised if shape(line) not in shapes]
            assert not missing, "\n".join(["not printed:", *missing, "but:", *printed])

    def follow_make(self, command):
        """Check that the target exists; run what it runs with `trainer`."""
        done = subprocess.run(
            ["make", "-n", *command.split()[1:]],
            cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed = []
        for line in done.stdout.splitlines():
            if re.match(r"\S+/trainer ", line):
                printed += [line, *self.run(line[line.index("trainer ") :])]
        return printed

    def check_recipe(self, block):
        """Validate a recipe, or a part of one."""
        path = self.folder / (block.file_name or "part.toml")
        path.write_text(block.text)
        if "invalid" in block.words:
            return
        if not block.file_name:
            (self.folder / "base.toml").write_text("[run]\nsteps = 10\n")
            path.write_text(f'extends = ["base.toml"]\n{block.text}')
        self.run(f"PYTHONPATH=. trainer validate {path.name}")


class Reading(Walk):
    """Reads a document as far as it goes without running it: commands' options, and recipes."""

    def prepare(self, folder):
        """Commands are not run."""

    def close(self):
        """There is no server."""

    def run(self, command, exit_code=0):
        """Check a command line's options."""
        check_options(command)
        return []

    def check_command(self, command, promised, block):
        """Check a command; nothing is printed that could be compared."""
        super().check_command(command, [], block)

    def check_recipe(self, block):
        """Validate a recipe, or a part of one, in this process."""
        super().check_recipe(block)
        if "invalid" not in block.words and "plugin" not in block.text:
            with contextlib.chdir(self.folder):
                load_recipe(Path(block.file_name or "part.toml"))


def check_options(command):
    """Check the options of each `trainer ...` in a command line, by asking for its help as well.

    Of any other program that is ours, check that it is there.
    """
    for script in re.findall(r"benchmarks/\w+\.py\b", command):
        assert (ROOT / script).exists(), command
    words = shlex.shlex(command, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    for separator, part in itertools.groupby(words, lambda word: set(word) <= set("();<>|&")):
        line = list(part)
        if not separator and "trainer" in line:
            with pytest.raises(SystemExit) as stop:
                main([*line[line.index("trainer") + 1 :], "--help"])
            assert stop.value.code == 0, line


def check_paths(command):
    """Check that what a pytest command names is there; the suite runs it."""
    for word in shlex.split(command)[3:]:
        assert word.startswith("-") or (ROOT / word.partition("::")[0]).exists(), command
