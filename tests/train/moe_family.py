"""A decoder whose blocks have experts, and nothing else that is special: for tests alone."""

from typing import ClassVar, Literal
from unittest.mock import patch

from tests.train.plans import BASE, assembled, recipe_with, train, whole
from trainer.engine.core.registry import models
from trainer.model_zoo.grouped_query_config import GroupedQueryConfig
from trainer.model_zoo.layers.configs import MoESettings
from trainer.model_zoo.layers.moe import moe_layers
from trainer.model_zoo.layout import ATTENTION_TENSOR, ENDS_TENSOR, MOE_TENSOR, Layout


class ExpertsConfig(GroupedQueryConfig):
    """Experts in each block."""

    layout: ClassVar = Layout(
        embed="embed",
        blocks="layers",
        head="head",
        tensor={**ENDS_TENSOR, **ATTENTION_TENSOR, **MOE_TENSOR},
        context=True,
        pipeline=True,
        experts="mlp.experts",
    )
    flavors: ClassVar = {"debug": {}}
    name: Literal["experts_sample"] = "experts_sample"
    moe: MoESettings = MoESettings()
    """the experts"""


BALANCED = {"balance_bias": True, "bias_rate": 0.01, "aux_weight": 0.05, "z_weight": 1e-3}
MODEL = {
    "name": "experts_sample",
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
}


def moe_recipe(moe=BALANCED, **changes):
    """Return a recipe whose model has experts."""
    model = {**MODEL, "moe": {"expert_ffn_dim": 16, **moe}, **changes.pop("model", {})}
    data = BASE["data"] | {"packing": "documents"} | changes.pop("data", {})
    # Registered meanwhile alone: other tests list what there is.
    with patch.dict(models._places), patch.dict(models._configs):
        models.register(ExpertsConfig)
        return recipe_with(model=model, data=data, **changes)


def trained(recipe):
    """Return losses, gradient norms, and the weights and buffers that this rank has a part of."""
    parts = assembled(recipe)
    losses, norms = train(parts)
    buffers = parts.model.saved_buffers().items()
    state = {name: buffer.numpy() for name, buffer in buffers}
    measures = {name: value.item() for name, value in parts.step.balance.metrics().items()}
    return losses, norms, whole(parts.model) | state, measures


def layers_of(parts):
    return list(moe_layers(parts.model).values())
