"""The mixture of experts against a loop over tokens in float64."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.cases import also
from tests.model_zoo.moe_reference import DIM, by_tokens, layer, tokens
from trainer.model_zoo.layers.configs import MoESettings

SETTINGS = {
    "softmax": {},
    "one": {"experts_per_token": 1, "normalize": False},
    "all": {"num_experts": 4, "experts_per_token": 4},
    "sigmoid": {"score": "sigmoid", "scale": 2.5, "balance_bias": True},
    "shared": {"num_shared": 2, "normalize": False},
    "groups": {
        "num_experts": 12,
        "experts_per_token": 4,
        "groups": 4,
        "groups_per_token": 2,
        "score": "sigmoid",
        "balance_bias": True,
    },
    "groups by the best": {
        "num_experts": 12,
        "groups": 3,
        "groups_per_token": 1,
        "group_score": "max",
        "normalize": False,
    },
    "capacity": {"capacity_factor": 0.75},
    "much capacity": {"capacity_factor": 8.0},
    "sequence": {"aux_weight": 0.3, "z_weight": 0.01},
    "small logits": {"z_weight": 0.01},
    "sequence of sigmoids": {"aux_weight": 0.3, "score": "sigmoid"},
    "global": {"aux_weight": 0.3, "aux_scope": "global"},
}


def test_the_score_of_an_only_expert_is_not_divided_by_itself():
    with pytest.raises(ValueError, match="needs normalize = false"):
        MoESettings(experts_per_token=1)
    assert MoESettings(num_experts=1, experts_per_token=1).normalize


def gradients(out, moe, x):
    torch.manual_seed(2)
    return torch.autograd.grad((out * torch.randn_like(out)).sum(), [x, *moe.parameters()])


@pytest.mark.parametrize("name", SETTINGS)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(name):
    moe, x = layer(**SETTINGS[name]), tokens().requires_grad_()
    if moe.router.load is not None:
        moe.router.load.copy_(torch.rand(8) * 2)
    moe.loss_factor.fill_(0.7)
    expected, chosen, losses = by_tokens(moe, x)
    out = moe(x)
    torch.testing.assert_close(out, expected)
    torch.manual_seed(2)
    objective = (expected * torch.randn_like(expected)).sum() + 0.7 * losses
    wanted = torch.autograd.grad(objective, [x, *moe.parameters()])
    for found, each in zip(gradients(out, moe, x), wanted, strict=True):
        torch.testing.assert_close(found, each)
    counts = torch.tensor([e for each in chosen for e in each]).bincount(
        minlength=len(moe.load_counter) - 3
    )
    assert moe.load_counter[:-3].tolist() == counts.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_computed_in_the_dtype_of_tokens(dtype):
    moe, x = layer(torch.float32), tokens(dtype=dtype)
    out = moe(x)
    assert out.dtype == dtype
    expected = by_tokens(moe, x)[0]
    error = (out.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]


def test_what_is_dropped_comes_last_and_is_counted():
    moe, x = layer(capacity_factor=0.5), tokens()
    moe(x).sum().backward()
    capacity = -(-0.5 * 3 * 20 * 2 // 8)
    over = (moe.load_counter[:8] - capacity).clamp(min=0)
    assert over.sum() > 0
    assert moe.load_counter[8] == over.sum()


def test_products_may_leave_anything_behind_the_rows_of_experts():
    moe, x = layer(capacity_factor=0.5), tokens().requires_grad_()
    expected = [moe(x), *gradients(moe(x), moe, x)]
    product = moe.experts.product
    moe.experts.product = lambda x, w, offs: dirty(product, x, w, offs)
    for found, each in zip([moe(x), *gradients(moe(x), moe, x)], expected, strict=True):
        torch.testing.assert_close(found, each)


def dirty(product, x, w, offs):
    """Multiply, and leave NaN behind the last group: in the result, and in the rows' gradient."""
    end = int(offs[-1])
    clean = product(_DirtyGradient.apply(x, end), w, offs)
    return clean.masked_fill((torch.arange(len(x)) >= end).unsqueeze(1), torch.nan)


class _DirtyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, end):
        ctx.end = end
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.cat([grad[: ctx.end], torch.full_like(grad[ctx.end :], torch.nan)]), None


LENGTHS = [20, 7, 1]


def padded(moe, x):
    """Return which of [B, S, D] are tokens, and their weights; the layer knows how many."""
    is_token = torch.arange(x.shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)
    moe.token_factor.fill_(is_token.numel() / sum(LENGTHS))
    return is_token, is_token * (x.shape[1] / torch.tensor(LENGTHS).double().unsqueeze(1))


def without_padding(moe, x, is_token):
    """Return the output at tokens, [N, D], their choices, and the router's losses, of tokens alone.

    What balances each sequence is a sum over them; all else is a mean over all tokens, times their
    number.
    """
    out, chosen, losses = by_tokens(moe, x[is_token].unsqueeze(0))
    losses = len(LENGTHS) * losses
    if moe.settings.aux_weight and moe.router.load is None:
        each = [by_tokens(moe, row[:n].unsqueeze(0))[2] for row, n in zip(x, LENGTHS, strict=True)]
        losses = torch.stack(each).sum()
    return out[0], chosen, losses


@pytest.mark.parametrize("products", ["clean", "dirty"])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "sequence"])
def test_padding_changes_nothing(name, products):
    moe, x = layer(**SETTINGS[name]), tokens()
    x[1, 7:] = 1e3  # whatever is there
    x.requires_grad_()
    if moe.router.load is not None:
        moe.router.load.copy_(torch.rand(8) * 2)
    if products == "dirty":
        product = moe.experts.product
        moe.experts.product = lambda x, w, offs: dirty(product, x, w, offs)
    moe.loss_factor.fill_(0.7)
    is_token, weights = padded(moe, x)
    expected, chosen, losses = without_padding(moe, x, is_token)
    found = moe(x, weights)[is_token]
    torch.testing.assert_close(found, expected)
    torch.manual_seed(2)
    objective = (expected * torch.randn_like(expected)).sum() + 0.7 * losses
    wanted = torch.autograd.grad(objective, [x, *moe.parameters()])
    for each, gradient in zip(gradients(found, moe, x), wanted, strict=True):
        torch.testing.assert_close(each, gradient)
    counts = torch.tensor([e for each in chosen for e in each])
    assert (
        moe.load_counter[:-3].tolist()
        == counts.bincount(minlength=len(moe.load_counter) - 3).tolist()
    )
    if moe.settings.capacity_factor == 0.75:
        capacity = -(-0.75 * 2 * sum(LENGTHS) // 8)
        assert moe.load_counter[-3] == (moe.load_counter[:-3] - capacity).clamp(min=0).sum() > 0
    shares = moe.router._scores(moe.router.logits(moe.norm(x[is_token])))[1]
    entropy = -(shares * shares.log()).sum() * moe.settings.experts_per_token
    torch.testing.assert_close(moe.load_counter[-2], entropy.detach())


def test_padding_compiles_and_is_computed_again():
    torch._dynamo.reset()
    moe, x = layer(aux_weight=0.3, z_weight=0.01), tokens().requires_grad_()
    _, weights = padded(moe, x)
    expected = gradients(moe(x, weights), moe, x)
    counts = moe.load_counter.clone()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    for run in (compiled, lambda *args: checkpoint(moe, *args, use_reentrant=False)):
        moe.load_counter.zero_()
        for found, wanted in zip(gradients(run(x, weights), moe, x), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(moe.load_counter, counts)


def test_rows_of_padding_alone_are_nothing():
    moe, x = layer(aux_weight=0.3, z_weight=0.01, capacity_factor=1.0), tokens()
    out = moe(x, torch.zeros(3, 20, dtype=torch.float64))
    out.sum().backward()
    assert not out.any()
    assert not moe.load_counter.any()
    assert not any(weight.grad.any() for weight in moe.parameters())


def test_weights_of_ones_change_no_bit():
    moe, x = layer(aux_weight=0.3, z_weight=0.01), tokens().requires_grad_()
    plain, given = moe(x), moe(x, torch.ones(3, 20, dtype=torch.float64))
    assert torch.equal(plain, given)
    for found, wanted in zip(gradients(given, moe, x), gradients(plain, moe, x), strict=True):
        assert torch.equal(found, wanted)


def test_entropy_is_counted():
    moe, x = layer(), tokens()
    moe(x).sum().backward()
    shares = (moe.norm(x) @ moe.router.weight.T).softmax(-1)
    torch.testing.assert_close(moe.load_counter[9], -2 * (shares * shares.log()).sum().detach())


def test_nothing_is_counted_without_a_backward_pass_and_once_with_recomputation():
    moe, x = layer(), tokens().requires_grad_()
    moe(x)
    with torch.no_grad():
        moe(x)
    assert not moe.load_counter.any()
    for _ in range(2):
        checkpoint(moe, x, use_reentrant=False).sum().backward()
    assert moe.load_counter[:8].sum() == 2 * 3 * 20 * 2


def test_recomputation_changes_no_gradient():
    moe, x = layer(aux_weight=0.3, z_weight=0.01), tokens().requires_grad_()
    expected = gradients(moe(x), moe, x)
    found = gradients(checkpoint(moe, x, use_reentrant=False), moe, x)
    for each, wanted in zip(found, expected, strict=True):
        assert torch.equal(each, wanted)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, *also(torch.float32)])
def test_it_compiles_without_a_graph_break(name, dtype):
    torch._dynamo.reset()
    moe, x = layer(torch.float32, **SETTINGS[name]), tokens(dtype=dtype).requires_grad_()
    expected = gradients(moe(x), moe, x)
    counts = moe.load_counter.clone()
    moe.load_counter.zero_()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(gradients(compiled(x), moe, x), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert torch.equal(moe.load_counter[:-2], counts[:-2])
    torch.testing.assert_close(moe.load_counter, counts)
    gradients(compiled(x), moe, x)
    assert torch.equal(moe.load_counter[:-2], 2 * counts[:-2])


@pytest.mark.parametrize("name", SETTINGS)
def test_shapes_are_known_without_storage(name):
    moe = layer(torch.float32, **SETTINGS[name]).to("meta")
    assert moe(tokens(dtype=torch.float32).to("meta")).shape == (3, 20, DIM)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        moe.to_empty(device="cpu")
        x = torch.empty(3, 20, DIM, requires_grad=True)
        gradients(moe(x), moe, x)


def test_forced_balance_gives_every_expert_as_many_rows():
    moe = layer(force_balanced=True)
    moe(tokens()).sum().backward()
    assert moe.load_counter[:8].tolist() == [15] * 8


@pytest.mark.parametrize("name", SETTINGS)
def test_shapes_of_parameters_are_those_of_the_module(name):
    moe = layer(**SETTINGS[name])
    found = {f"mlp.{name}": tuple(weight.shape) for name, weight in moe.named_parameters()}
    assert list(found.items()) == list(moe.settings.shapes(DIM).items())


def test_products_count_what_a_token_takes():
    settings = MoESettings(num_experts=8, experts_per_token=2, expert_ffn_dim=32, num_shared=1)
    assert settings.active_parameters(16) == 16 * 8 + 3 * 3 * 16 * 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 8, "groups": 3}, "multiple of groups"),
        ({"groups": 2, "groups_per_token": 3}, "must not exceed groups"),
        ({"experts_per_token": 9}, "must not exceed the 8 experts"),
        ({"groups": 4, "experts_per_token": 3}, "must not exceed the 2 experts"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        MoESettings(**settings)
