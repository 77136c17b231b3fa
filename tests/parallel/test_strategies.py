"""A plugin's FSDP strategy is named in recipes as ours are, and does what its attributes say."""

from typing import Literal
from unittest.mock import patch

import pytest
from pydantic import ValidationError

from tests.distributed import run_ranks
from tests.train.plans import curves, recipe_with
from trainer.engine.parallel import fsdp
from trainer.engine.parallel.tables import Parallel
from trainer.plugins import Strategy, strategies


class Pairs(Strategy):
    """Keeps gathered weights on pairs of ranks between forward and backward."""

    name: Literal["pairs"] = "pairs"
    reshard_after_forward = 2


def curves_and_arguments(strategy):
    """Return the curves of a run, and what FSDP2 was told about each unit."""
    strategies.register(Pairs)
    recipe = recipe_with(parallel={"fsdp": {"strategy": strategy}})
    with patch.object(fsdp, "fully_shard", wraps=fsdp.fully_shard) as shard:
        found = curves(recipe)
    return found, [call.kwargs["reshard_after_forward"] for call in shard.call_args_list]


def test_a_strategy_of_a_plugin_decides_what_is_resharded():
    (ours, freed), (theirs, kept) = (
        run_ranks(4, curves_and_arguments, strategy)[0] for strategy in ("full_shard", "pairs")
    )
    assert freed == [True, True, False, False], "two blocks, the head, the root"
    assert kept == [2, 2, False, False]
    assert theirs == ours


def test_an_unknown_strategy_is_refused_with_those_that_are_known():
    with pytest.raises(ValidationError, match=r"'full_shard', 'hybrid_shard'.*or 'shard_grad_op'"):
        Parallel.model_validate({"fsdp": {"strategy": "pair"}})
