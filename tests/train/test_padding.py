"""Padding leaves experts alone: gradients, loads and losses are those of real tokens, under every
plan.
"""

import pytest
import torch

from tests.cases import also, quick
from tests.distributed import run_ranks
from tests.train.float64 import in_float64
from tests.train.moe_family import BALANCED, layers_of, moe_recipe, trained
from tests.train.plans import assembled, by_one_process
from tests.train.test_balance import GLOBAL, assert_same
from trainer.engine.data.batch import IGNORED

LONG = {"seq_len": 128, "packing": "none", "micro_batch": 2}  # 20 tokens a document: mostly padding
PLANS = {
    "replicate": (2, {"replicate": 2, "shard": 1}),
    "shard": (2, {"shard": 2}),
    "context": (2, {"context": 2}),  # the second rank has padding alone
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "expert": (2, {"expert": 2}),
    "expert-tensor-context": (4, {"expert": 4, "tensor": 2, "context": 2}),
    "divided-pipeline": (4, {"expert_tensor": 2, "pipeline": 2}),
}


@pytest.mark.parametrize("moe", [BALANCED, *also(GLOBAL)], ids=lambda moe: f"{len(moe)} settings")
@pytest.mark.parametrize("packing", ["none", *also("documents")])
def test_gradients_are_those_of_a_model_that_sees_no_padding(packing, moe):
    data = {"micro_batch": 3, "seq_len": 64, "packing": packing}
    share, found, expected, loads = run_ranks(1, gradients, moe_recipe(moe, data=data))[0]
    assert share > (0.5 if packing == "none" else 0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name] == pytest.approx(gradient, abs=1e-12, rel=1e-9), name
    for counted, chosen in loads:
        assert counted == chosen


def gradients(recipe):
    """Return the share of padding, a step's gradients, and those of rows cut off before padding.

    And the loads of each layer that a step counts, with those of the rows that were cut off.
    """
    with in_float64():
        parts = assembled(recipe)
        batches = next(parts.loader.steps(0))
        parts.step.weight_update._clip_norm = 0.0
        parts.step.accumulate(batches)
        weights = dict(parts.model.named_parameters())
        found = {name: weight.grad.numpy().copy() for name, weight in weights.items()}
        counted = [layer.load_counter[:-3].tolist() for layer in layers_of(parts)]
        objective, chosen = without_padding(parts, batches)
        every = torch.autograd.grad(objective, list(weights.values()))
        expected = {name: g.numpy() for name, g in zip(weights, every, strict=True)}
    padding = torch.cat([batch.padding_mask.flatten() for batch in batches])
    return padding.float().mean().item(), found, expected, list(zip(counted, chosen, strict=True))


def without_padding(parts, batches):
    """Return the mean loss of tokens + what routers add, from rows without padding, and loads."""
    routed = {}

    def note(router, args, out):
        logits = args[0].flatten(0, 1) @ router.weight.T
        routed.setdefault(router, []).append((logits, out.chosen.flatten().bincount(minlength=8)))

    for layer in layers_of(parts):
        layer.loss_factor.zero_()
        layer.router.register_forward_hook(note)
    total, labels, tokens, rows = torch.zeros(()), 0, 0, 0
    for batch in batches:
        for row in batch.split(1):
            kept = slice(0, int((~row.padding_mask).sum()))
            row = row._each(lambda _, column, kept=kept: column[:, kept])
            ids = {"positions": row.positions, "document_ids": row.document_ids}
            total = total + parts.model(
                row.tokens, labels=row.labels, loss=parts.step.task.loss, **ids
            )
            labels += int((row.labels != IGNORED).sum())
            tokens, rows = tokens + kept.stop, rows + 1
    objective, loads = total / labels, []
    for layer in layers_of(parts):
        each, settings = routed[layer.router], layer.settings
        every = torch.cat([logits for logits, _ in each])
        assert len(every) == tokens
        objective = objective + settings.z_weight * every.logsumexp(1).square().mean()
        if settings.aux_scope == "global":  # no step before: all loads are 1
            balance = every.softmax(1).mean(0).sum()
        else:
            shares = (8 * count / count.sum() @ x.softmax(1).mean(0) for x, count in each)
            balance = sum(shares) / rows
        objective = objective + settings.aux_weight * balance
        loads.append(sum(count for _, count in each).tolist())
    return objective, loads


@pytest.fixture(scope="module")
def alone():
    return by_one_process(trained, moe_recipe)


@pytest.mark.parametrize("moe", [GLOBAL, *also(BALANCED)], ids=lambda moe: f"{len(moe)} settings")
@pytest.mark.parametrize("plan", quick(PLANS, "divided-pipeline", "expert-tensor-context"))
def test_a_plan_trains_padded_rows_as_one_process_does(plan, moe, alone):
    world, parallel = PLANS[plan]
    recipe = moe_recipe(moe, data=LONG, parallel=parallel)
    assert_same(run_ranks(world, trained, recipe, timeout=290), alone(moe=moe, data=LONG))


@pytest.mark.parametrize(
    "changes",
    [
        {"data": LONG | {"micro_batch": 3}},
        *also(
            {"memory": {"recompute": "selective"}},
            {"compile": {"enabled": True, "backend": "aot_eager"}, "memory": {"recompute": "full"}},
        ),
    ],
    ids=lambda changes: "-".join(changes),
)
def test_settings_change_nothing(changes, alone):
    recipe = moe_recipe(**{"data": LONG, **changes})
    assert_same(run_ranks(1, trained, recipe, timeout=290), alone(moe=BALANCED, data=LONG))
