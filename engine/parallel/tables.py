"""The recipe's `[parallel]` table. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ..core.config import (
    DEFAULTS,
    Count,
    CountOrZero,
    Fraction,
    LocalPath,
    OneOf,
    RecipePath,
    Table,
)
from .mesh import AXES, EXPERT_AXES, Degrees, parse_mesh
from .strategies import Strategy, strategies

Degree = Annotated[int, Field(ge=-1, le=2**20)]
INDUCTOR = "inductor"
StageModules = Annotated[list[str], Field(min_length=1, max_length=10_000)]


class FSDP(Table):
    """How parameters are sharded."""

    strategy: Annotated[str, OneOf(strategies)] = "full_shard"
    """"full_shard" gathers weights for forward and again for backward; "shard_grad_op" keeps them
    between the two; "no_shard" replicates; "hybrid_shard" and "hybrid_shard_zero2" do the first two
    inside the shard axis and replicate over the replicate axis"""
    reshard_after_forward: CountOrZero = 0
    """"full_shard" and "hybrid_shard": keep a block's weights in so many pieces between forward and
    backward, each gathered among neighbours; 0: in one for each rank that shards"""
    ignored: Annotated[list[str], Field(max_length=100)] = []
    """weights that every rank keeps whole: globs over parameter names, or "re:..." for a regular
    expression"""
    offload: bool = False
    """keep parameters, gradients and optimizer state in CPU memory"""
    prefetch: Annotated[int, Field(ge=0, le=1000)] = 0
    """blocks whose weights are gathered ahead of use; 0: the next one, as torch does by itself"""
    reduce_every: Literal["step", "micro_batch"] = "step"
    """when gradients are reduced and sharded: "step" holds whole ones until the last micro batch,
    "micro_batch" communicates after each and holds shards alone"""

    @property
    def sharding(self) -> type[Strategy]:
        """What the strategy does."""
        return strategies[self.strategy]

    def resharding(self, ranks: int) -> bool | int:
        """Return what FSDP2 does with a block's weights after its forward pass on so many ranks."""
        pieces = self.reshard_after_forward
        return pieces if 0 < pieces < ranks else self.sharding.reshard_after_forward


class Pipelining(Table):
    """How micro batches pass through the stages of a pipeline."""

    schedule: Literal[
        "1F1B",
        "GPipe",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "1F1B"
    """any schedule of torch.distributed.pipelining"""
    csv: RecipePath = ""
    """file with a schedule of your own, in place of `schedule`: a row a rank, cells like 0F3 (stage
    0, forward, micro batch 3), B (backward), I and W (its halves), empty: idle"""
    micro_batches: CountOrZero = 0
    """into how many a rank's rows of a step are cut; 0: as data.micro_batch says"""
    stages_per_rank: CountOrZero = 0
    """stages that each rank holds; 0: one for "1F1B" and "GPipe", two for the others"""
    layers_per_stage: Annotated[list[Count], Field(max_length=10_000)] = []
    """blocks of each stage; default: stages that cost about the same"""
    modules_per_stage: Annotated[list[StageModules], Field(max_length=10_000)] = []
    """names of each stage's modules, such as [["embed", "layers.0"], ["layers.1", "head"]]"""
    cost: Literal["estimated", "measured"] = "estimated"
    """by which stages are made equal: "estimated" counts operations; "measured" times embedding,
    block and head on rank 0 before the run starts"""


class RulePlacement(Table):
    """Which dim of a parameter each axis of ranks cuts; empty: every rank holds all of it."""

    tensor: Annotated[int, Field(ge=0, le=7)] | None = None
    """dim that the tensor axis cuts; left out: its ranks hold the same"""
    shard: Annotated[int, Field(ge=0, le=7)] | None = None
    """dim that FSDP cuts; left out: 0"""

    @property
    def shard_dim(self) -> int | None:
        """The dim that FSDP cuts; None where every rank holds all."""
        return None if self == RulePlacement() else self.shard or 0


class Rule(Table):
    """Where parameters are stored, whatever the model's own plan says."""

    match: Annotated[str, Field(max_length=1000)]
    """regular expression that a whole parameter name must match"""
    place: RulePlacement
    """mesh axis -> dim that it cuts, such as { tensor = 0 }; {} keeps them whole on every rank"""


class Parallel(Table):
    """Degrees of each kind of parallelism; their product is the world size."""

    mesh: str = ""
    """all degrees in one text, such as "dp:2,fsdp:-1,tp:4", in place of the keys below; an axis
    that it does not name has 1"""
    replicate: Degree = 1
    """data parallel, replicated (DDP, or the outer axis of HSDP)"""
    shard: Degree = -1
    """data parallel, sharded (FSDP2); -1: what is left over"""
    context: Degree = 1
    """context parallel: each sequence split over ranks"""
    context_exchange: Literal["gather", "ring"] = "gather"
    """"gather": each rank holds the keys and values of whole sequences, the fastest where they are
    short; "ring": those of a few ranks' shares, which travel while others are used"""
    tensor: Degree = 1
    """tensor parallel: each matrix split over ranks"""
    async_tensor: bool = False
    """compute products while their pieces travel between tensor ranks; needs GPUs and [compile]"""
    pipeline: Degree = 1
    """pipeline parallel: the blocks split over ranks"""
    expert: Count = 1
    """expert parallel: so many ranks share the experts of a mixture, and send each other the tokens
    that these compute; carved out of replicate, shard, context and tensor"""
    expert_exchange: Literal["all_to_all", "on_device"] = "all_to_all"
    """how tokens travel: "all_to_all": by collectives, for which the host waits once a layer;
    "on_device": through memory that a node's GPUs share, without waiting, with room for the most
    that can arrive (`model.moe.capacity_factor`); experimental: not measured on GPUs yet"""
    expert_tensor: Count = 1
    """tensor parallel inside the experts: so many neighbours share each of them; carved out too"""
    fsdp: FSDP = DEFAULTS
    """how parameters are sharded"""
    pipelining: Pipelining = DEFAULTS
    """how micro batches pass through a pipeline"""
    rules: Annotated[list[Rule], Field(max_length=1000)] = []
    """where single parameters are stored; the first rule that matches wins, before the model's own
    plan"""

    @property
    def degrees(self) -> Degrees:
        """The degrees as given: one may be -1."""
        return Degrees(**{axis: getattr(self, axis) for axis in (*AXES, *EXPERT_AXES)})

    def is_sharded(self, degrees: Degrees) -> bool:
        """Return whether FSDP shards parameters over the ranks that compute different tokens."""
        # Only FSDP can offload to CPU memory, so it is used for that on a single rank too.
        return self.fsdp.sharding.shards and (degrees.fsdp > 1 or self.fsdp.offload)

    def uses_fsdp(self, degrees: Degrees) -> bool:
        """Return whether FSDP2 reduces the gradients.

        It does so also for mere replicas of weights that tensor parallelism has split, of a
        pipeline's stages, and beside experts that ranks share: DDP does not know them.
        """
        splits_and_replicates = degrees.dp_cp > 1 and degrees.model > 1
        return self.is_sharded(degrees) or splits_and_replicates or degrees.expert_ranks > 1

    @model_validator(mode="before")
    @classmethod
    def _spread_mesh(cls, values: Any) -> Any:
        """Put the degrees of `mesh` into their own fields; files are read so beforehand."""
        if not isinstance(values, dict) or not isinstance(values.get("mesh"), str):
            return values
        text, given = values["mesh"], {key: each for key, each in values.items() if key != "mesh"}
        if not text:
            return given
        degrees, faults = parse_mesh(text)
        faults += [(f"{axis} is given beside mesh", "") for axis in degrees if axis in given]
        if faults:
            raise ValueError(faults[0][0])
        return degrees | given


class Memory(Table):
    """What is traded for memory."""

    recompute: Literal["none", "full", "every_n", "selective", "budget"] = "none"
    """activation checkpointing: "none" keeps all activations, "full" recomputes each block,
    "every_n" one block in N, "selective" all but some operations, "budget" what torch.compile finds
    cheapest"""
    recompute_interval: Annotated[int, Field(ge=2, le=10_000)] = 2
    """"every_n": one block in so many is recomputed"""
    recompute_keep: Annotated[list[str], Field(max_length=100)] = ["mm", "attention", "collectives"]
    """"selective": operations whose results are kept: "mm", "half_mm" (every second one), "bmm",
    "attention", "norm", "all_gather", "reduce_scatter", "collectives", or torch's names such as
    "aten.mm.default" """
    recompute_budget: Fraction = 0.5
    """"budget": share of the activations' memory that may be kept"""
    optimizer_in_backward: bool = False
    """update each weight as soon as its gradient is complete, and free the gradient"""


def _require_number(value: Any) -> Any:
    if not isinstance(value, bool | int | float):
        hint = 'write names with dots as "triton.cudagraphs" = true'
        raise ValueError(f"expected a number, true or false; {hint}")
    return value


Setting = Annotated[bool | int | float, BeforeValidator(_require_number)]


CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class Compile(Table):
    """torch.compile, block by block."""

    enabled: bool = False
    """compile each block; pays off after a minute or so of warmup"""
    backend: str = INDUCTOR
    """torch.compile backend"""
    mode: CompileMode = "default"
    """what "inductor" optimises for: "reduce-overhead" replays CUDA graphs, the others measure
    several kernels for each product first"""
    fullgraph: bool = True
    """refuse a block that does not become one graph; false: run what breaks it without compiling"""
    dynamic: bool | None = None
    """true: one graph for all lengths; false: one for each; left out: torch decides"""
    options: Annotated[dict[str, Setting], Field(max_length=1000)] = {}
    """settings of "inductor" by name, such as { "triton.cudagraphs" = true }; numbers and booleans
    alone, since others may name programs; not beside a mode"""
    cache_dir: LocalPath = ""
    """folder of compiled graphs, which a later start reads; it holds code: no other user may write
    there, and it is in no run's folder; default: $TORCHINDUCTOR_CACHE_DIR, or
    ~/.cache/trainer/compile"""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        given = [f'mode = "{self.mode}"'] * (self.mode != "default")
        given += ["options"] * bool(self.options)
        if len(given) > 1:
            raise ValueError(f"{given[0]} and options are both given: a mode is a set of options")
        if given and self.backend != INDUCTOR:
            message = f'{given[0]} belongs to the backend "{INDUCTOR}", not "{self.backend}"'
            raise ValueError(message)
        return self


_GATHERS = ("_c10d_functional.all_gather_into_tensor.default",)
_SUMS = ("_c10d_functional.reduce_scatter_tensor.default", "_c10d_functional.all_reduce.default")

# Operations of all devices and versions of torch: `selective_contexts` leaves out those that
# this torch does not have.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "mm": (
        "aten.mm.default",
        "aten.addmm.default",
        "aten._scaled_mm.default",
        "aten._grouped_mm.default",
        "trainer.grouped_mm.default",
        "trainer.grouped_mm_fp8.default",
    ),
    "bmm": ("aten.bmm.default", "aten.baddbmm.default"),
    "attention": (
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "trainer.varlen_attention.default",
        "higher_order.flex_attention",
    ),
    # Where torch has no fused RMSNorm kernel, as on a CPU, rsqrt is one of the operations it makes.
    "norm": ("aten._fused_rms_norm.default", "aten.rsqrt.default"),
    "all_gather": _GATHERS,
    "reduce_scatter": _SUMS,
    "collectives": (
        *_GATHERS,
        *_SUMS,
        "_c10d_functional.all_to_all_single.default",
        "_c10d_functional.wait_tensor.default",
    ),
}
"""Word of `memory.recompute_keep` -> operations."""

HALF = "half_mm"
"""Another word: every second operation of "mm", the first of a block among them."""
WORDS = (*GROUPS, HALF)

FULL_NAME = re.compile(r"\w+\.\w+(\.\w+)?")
"""Another operation: namespace, name and overload, as torch.ops has them."""


def operation_names(words: list[str]) -> list[str]:
    """Return the full names of the operations that words of `recompute_keep` stand for."""
    return [name for word in words if word != HALF for name in GROUPS.get(word, (word,))]
