"""Operations that read rows and write rows, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_cases.case import Case, compiled
from torch import Tensor

from trainer.kernels.cross_entropy import op as loss_op
from trainer.kernels.cross_entropy import reference as loss
from trainer.kernels.quantize import op as quantize_op
from trainer.kernels.quantize import reference as quantize
from trainer.kernels.rms_norm import op as norm_op
from trainer.kernels.rms_norm import reference as norm
from trainer.kernels.rotary import op as rotary_op
from trainer.kernels.rotary import reference as rotary
from trainer.kernels.swiglu import op as swiglu_op
from trainer.kernels.swiglu import reference as swiglu

# rows, width of the model, of the feed-forward layer, heads, width of a head, vocabulary
SIZES = {
    "dry": (16, 128, 96, 2, 16, 50),
    "quick": (32768, 4096, 14336, 32, 128, 128256),
    "full": (32768, 4096, 14336, 32, 128, 128256),
}
SAMPLE = 64
EPS = 1e-5


def cases(suite: str, device: str) -> Iterator[Case]:
    """Yield the operations of a suite; each but the quantisation there and back."""
    T, D, F, H, K, V = SIZES[suite]

    def tensors(*shapes: tuple[int, ...]) -> Callable[[int], tuple[Any, ...]]:
        def make(seed: int) -> tuple[Any, ...]:
            generator = torch.Generator(device).manual_seed(seed)
            return tuple(
                torch.randn(s, generator=generator, device=device).bfloat16().requires_grad_()
                for s in shapes
            )

        return make

    def rotated(seed: int) -> tuple[Any, ...]:
        (x,) = tensors((1, T, H, K))(seed)
        angles = torch.rand(T, 1, K // 2, device=device)
        return x, angles.cos(), angles.sin()

    def labelled(seed: int) -> tuple[Any, ...]:
        hidden, weight = tensors((T // 2, D), (V, D))(seed)
        labels = torch.randint(0, V, (T // 2,), device=device)
        return hidden, (weight.detach() / D**0.5).requires_grad_(), labels

    def plain(function: Callable[..., Any], ours: Callable[..., Any]) -> dict[str, Any]:
        """Return torch's own, what torch.compile makes of it, and ours, there and back."""
        found = {"torch": function, "compiled": compiled(function, device), "ours": ours}
        return {name: _there_and_back(each) for name, each in found.items()}

    norm_of = lambda f: lambda x, w: f(x, w, EPS)  # noqa: E731
    # There: one read, one write. Back: two reads and a write for each input and gradient of rows.
    yield Case(
        "rms_norm", "Llama 3 8B", tensors((T, D), (D,)),
        plain(norm_of(norm.rms_norm), norm_of(norm_op.rms_norm)),
        lambda x, w: norm.rms_norm(x[:SAMPLE].double(), w.double(), EPS),
        bytes=5 * 2.0 * T * D, sizes={"T": T, "D": D},
    )  # fmt: skip
    yield Case(
        "swiglu", "Llama 3 8B", tensors((T, F), (T, F)), plain(swiglu.swiglu, swiglu_op.swiglu),
        lambda gate, up: swiglu.swiglu(gate[:SAMPLE].double(), up[:SAMPLE].double()),
        bytes=8 * 2.0 * T * F, sizes={"T": T, "F": F},
    )  # fmt: skip
    yield Case(
        "rotary", "Llama 3 8B", rotated, plain(rotary.rotary, rotary_op.rotary),
        lambda *a: rotary.rotary(*(each.double() for each in a)),
        bytes=4 * 2.0 * T * H * K, sizes={"T": T, "H": H, "K": K},
    )  # fmt: skip
    yield Case(
        "quant_act", "Llama 3 8B", tensors((T, D)),
        {
            "torch": lambda x: quantize.quant_act(x.detach()),
            "compiled": compiled(lambda x: quantize.quant_act(x.detach()), device),
            "ours": lambda x: quantize_op.quant_act(x.detach()),
        },
        lambda x: quantize.quant_act(x.detach()[:SAMPLE])[0].double(),
        bytes=3.0 * T * D, sizes={"T": T, "D": D},
    )  # fmt: skip
    yield Case(
        "linear_cross_entropy", "Llama 3 8B", labelled,
        {
            "torch": _there_and_back(loss.linear_cross_entropy),
            "ours": _there_and_back(loss_op.linear_cross_entropy),
        },
        lambda h, w, y: loss.linear_cross_entropy(h.float(), w.float(), y).detach().double(),
        flops=6.0 * (T // 2) * D * V, sizes={"T": T // 2, "D": D, "V": V},
    )  # fmt: skip


def _there_and_back(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*inputs: Tensor) -> Tensor:
        out = function(*inputs)
        wanted = [each for each in inputs if each.requires_grad]
        # The result stands in for a gradient: random too, and no further memory is read.
        torch.autograd.grad(out, wanted, out.detach())
        return out

    return call
