"""The recipes and plans whose steps are counted."""

from typing import NamedTuple

FEWER = ("model.n_layers=2", "data.global_batch=64", "data.micro_batch=1")
EAGER, COMPILED = ("compile.enabled=false",), ("compile.enabled=true",)
TRITON = tuple(
    f"kernels.{name}=triton" for name in ("grouped_gemm", "permute", "swiglu", "rotary", "rms_norm")
)


class Case(NamedTuple):
    """A recipe on some ranks.

    Attributes:
        recipe: name of a file in recipes/.
        ranks: the world size.
        settings: changes of the recipe.
        capability: of the GPUs.
    """

    recipe: str
    ranks: int = 1
    settings: tuple[str, ...] = ()
    capability: tuple[int, int] = (9, 0)


CASES = {
    "llama3_debug": Case("llama3_debug"),
    "documents": Case("llama3_debug", 1, ("data.packing=documents",)),
    "shard": Case("llama3_debug", 4, ("parallel.shard=4",)),
    "hybrid": Case("llama3_debug", 4, ("parallel.shard=2", "parallel.replicate=2")),
    "tensor": Case("llama3_debug", 2, ("parallel.tensor=2",)),
    "gather": Case("llama3_debug", 2, ("parallel.context=2",)),
    "ring": Case("llama3_debug", 2, ("parallel.context=2", "parallel.context_exchange=ring")),
    "pipeline": Case("llama3_debug", 2, ("parallel.pipeline=2",)),
    "skip": Case("llama3_debug", 1, ("resilience.non_finite=skip",)),
    "skip by a list": Case(
        "llama3_debug", 1, ("resilience.non_finite=skip", "optimizer.name=lion")
    ),
    "moe_debug": Case("moe_debug"),
    "expert": Case("moe_debug", 2, ("parallel.expert=2",)),
    "experts on an A100": Case("moe_debug", 1, (), (8, 0)),
    "triton": Case("moe_debug", 1, TRITON),
    "gpt_oss_debug": Case("gpt_oss_debug"),
    "llama4_debug": Case("llama4_debug"),
    "deepseek_v3_debug": Case("deepseek_v3_debug"),
    "lora_debug": Case("lora_debug"),
    "llama3_1b": Case("llama3_1b", 8, (*FEWER, *EAGER)),
    "llama3_8b": Case("llama3_8b", 8, (*FEWER, *EAGER)),
    "moe_1b": Case("moe_1b", 8, (*FEWER, *EAGER)),
    "llama3_debug compiled": Case("llama3_debug", 1, COMPILED),
    "shard compiled": Case("llama3_debug", 4, ("parallel.shard=4", *COMPILED)),
    "tensor compiled": Case("llama3_debug", 2, ("parallel.tensor=2", *COMPILED)),
    "moe_debug compiled": Case("moe_debug", 1, COMPILED),
    "llama3_8b compiled": Case("llama3_8b", 8, (*FEWER, *COMPILED)),
    "moe_1b compiled": Case("moe_1b", 8, (*FEWER, *COMPILED)),
}
