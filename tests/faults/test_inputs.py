"""A thousand damaged files of every kind: each is refused, or read; none is a traceback.

Two thousand damaged recipes are in tests/recipes/test_mutations.py.
"""

import random
import shutil
import time

import pytest

from tests.faults.inputs import COMMANDS, assert_foreseen, damage, flip, invoke, make_inputs

SECONDS = 20.0
"""CPU time of one command; far above what any needs, and far below what a bomb takes"""
CHECKED = [name for name in COMMANDS if name.startswith(("runs/tiny/checkpoints", "tokens"))]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return a folder with whole inputs; the caches of this module's commands are beside it."""
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        make_inputs(folder)
        yield folder


def attack(inputs, name, seed):
    """Damage one file, run one command that reads it, and put the file back."""
    path = inputs / name
    whole = path.read_bytes()
    out = inputs / "out"
    command = random.Random(seed).choice(COMMANDS[name]).format(out=f"out/{seed}")
    out.mkdir()
    try:
        damage(path, seed)
        before = time.process_time()
        assert_foreseen(command, *invoke(command))
        assert time.process_time() - before < SECONDS, command
    finally:
        path.write_bytes(whole)
        shutil.rmtree(out)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_read_what_is_whole(inputs, name):
    for index, command in enumerate(COMMANDS[name]):
        code, out, err = invoke(command.format(out=f"whole-{name.replace('/', '-')}-{index}"))
        assert code == 0, (command, out, err)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_few_damaged_files_are_refused_or_read(inputs, name):
    for seed in range(3):
        attack(inputs, name, seed)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMMANDS)
def test_many_damaged_files_are_refused_or_read(inputs, name):
    for seed in range(100, 170):
        attack(inputs, name, seed)


@pytest.mark.parametrize("name", CHECKED)
def test_a_flip_in_a_file_with_a_checksum_is_never_accepted(inputs, name):
    path = inputs / name
    whole = path.read_bytes()
    dice = random.Random(name)
    command = "data inspect tokens" if name.startswith("tokens") else "checkpoint verify runs/tiny"
    try:
        for _ in range(20):
            path.write_bytes(flip(whole, dice))
            code, out, err = invoke(command)
            assert_foreseen(command, code, out, err)
            assert code != 0, (name, out)
    finally:
        path.write_bytes(whole)
