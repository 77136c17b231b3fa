"""Plugins of shipped recipes are forgotten after a test."""

import sys
from contextlib import ExitStack
from unittest.mock import patch

import pytest

from trainer.engine.core.registry import models
from trainer.engine.sources.configs import sources


@pytest.fixture
def forgotten_plugins():
    """Forget the components that a recipe's plugin registers, and its module."""
    with ExitStack() as stack:
        for registry in (models, sources):
            stack.enter_context(patch.dict(registry._places))
            stack.enter_context(patch.dict(registry._configs))
        yield
    sys.modules.pop("trainer.recipes.plugins.mixer", None)
