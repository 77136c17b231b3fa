import gc
import os
import signal
import sys
from contextlib import ExitStack
from unittest.mock import patch

import pytest

from trainer.engine.core.registry import models
from trainer.engine.recipe.schema import REGISTRIES
from trainer.engine.sources.configs import sources

# Hundreds of processes import our modules: let the first one leave what it compiled.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Two workers on two cores: more threads only wait for each other. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Under nohup, or in the background of a script, these are ignored, by children too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--shard", metavar="K/N", help="run every N-th of the tests, from the K-th")


@pytest.hookimpl(trylast=True)  # after `-m` has deselected others, so that shards are equal
def pytest_collection_modifyitems(config, items):
    if shard := config.getoption("--shard"):
        k, n = map(int, shard.split("/"))
        chosen = items[k - 1 :: n]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


def pytest_collection_finish():
    """Freeze the objects that exist before the first test: garbage collections skip them.

    A run in this process collects as it starts, and over all modules that takes a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def without_tracebacks():
    """Forget `--traceback` after a test: the word is in the environment, for the ranks to see."""
    yield
    os.environ.pop("TRAINER_TRACEBACK", None)


def registered():
    """Return how many components each registry has: to list their names for each test is slow."""
    return {kind: len(registry._places) for kind, registry in REGISTRIES.items()}


@pytest.fixture(autouse=True)
def without_left_components():
    """Fail a test that leaves a plugin's component registered: later tests would meet it."""
    before = registered()
    yield
    assert registered() == before, "a component of a plugin stayed registered in this process"


@pytest.fixture
def forgotten_plugins():
    """Forget the components that the plugin of a shipped recipe registers, and its module."""
    with ExitStack() as stack:
        for registry in (models, sources):
            stack.enter_context(patch.dict(registry._places))
            stack.enter_context(patch.dict(registry._configs))
        yield
    sys.modules.pop("trainer.recipes.plugins.mixer", None)
