"""The head of a task: what is computed, counted and dropped, and that ranks agree on it."""

import pytest
import torch

from tests.distributed import run_ranks
from tests.model_zoo.peers import built, tokens
from trainer.engine.parallel.materialize import materialize, without_storage
from trainer.engine.parallel.plan import make_plan
from trainer.engine.parallel.tables import Parallel
from trainer.kernels.choose import choose
from trainer.model_zoo.deepseek_v3.config import DeepSeekV3Config
from trainer.model_zoo.heads import HeadSettings
from trainer.model_zoo.layers.dropout import drop
from trainer.model_zoo.llama3.config import Llama3Config
from trainer.model_zoo.qwen3.config import Qwen3Config

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 61, "init_std": 0.2}
HEAD = HeadSettings(outputs=3, bias=True)


def config_of(head=HEAD, **changes):
    return Llama3Config.model_validate(SIZES | changes).with_head(head)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["token_classification", "question_answering"])
def test_a_loss_takes_the_logits_of_a_linear_layer_over_normed_hidden_states(kind, tied):
    head = HeadSettings(kind=kind, outputs=3, bias=True)
    model = built(config_of(head, tie_embeddings=tied))
    x = tokens()
    hidden = model(x, blocks=range(2))
    weight, bias = (p.double() for p in model.head.get_submodule(head.layer).parameters())
    scale = model.head.norm.weight.double()
    wide = hidden.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale
    expected = normed @ weight.T + bias
    torch.testing.assert_close(model(x).double(), expected, rtol=1e-5, atol=1e-5)
    seen = []
    out = model(x, labels=x, loss=lambda *given: seen.extend(given) or given[0].sum())
    assert [each.shape for each in seen] == [(2, 33, 3)]
    torch.testing.assert_close(out.double(), expected.sum(), rtol=1e-4, atol=1e-4)


def test_parameters_start_and_are_counted_as_the_config_says():
    config = config_of(HeadSettings(outputs=500, bias=True), init_std=0.02)
    model = built(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shapes == config.parameter_shapes()
    assert list(shapes)[-2:] == ["head.score.weight", "head.score.bias"]
    assert not model.head.score.bias.any()
    assert model.head.score.weight.std().item() == pytest.approx(0.02, rel=0.05)
    more = config.flops_per_token(16) - config.with_head(None).flops_per_token(16)
    assert more == 6 * 32 * (500 - 61)
    assert config.with_head(None) == Llama3Config.model_validate(SIZES | {"init_std": 0.02})


def test_a_recipe_does_not_see_the_head():
    assert config_of().model_dump() == config_of(None).model_dump()
    assert config_of() != config_of(None)
    assert config_of().with_vocab(7).task_head == HEAD


def test_predictions_of_further_tokens_go_with_the_language_head():
    sizes = {**SIZES, "mtp_depth": 1}
    config = DeepSeekV3Config.model_validate(sizes)
    assert config.predictions == 1
    headed = config.with_head(HEAD)
    assert headed.predictions == 0
    assert not headed.shares_embedding
    model = built(headed).train()
    assert len(model.layers) == 2
    assert model(tokens(), labels=tokens(), loss=torch.sum).ndim == 0


def test_what_dropout_zeroes_depends_on_the_position_s_key_alone():
    x = torch.ones(4, 50, 64)
    keys = torch.randint(-(2**63), 2**63 - 1, (4, 50), generator=torch.Generator().manual_seed(0))
    dropped = drop(x, 0.25, keys)
    zeros = dropped == 0
    assert zeros.float().mean().item() == pytest.approx(0.25, abs=0.015)
    assert zeros.float().mean((0, 1)).std() < 0.05
    assert torch.equal(dropped[~zeros], torch.full_like(dropped[~zeros], 4 / 3))
    assert torch.equal(drop(x[1:, 7:9], 0.25, keys[1:, 7:9]), dropped[1:, 7:9])
    assert len(zeros.flatten(0, 1).unique(dim=0)) == 200
    # Keys that are neighbours have nothing to do with each other.
    near = drop(x, 0.25, torch.arange(200).view(4, 50)) == 0
    both = (near[:, 1:] & near[:, :-1]).float().mean().item()
    assert both == pytest.approx(0.25**2, abs=0.01)


def test_dropout_is_for_training_and_repeats_with_its_keys():
    model = built(config_of(HeadSettings(outputs=3, dropout=0.5))).train()
    x, keys = tokens(), torch.arange(66).view(2, 33)
    once = model(x, dropout_keys=keys)
    assert torch.equal(once, model(x, dropout_keys=keys))
    assert not torch.equal(once, model(x, dropout_keys=keys + 1))
    assert not torch.equal(once, model.eval()(x, dropout_keys=keys))


def gradients(ranks):
    """Return the logits, and every gradient of a loss over them, whole."""
    device, kernels = torch.device("cpu"), choose({}, "cpu", 32)
    config = Qwen3Config.model_validate(SIZES).with_head(HEAD)
    plan = None
    if ranks > 1:
        rank = torch.distributed.get_rank()
        plan = make_plan(Parallel(tensor=ranks, shard=1), rank, ranks, device)
        kernels = plan.kernels(kernels, config)
    with without_storage():
        model = config.build(kernels)
    if plan:
        parts = plan.split(model, config, torch.float32, torch.float32)
    materialize(model, device, seed=4)
    reductions = []
    if plan:
        wrapped = plan.parallelize(model, parts, torch.float32, num_positions=32, micro_batches=1)
        reductions = wrapped.post_backward_reductions
    logits = []
    model(tokens(2, 32), loss=lambda x: logits.append(x) or x.square().sum()).backward()
    for reduce in reductions:
        reduce()
    whole = {n: p.grad.full_tensor() if plan else p.grad for n, p in model.named_parameters()}
    return logits[0].detach().numpy(), {name: grad.numpy() for name, grad in whole.items()}


def test_tensor_ranks_compute_the_gradients_of_one_process():
    (logits, found), _ = run_ranks(2, gradients, 2)
    expected_logits, expected = gradients(1)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        scale = abs(grad).max()
        torch.testing.assert_close(found[name] / scale, grad / scale, rtol=1e-4, atol=1e-5)
