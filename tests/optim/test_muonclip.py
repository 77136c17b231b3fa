"""MuonClip: the scores that it measures, what it does about them, and what it refuses."""

import math
from functools import partial

import pytest
import torch

from tests.cases import also
from tests.distributed import run_ranks
from tests.optim.test_muon_runs import write
from tests.train.float64 import in_float64
from tests.train.plans import BASE, assembled, recipe_with, train, whole
from trainer.engine.core.errors import RecipeError
from trainer.engine.recipe.load import load_recipe

MOST, NOPE = 0.02, 16
HEADS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 64}
MODELS = {
    "own keys": HEADS,
    "shared keys": {**HEADS, "n_kv_heads": 2},
    "biases": {**HEADS, "name": "qwen2"},
    "latent": {"name": "deepseek_v3", "flavor": "debug", "n_layers": 2, "nope_head_dim": NOPE},
    "latent queries": {"name": "deepseek_v3", "flavor": "debug", "n_layers": 2, "q_lora_rank": 16},
}


def recipe_of(model, name="muonclip", steps=1, **changes):
    optimizer = {"name": name, "lr": 0.01, "weight_decay": 0.0}
    if name == "muonclip":
        optimizer["max_score"] = MOST
    run, data = {**BASE["run"], "steps": steps}, {**BASE["data"], "micro_batch": 2}
    values = {"run": run, "data": data, "optimizer": optimizer, **changes}
    return recipe_with(model=MODELS[model], **values)


def measured_step(model):
    """Return weights after a step of muon and of muonclip, and the largest scores by block."""
    with in_float64():
        parts = assembled(recipe_of(model, "muon"))
        found = []

        def attend(base, query, key, value, mask=None, *, number, **limits):
            keys = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
            scores = torch.einsum("bshk,blhk->bhsl", query, keys) / math.sqrt(query.shape[3])
            seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
            seen = seen if mask is None else seen & mask
            largest = scores.masked_fill(~seen, -math.inf).amax((0, 2, 3))
            found.append((number, largest.detach().numpy()))
            return base(query, key, value, mask, **limits)

        for number, block in enumerate(parts.model.layers):
            block.attention.attention = partial(attend, block.attention.attention, number=number)
        train(parts, 1)
        clipped = assembled(recipe_of(model))
        train(clipped, 1)
        return whole(parts.model), whole(clipped.model), found


@pytest.mark.parametrize("model", ["shared keys", "latent", *also("own keys", "biases")])
def test_scores_above_the_limit_are_divided_by_their_excess(model):
    """arXiv:2507.20534, section 2.1 and algorithm 1; shared keys: queries alone."""
    ((muon, clipped, found),) = run_ranks(1, measured_step, model)
    assert len(found) == 4 * 2  # micro batches of two blocks
    for number in range(2):
        scores = [largest for block, largest in found if block == number]
        gamma = [min(1.0, MOST / max(heads)) for heads in zip(*scores, strict=True)]
        assert min(gamma) < 0.9
        start = f"layers.{number}.attention"
        if model == "latent":
            for h, factor in enumerate(gamma):
                before, after = (x[f"{start}.q.weight"] for x in (muon, clipped))
                before, after = (x.reshape(len(gamma), -1, x.shape[1])[h] for x in (before, after))
                nope = NOPE
                assert after[:nope] == pytest.approx(before[:nope] * factor**0.5, rel=1e-9)
                assert after[nope:] == pytest.approx(before[nope:] * factor, rel=1e-9)
            continue
        powers = {"q": 1.0, "k": 0.0, "v": 0.0} if model == "shared keys" else {
            "q": 0.5, "k": 0.5, "v": 0.0
        }  # fmt: skip
        for projection, power in powers.items():
            for kind in ("weight", "bias"):
                name = f"{start}.{projection}.{kind}"
                if name not in muon:
                    continue
                heads = len(muon[name]) // 8
                for h in range(heads):
                    rows = slice(8 * h, 8 * h + 8)
                    expected = muon[name][rows] * gamma[h] ** power
                    assert clipped[name][rows] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def trained(recipe):
    with in_float64():
        parts = assembled(recipe)
        train(parts, recipe.run.steps)
        return whole(parts.model)


PLANS = {
    "tensor": {"tensor": 2, "shard": 2},
    "context": {"context": 2, "shard": 2},
    "ring": {"context": 2, "shard": 2, "context_exchange": "ring"},
    "pipeline": {"pipeline": 2, "shard": 2},
    "replicate": {"replicate": 4, "shard": 1},
}


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["own keys", "shared keys", "latent queries"])
@pytest.mark.timeout(600)
def test_every_plan_clips_alike(model):
    (expected,) = run_ranks(1, trained, recipe_of(model, steps=3))
    for plan, parallel in PLANS.items():
        found = {}
        recipe = recipe_of(model, steps=3, parallel=parallel)
        for part in run_ranks(4, trained, recipe, timeout=300):
            found |= part
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert found[name] == pytest.approx(weight, abs=1e-9), (plan, name)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("[model]\nname = 'qwen3'", r"optimizer.name.*QK norm.*take \"muon\""),
        ("[lora]\nrank = 4", r"optimizer.name.*adapters"),
        ("max_scores = 3.0", r'optimizer.max_scores.*did you mean "max_score"'),
    ],
)
def test_what_it_cannot_clip_is_refused(keys, words, tmp_path):
    recipe = write(tmp_path)
    text = recipe.read_text().replace('name = "muon"\n', f'name = "muonclip"\n{keys}\n')
    if "[model]" in keys:
        text = text.replace("[model]\ndim", f"{keys}\ndim", 1).replace(f"{keys}\n\n", "\n")
    recipe.write_text(text)
    with pytest.raises(RecipeError, match=words):
        load_recipe(recipe)
