"""The chunked loss against the formula on all logits at once."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.implementations import load_implementations
from trainer.kernels.cross_entropy import op, product, reference

IGNORED = -100
INNER = [reference.replace_by_gradient, op.fusible_replace_by_gradient]


def formula(hidden, weight, labels, z_loss=0.0):
    """Sum over counted rows of lse - logit + z * lse^2, all logits held."""
    logits = hidden @ weight.T
    lse = logits.logsumexp(-1)
    chosen = logits.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return ((lse - chosen + z_loss * lse**2) * (labels != IGNORED)).sum()


def inputs(tokens=23, width=6, vocab=11, dtype=torch.float64, weight_dtype=None, scale=1.0):
    torch.manual_seed(0)
    hidden = (torch.randn(tokens, width, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(vocab, width, dtype=torch.float64).to(weight_dtype or dtype)
    labels = torch.randint(0, vocab, (tokens,))
    labels[torch.rand(tokens) < 0.3] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2, 1.0])
@pytest.mark.parametrize("chunk", [1, 4, 23, 100])
def test_value_and_gradients_equal_the_formula(inner, z_loss, chunk):
    hidden, weight, labels = inputs()
    labels[4:8] = IGNORED  # with chunks of four, one has nothing to count
    loss = reference.linear_cross_entropy(
        hidden, weight, labels, z_loss=z_loss, chunk=chunk, inner=inner
    )
    expected = formula(hidden, weight, labels, z_loss)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss * 0.37, (hidden, weight)),
        torch.autograd.grad(expected * 0.37, (hidden, weight)),
    )


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("z_loss", [0.0, 0.5])
def test_the_loss_of_each_token_has_no_z_term(inner, z_loss):
    hidden, weight, labels = inputs()
    wanted = torch.nn.functional.cross_entropy(
        hidden @ weight.T, labels, reduction="none", ignore_index=IGNORED
    ).detach()
    with_gradient, alone = [], []
    loss = reference.linear_cross_entropy
    options = {"z_loss": z_loss, "chunk": 4, "inner": inner}
    total = loss(hidden, weight, labels, token_losses=with_gradient, **options)
    with torch.no_grad():
        loss(hidden, weight, labels, token_losses=alone, **options)
    for found in (with_gradient, alone):
        assert not any(each.requires_grad for each in found)
        torch.testing.assert_close(torch.cat(found), wanted)
    assert (total > wanted.sum() + 0.1).item() is (z_loss > 0)


@pytest.mark.parametrize("inner", INNER)
def test_gradients_equal_finite_differences(inner):
    hidden, weight, labels = inputs(tokens=5, width=3, vocab=4)

    def loss(hidden, weight):
        return reference.linear_cross_entropy(
            hidden, weight, labels, z_loss=0.1, chunk=2, inner=inner
        )

    assert gradcheck(loss, (hidden, weight))


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 2e-2),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float16, torch.float32, 2e-3),
    ],
)
def test_low_precision_keeps_dtypes_and_is_close(inner, dtype, weight_dtype, tolerance):
    hidden, weight, labels = inputs(70, 32, 50, dtype, weight_dtype, scale=0.3)
    loss = reference.linear_cross_entropy(
        hidden, weight, labels, z_loss=1e-4, chunk=16, inner=inner
    )
    assert loss.dtype == torch.float32
    loss.backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, weight_dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = formula(*exact, labels, 1e-4)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=0)
    for mine, other in zip((hidden, weight), exact, strict=True):
        assert (mine.grad - other.grad).norm() < tolerance * other.grad.norm()


@pytest.mark.parametrize("inner", INNER)
def test_rows_that_count_nothing_give_zero_loss_and_zero_gradients(inner):
    hidden, weight, labels = inputs()
    labels.fill_(IGNORED)
    loss = reference.linear_cross_entropy(hidden, weight, labels, z_loss=0.1, chunk=5, inner=inner)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad.count_nonzero() == weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("inner", INNER)
def test_a_hopeless_guess_has_a_large_but_finite_loss(inner):
    hidden = torch.tensor([[200.0, -200.0]], requires_grad=True)
    weight, labels = torch.eye(2), torch.tensor([1])
    loss = reference.linear_cross_entropy(hidden, weight, labels, inner=inner)
    loss.backward()
    assert loss.item() == 400.0
    assert hidden.grad.tolist() == [[1.0, -1.0]]


def test_weight_gradient_of_many_chunks_is_summed_in_fp32():
    torch.manual_seed(0)
    hidden = torch.randn(4096, 8).bfloat16()
    weight = (torch.randn(16, 8) * 0.1).bfloat16().requires_grad_()
    labels = torch.randint(0, 16, (4096,))
    reference.linear_cross_entropy(hidden, weight, labels, chunk=16).backward()
    exact = weight.detach().double().requires_grad_()
    formula(hidden.double(), exact, labels).backward()
    # One rounding to bf16 at the end is 2^-9 of each value; 256 roundings would be far more.
    assert (weight.grad - exact.grad).norm() < 4e-3 * exact.grad.norm()


def test_products_on_a_gpu_are_added_without_a_copy(monkeypatch):
    """The traced loss calls only our operation, and that calls only torch.addmm on a GPU."""
    shapes = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape == (4096, 16):
                shapes.append(func.name())
            return out

    with FakeTensorMode():
        options = {"dtype": torch.bfloat16, "requires_grad": True, "device": "meta"}
        hidden, weight = (torch.empty(rows, 16, **options) for rows in (96, 4096))
        labels = torch.zeros(96, dtype=torch.int64, device="meta")
        with Shapes():
            loss = reference.linear_cross_entropy(hidden, weight.float(), labels, chunk=32)
            loss.backward()
    made = [name for name in shapes if "view" not in name and "detach" not in name]
    # One buffer; its scale in place; the cast of the weight before and of its gradient after.
    assert made.count("aten::new_empty") == made.count("aten::mul_.Tensor") == 1, made
    assert not {"aten::mm", "aten::add_.Tensor", "aten::mul.Tensor"} & set(made), made

    calls = []
    monkeypatch.setattr(
        torch, "addmm", lambda total, a, b, **options: calls.append((total, a, b, options))
    )
    total, a, b = torch.empty(4, 3), OnGPU(torch.empty(4, 2)), torch.empty(2, 3)
    for is_first in (True, False):
        product._write_wide_product._init_fn(total, a, b, is_first)
    for (given, *_, options), beta in zip(calls, (0, 1), strict=True):
        assert given is options["out"] is total
        assert (options["beta"], options["out_dtype"]) == (beta, torch.float32)


def test_products_on_a_cpu_need_no_operation_of_ours(monkeypatch):
    """The first call of one imports torch's compiler."""
    monkeypatch.setattr(product, "_write_wide_product", lambda *_: pytest.fail("an operation"))
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(8, 3).bfloat16()
    total = product.add_product(product.add_product(None, a, b), a, b)
    torch.testing.assert_close(total, 2 * (a.float() @ b.float()), rtol=2**-7, atol=1e-2)


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_without_gradients_no_gradient_work_is_done(monkeypatch):
    hidden, weight, labels = inputs()
    monkeypatch.setattr(reference, "add_product", lambda *_: pytest.fail("gradient work"))
    with torch.no_grad():
        loss = reference.linear_cross_entropy(hidden, weight, labels, chunk=4)
    torch.testing.assert_close(loss, formula(hidden, weight, labels).detach())
    assert not loss.requires_grad
    frozen = reference.linear_cross_entropy(hidden, weight.detach(), labels, chunk=4)
    frozen.backward()
    assert hidden.grad is not None


def test_all_logits_are_never_held():
    tokens, vocab = 512, 4096
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocab, 8, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    with Largest() as largest:
        reference.linear_cross_entropy(hidden, weight, labels, chunk=64).backward()
    assert largest.elements == 64 * vocab


def test_the_compiled_loss_equals_the_reference(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f: _dynamo(f, backend="aot_eager"))
    op.compiled_inner.cache_clear()
    loss = load_implementations("linear_cross_entropy")["compiled"]
    for tokens in (40, 33):
        hidden, weight, labels = inputs(tokens, dtype=torch.float32)
        results = []
        for function in (loss, reference.linear_cross_entropy):
            value = function(hidden, weight, labels, z_loss=0.1, chunk=16)
            results.append((value, *torch.autograd.grad(value, (hidden, weight))))
        torch.testing.assert_close(*results)
    op.compiled_inner.cache_clear()


_dynamo = torch.compile
