"""Whether experts can be computed and reached as `[kernels] moe` and `[parallel]` say."""

from __future__ import annotations

from collections.abc import Iterator

from ....model_zoo.matrices import is_adapter
from ...core.text.tree import Finding
from ...lora.sizes import with_adapters
from ...precision.choose import select_weights
from ..schema import Recipe
from .plan_checks import OPEN_VOCABULARY


def check_experts(recipe: Recipe) -> Iterator[Finding]:
    """Yield what fused experts do not compute, and ranks that cannot exchange on the device."""
    parallel = recipe.parallel
    if parallel.expert_exchange == "on_device" and parallel.expert == 1:
        message = '"on_device" exchanges tokens between expert ranks, and parallel.expert is 1'
        yield ("parallel", "expert_exchange"), message, "leave it out"
    if parallel.expert_exchange == "on_device" and parallel.expert_tensor > 1:
        degree = parallel.expert_tensor
        message = f'"on_device" takes whole experts, not parallel.expert_tensor = {degree}'
        yield ("parallel", "expert_exchange"), message, 'choose "all_to_all"'
    if parallel.expert_exchange == "on_device" and recipe.data.packing == "ragged":
        # Each rank would make room for the rows of its own batch, and drop those of longer ones.
        message = '"on_device" needs as many tokens on each rank, and rows are "ragged"'
        yield ("parallel", "expert_exchange"), message, 'choose "all_to_all"'
    if recipe.kernels.moe != "fused":
        return
    path, is_expert = ("kernels", "moe"), recipe.model.layout.is_expert
    leave = 'leave kernels.moe to "auto"'
    if not recipe.model.layout.experts:
        yield path, f'"fused" computes experts, and the model "{recipe.model.name}" has none', leave
    for axis in ("expert", "expert_tensor"):
        if (degree := getattr(recipe.parallel, axis)) > 1:
            message = (
                f'"fused" computes experts that one rank holds, not parallel.{axis} = {degree}'
            )
            yield path, message, leave
    for word, table in recipe.precision.low_precision.items():
        if any(map(is_expert, select_weights(table, recipe.model))):
            message = f'"fused" has no kernel in {word}, and precision.{word} names experts'
            yield path, message, f'set precision.{word}.exclude = ["*.experts.*"], or {leave}'
    names = with_adapters(recipe.model.with_vocab(OPEN_VOCABULARY), recipe.lora)
    if any(is_adapter(name) and is_expert(name) for name in names):
        yield path, '"fused" has no kernel for adapters, and lora.targets names experts', leave
