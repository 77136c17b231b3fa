"""Every family with experts can balance by biases (arXiv:2408.15664), and none does unasked."""

import pytest
import torch

from tests.conversion.models import VARIANTS
from tests.distributed import run_ranks
from tests.formats.hf_folders import config_of
from tests.model_zoo.peers import built
from tests.train.moe_family import trained
from tests.train.plans import BASE, by_one_process, recipe_with
from trainer.engine.conversion.source_weights import hf_parts
from trainer.engine.core.errors import CheckpointError
from trainer.model_zoo.layers.moe import moe_layers

FAMILIES = ["experts", "mixtral", "llama4", "gpt_oss"]
PLANS = {
    "expert": (2, {"expert": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "replicate": (2, {"replicate": 2, "shard": 1}),
    "divided": (4, {"expert": 2, "expert_tensor": 2}),
}
CASES = [
    pytest.param(family, plan, marks=[] if (family, plan) == quick else [pytest.mark.matrix])
    for quick in [("mixtral", "expert")]
    for family in FAMILIES
    for plan in PLANS
]


def config(family, **moe):
    sizes = VARIANTS[family]
    return config_of(**{**sizes, "moe": {**sizes["moe"], **moe}})


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_choose_experts_and_leave_the_weights_alone(family):
    tokens = torch.arange(34).view(2, 17)
    plain, biased = built(config(family)), built(config(family, balance_bias=True))
    assert not any(
        "bias" in name for name, _ in moe_layers(plain)["layers.1.mlp"].router.named_buffers()
    )
    with torch.no_grad():
        assert torch.equal(plain(tokens), biased(tokens))
        for router in (layer.router for layer in moe_layers(biased).values()):
            router.bias.copy_(torch.linspace(-0.5, 0.5, len(router.bias)))
            x_1TD = torch.randn(1, 40, router.weight.shape[1])
            logits = x_1TD[0].double() @ router.weight.double().T
            scores = logits.sigmoid() if family == "llama4" else logits.softmax(1)
            chosen = (scores + router.bias).topk(router.settings.experts_per_token).indices
            weight = scores.gather(1, chosen)
            if family != "llama4":
                weight = weight / weight.sum(1, keepdim=True)
            found = router(x_1TD)
            assert torch.equal(found.chosen, chosen)
            torch.testing.assert_close(found.weight.double(), weight, atol=1e-6, rtol=1e-6)
        assert not torch.equal(plain(tokens), biased(tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_a_place_for_biases_is_refused_by_the_keys_name(family):
    for value in (False, True):
        found = config(family, balance_bias=value)
        shapes = found.parameter_shapes()
        if not value:
            assert hf_parts(shapes, found)
            continue
        with pytest.raises(CheckpointError, match=r"moe\.balance_bias must be False, not True"):
            hf_parts(shapes, found)


def recipe(family, parallel=None):
    sizes = {"name": VARIANTS[family]["name"], "ffn_dim": 64 if family == "llama4" else None}
    model = {**BASE["model"], **sizes, "moe": {"balance_bias": True, "bias_rate": 0.01}}
    if family == "llama4":
        model |= {"moe_every": 1, "moe": {**model["moe"], "num_shared": 1, "score": "sigmoid"}}
        model["moe"] |= {"normalize": False, "experts_per_token": 1}
    model = {key: value for key, value in model.items() if value is not None}
    data = {**BASE["data"], "packing": "documents"}
    return recipe_with(model=model, data=data, parallel=parallel or {})


@pytest.fixture(scope="module")
def alone():
    return by_one_process(trained, lambda of: recipe(of))


@pytest.mark.parametrize(("family", "plan"), CASES)
def test_a_plan_moves_biases_as_one_process_does(family, plan, alone):
    world, parallel = PLANS[plan]
    losses, norms, state, _ = alone(of=family)
    together = {}
    for rank in run_ranks(world, trained, recipe(family, parallel)):
        assert rank[0] == pytest.approx(losses, abs=1e-5, rel=1e-5)
        assert rank[1] == pytest.approx(norms, abs=1e-5, rel=1e-5)
        together |= rank[2]
    biases = [name for name in state if name.endswith("router.bias")]
    assert len(biases) == 2
    for name, value in state.items():
        if name in biases:
            assert (together[name] == value).all(), name
            assert value.any()
        else:
            assert together[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
