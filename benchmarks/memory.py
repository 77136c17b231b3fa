"""Estimated memory beside the peaks that others published, for the rows of `published.csv`.

`FRAMEWORKS` says what another framework holds and this trainer does not, as its source shows, and
the estimate of a row includes it. `LEFT_OUT` names the rows that cannot be described so, with the
reason.

    python benchmarks/memory.py --write
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import clock
import results
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.engine.estimate.devices import overhead
from trainer.engine.estimate.simulate import build
from trainer.engine.estimate.simulate.extrapolate import simulate_memory
from trainer.engine.estimate.simulate.tracker import GRADIENTS, OPTIMIZER
from trainer.engine.recipe.load import load_recipe

GIB = 2**30
MOST_ERROR = 0.07
VOCABULARY = 128_256
OUTSIDE = ("CUDA context", "NCCL")
"""margins that torch's allocator does not see"""


@dataclass(frozen=True)
class Framework:
    """What another framework holds, and what it publishes.

    Attributes:
        source: where this is to be read.
        reserved: whether it publishes what torch's allocator reserves; else what is allocated.
        logits: the dtype in which its loss holds all logits.
        gathers_logits: whether each tensor rank holds the logits of the whole vocabulary.
        keeps_logits: whether the logits live on during the backward pass.
        settings: its differences that a recipe can express.
        tensor_settings: the same, under tensor parallelism.
        narrow_state: whether the optimizer's state has the parameters' dtype, bf16; ours is fp32.
        compiles_whole: whether a model without FSDP is compiled as one graph, whose backward pass
            returns all gradients at once, beside those of earlier micro batches.
    """

    source: str
    reserved: bool
    logits: torch.dtype
    gathers_logits: bool = False
    keeps_logits: bool = False
    settings: tuple[str, ...] = ()
    tensor_settings: tuple[str, ...] = ()
    narrow_state: bool = False
    compiles_whole: bool = False


FRAMEWORKS = {
    "torchtitan": Framework(
        "pytorch/torchtitan 9dec370 train.py (the loss is not compiled), torchtitan/metrics.py",
        reserved=True,
        logits=torch.float32,
    ),
    "KempnerForge": Framework(
        "KempnerInstitute/KempnerForge 01b461a scripts/train.py, kempnerforge/distributed/"
        "parallel.py and tensor_parallel.py, kempnerforge/metrics/memory.py",
        reserved=False,
        logits=torch.bfloat16,
        gathers_logits=True,
        keeps_logits=True,
        settings=("precision.parameters=bf16",),
        tensor_settings=('parallel.rules=[{match="embed.weight", place={}}]',),
        narrow_state=True,
        compiles_whole=True,
    ),
}
WHOLE_STAGES = "tensor ranks of its pipeline stages hold whole activations; ours a piece"
LEFT_OUT = {
    "KempnerForge 13B on 32, tensor 4 pipeline 2": WHOLE_STAGES,
    "KempnerForge 29B on 32, tensor 4 pipeline 2": WHOLE_STAGES,
    "KempnerForge 70B on 32, tensor 4 pipeline 4": WHOLE_STAGES,
}


class SplitCrossEntropy(torch.autograd.Function):
    """The steps of torch.distributed.tensor.parallel.loss_parallel, without its sums."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        found = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(found, labels)
        return found.gather(1, labels.unsqueeze(1)).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        found, labels = ctx.saved_tensors
        chosen = torch.zeros_like(found).scatter_(1, labels.unsqueeze(1), -1.0)
        return (chosen + found.exp()) * grad, None


class GatheredLogits(torch.autograd.Function):
    """Logits of the whole vocabulary from those of a tensor rank, without communication."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ranks: int) -> Tensor:
        ctx.width = logits.shape[-1]
        return torch.cat([logits] * ranks, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[:, : ctx.width].contiguous(), None


def whole_loss(framework: Framework, tensor: int) -> Callable[..., Tensor]:
    """Return a loss that holds all logits as a framework's does."""

    def loss(
        hidden: Tensor, weight: Tensor, labels: Tensor, *, token_losses: list[Tensor], **_: Any
    ) -> Tensor:
        found = compute(hidden, weight, labels)
        token_losses.append(found.detach())
        return found

    def compute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, weight.to(hidden.dtype))
        if framework.gathers_logits and tensor > 1:
            logits = GatheredLogits.apply(logits, tensor)
        wide = logits.to(framework.logits)
        if tensor > 1 and not framework.gathers_logits:
            return SplitCrossEntropy.apply(wide, labels)
        found = F.cross_entropy(wide, labels, reduction="sum")
        if framework.keeps_logits:
            found.register_hook(partial(_hold, logits))
        return found

    return loss


def _hold(_logits: Tensor, _grad: Tensor) -> None:
    """Do nothing: the hook holds the logits."""


with_gpu_kernels = build.with_gpu_kernels


def with_loss(loss: Callable[..., Tensor], built: Any) -> Any:
    """Return a model as a GPU would compute it, with a loss of another framework."""
    built = with_gpu_kernels(built)
    return replace(built, kernels=replace(built.kernels, linear_cross_entropy=loss))


def compare(values: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the estimate of a published row on rank 0, which published it."""
    name, ranks, tensor = values["name"], int(values["gpus"]), int(values["tensor"])
    framework, is_compiled = FRAMEWORKS[name.partition(" ")[0]], values["compiled"] == "1"
    file = folder / "recipe.toml"
    file.write_text(clock.recipe_text(values))
    settings = [each for each in values["settings"].split(";") if each and "async" not in each]
    settings += [*framework.settings, f"compile.enabled={'true' if is_compiled else 'false'}"]
    settings += framework.tensor_settings if tensor > 1 else ()
    recipe = load_recipe(file, settings, ranks).recipe
    build.with_gpu_kernels = partial(with_loss, whole_loss(framework, tensor))
    found = simulate_memory(recipe, 0, ranks, VOCABULARY, on_gpu=True)
    kinds = dict(found.at_peak)
    if framework.narrow_state:
        kinds[OPTIMIZER] //= 2
    is_alone = not recipe.parallel.uses_fsdp(recipe.parallel.degrees.resolve(ranks))
    if framework.compiles_whole and is_alone and is_compiled:
        kinds[GRADIENTS] *= 2
    total = sum(kinds.values())
    if framework.reserved:
        more = overhead(total, 0, found.block_bytes, values["gpu"])
        total += sum(size for kind, size in more.items() if kind not in OUTSIDE)
    published = float(values["memory_gib"])
    return {
        "name": name,
        "published_gib": published,
        "estimate_gib": round(total / GIB, 1),
        "error": round(total / GIB / published - 1, 3),
        "tensors_gib": {kind: round(size / GIB, 1) for kind, size in kinds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", help="parts of the names of rows; all without it")
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    with clock.PUBLISHED.open() as file, tempfile.TemporaryDirectory() as folder:
        rows = [values for values in csv.DictReader(file) if values["memory_gib"]]
        names = {values["name"] for values in rows}
        if unknown := LEFT_OUT.keys() - names:
            raise SystemExit(f"LEFT_OUT names rows that {clock.PUBLISHED.name} has not: {unknown}")
        chosen = [
            values
            for values in rows
            if values["name"] not in LEFT_OUT
            and any(part in values["name"] for part in options.rows or [""])
        ]
        found = [compare(values, Path(folder)) for values in chosen]
    lines = [
        [each["name"], f"{each['published_gib']:.1f}", f"{each['estimate_gib']:.1f}",
         f"{each['error']:+.1%}"]
        for each in found
    ]  # fmt: skip
    print(results.table(["", "published GiB", "estimate", "error"], lines), "\n")
    for name, reason in LEFT_OUT.items():
        print(f"left out: {name}: {reason}")
    content = {"rows": found, "left_out": LEFT_OUT, "published": len(names), "goal": MOST_ERROR}
    print(json.dumps(content, indent=1))
    if options.write:
        print(f"written to {results.append('memory', content).name}")


if __name__ == "__main__":
    main()
