"""Rows that tensor ranks gather in float8 are those that projections in float8 multiply."""

import pytest
import torch

from tests.distributed import run_ranks
from tests.precision.test_products import rounded
from tests.precision.test_training import MODEL, ON
from tests.train.plans import BASE, assembled, recipe_with, train
from trainer.engine.core.local import local
from trainer.engine.estimate.simulate.build import step_batches
from trainer.engine.estimate.simulate.count import count_step
from trainer.engine.estimate.simulate.extrapolate import count_ranks
from trainer.engine.parallel.tensor.float8_gather import pack_rows, unpack_rows
from trainer.engine.precision.choose import float8_layers
from trainer.engine.precision.tables import Float8
from trainer.model_zoo.llama3.config import Llama3Config
from trainer.model_zoo.olmo2.config import Olmo2Config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_arrives_is_on_the_grid_and_rounding_it_again_changes_nothing(dtype):
    x = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-12, 12, 40).unsqueeze(1)  # rows of every size
    x[0, 0], x[1, 1, 1:] = 0.0, 0.0
    x[2, 2] = 224.5  # rounds down to a value whose own scale is twice as large
    x = x.to(dtype)
    packed = pack_rows(x)
    assert (packed.dtype, packed.shape) == (torch.uint8, (3, 40, 68))
    found = unpack_rows(packed, dtype)
    assert found.dtype is dtype
    assert torch.equal(found.float(), rounded(x.float(), -1, power=True).float())
    assert torch.equal(unpack_rows(pack_rows(found), dtype), found)


def recipe(gathers, kind, **changes):
    float8 = ON | {"gather_activations": gathers, "recipe": kind}
    changes = {"parallel": {"tensor": 2}, "optimizer": {"name": "sgd", "clip_norm": 0}} | changes
    data = BASE["data"] | {"micro_batch": 4}
    precision = {"compute": "fp32", "float8": float8}
    return recipe_with(**({"model": MODEL, "data": data, "precision": precision} | changes))


def first_gradients(recipes):
    """Return loss, gradients and counts of the first step of each recipe."""
    found = []
    for each in recipes:
        parts = assembled(each)
        loss = parts.step.accumulate(next(parts.loader.steps(0)), 1.0).loss.item()
        named = parts.model.named_parameters()
        gradients = {name: local(weight.grad).numpy().copy() for name, weight in named}
        parts.step.clear()
        batches = step_batches(each.data, parts.step, parts.plan)
        found.append((loss, gradients, count_step(parts.step, batches, parts.world.rank)))
    return found


def simulated(recipes):
    return [next(iter(count_ranks(each, 2, 257, on_gpu=False, whole=True))) for each in recipes]


TAKERS = ("q", "k", "v", "gate", "up")


CASES = {
    "norms": ("rowwise", {}),
    "inputs, recomputed": (
        "rowwise",
        {"model": {**MODEL, "name": "olmo2"}, "memory": {"recompute": "full"}},
    ),
    "gradients of weights in fp32": ("rowwise_with_gw_hp", {}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", list(CASES))
def test_losses_are_the_same_bits_and_fewer_bytes_travel(case):
    pytest.importorskip("torchao")
    kind, changes = CASES[case]
    recipes = [recipe(gathers, kind, **changes) for gathers in (False, True)]
    real = run_ranks(2, first_gradients, recipes, timeout=280)
    for (loss, gradients, plain), (same, others, narrow) in real:
        assert loss == same
        for name, gradient in gradients.items():
            distance = abs(others[name] - gradient).max() / abs(gradient).max()
            # Gradients of weights take the rows once more. In float8, columns have other scales,
            # but the same grid, apart from the smallest values; in fp32, the rows were not rounded.
            if name.split(".")[-2] not in TAKERS:
                assert distance == 0, name
            elif kind == "rowwise":
                assert distance < 1e-4, name
            else:
                assert 1e-4 < distance < 2**-4, name
        gathers = 2 * (2 if "memory" in changes else 1)
        saved = gathers * (8 * 32 // 2) * (64 * 4 - (64 + 4))
        assert plain.message_bytes.total() - narrow.message_bytes.total() == saved
        assert plain.calls == narrow.calls
    (told,) = run_ranks(1, simulated, recipes, timeout=280)
    assert told == [real[0][0][2], real[0][1][2]]


def first_losses(recipes):
    return [train(assembled(each), 2)[0] for each in recipes]


@pytest.mark.matrix
def test_compiled_layers_gather_the_same_rows():
    pytest.importorskip("torchao")
    compiled = {"compile": {"enabled": True, "backend": "aot_eager"}}
    recipes = [recipe(True, "rowwise"), recipe(True, "rowwise", **compiled)]
    for eager, found in run_ranks(2, first_losses, recipes, timeout=280):
        assert found == pytest.approx(eager, rel=1e-6)


def test_layers_that_a_pattern_leaves_gather_as_before():
    every = Float8(enabled=True, gather_activations=True)
    layers = {f"layers.{i}.{half}" for i in range(2) for half in ("attention", "mlp")}
    for config in (Llama3Config(n_layers=2), Olmo2Config(n_layers=2)):
        assert float8_layers(every, config) >= layers
    some = every.model_copy(update={"exclude": ["*.k.weight", "layers.1.mlp.gate.*"]})
    assert float8_layers(some, Llama3Config(n_layers=2)) == {"layers.0.mlp"}
    rows = every.model_copy(update={"exclude": ["*.o.weight", "*.down.weight"]})
    assert float8_layers(rows, Llama3Config(n_layers=2)) == layers
    assert not float8_layers(Float8(enabled=True), Llama3Config(n_layers=2))
    assert not float8_layers(Float8(gather_activations=True), Llama3Config(n_layers=2))


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        (
            "[parallel]\ntensor = 2\nasync_tensor = true\n[compile]\nenabled = true",
            "parallel.async_tensor overlaps gathers that products follow at once",
            "leave out one of the two",
        ),
        (
            'recipe = "tensorwise"',
            "a scale for all rows is not known before they are gathered",
            'take recipe = "rowwise", or leave it out',
        ),
        (
            'exclude = ["*.q.weight", "*.up.weight"]',
            "no layer has all of its projections in float8",
            "let targets match all projections of a layer",
        ),
    ],
)
def test_what_cannot_be_gathered_in_float8_is_refused(settings, message, hint, tmp_path):
    from trainer.engine.core.errors import RecipeError
    from trainer.engine.recipe.load import load_recipe

    path = tmp_path / "a.toml"
    float8 = f"[precision.float8]\nenabled = true\ngather_activations = true\n{settings}\n"
    path.write_text(f'[run]\nsteps = 1\n[precision]\ncompute = "bf16"\n{float8}')
    with pytest.raises(RecipeError) as refused:
        load_recipe(path)
    (problem,) = refused.value.problems
    assert (problem.key, problem.message) == ("precision.float8.gather_activations", message)
    assert problem.hint == hint
