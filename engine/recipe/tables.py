"""The tables of a recipe that no component owns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..core.config import Count, CountOrZero, Fraction, LocalPath, RecipePath, Table
from ..core.registry import Named
from ..observe import configs as observe
from ..precision.tables import MX, Float8, Narrow


class Run(Table):
    """What is run, for how long, and where it is kept."""

    name: str = ""
    """default: the recipe file's stem"""
    dir: LocalPath = "runs"
    """the run directory is {dir}/{name}"""
    steps: Count | None = None
    """optimizer steps; or give epochs"""
    epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """passes over the training sources; or give steps"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seeds the initial weights and the order of the data"""
    deterministic: bool = False
    """only use operations that give the same bits each time (slower on GPUs)"""
    resume: LocalPath = "auto"
    """"auto": the newest intact checkpoint, else start; "never"; or a checkpoint's path"""
    init_from: RecipePath = ""
    """weights only, from a native checkpoint or a Hugging Face folder; resume wins over it"""
    gc_interval: CountOrZero = 50
    """Python garbage collection every N steps on all ranks together; 0 leaves Python alone"""


class Precision(Table):
    """In which dtypes a step computes."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """"auto": bf16 where the device multiplies it in hardware, else fp32"""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """dtype of gradient reduction between ranks"""
    float8: Float8 = Float8()
    """products in float8"""
    mx: MX = MX()
    """products in MXFP8"""

    @property
    def narrow(self) -> dict[str, Narrow]:
        """The tables of narrow formats that are enabled, by their word."""
        tables: dict[str, Narrow] = {"float8": self.float8, "mx": self.mx}
        return {word: table for word, table in tables.items() if table.enabled}


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


class Compile(Table):
    """torch.compile, block by block."""

    enabled: bool = False
    """compile each block; pays off after a minute or so of warmup"""
    backend: str = "inductor"
    """torch.compile backend"""


class Kernels(Table):
    """Operation -> implementation; "auto" picks by device and shape."""

    attention: Literal["auto", "matmul", "sdpa"] = "auto"
    """"matmul": plain products, fastest on CPUs for short rows; "sdpa": torch's fused attention"""
    rms_norm: Literal["auto", "torch", "triton"] = "auto"
    """root-mean-square norm; "triton": one kernel, for GPUs"""
    rotary: Literal["auto", "torch", "triton"] = "auto"
    """rotary position embedding; "triton": one kernel, for GPUs"""
    swiglu: Literal["auto", "torch", "triton"] = "auto"
    """gated feed-forward activation; "triton": one kernel, for GPUs"""
    linear_cross_entropy: Literal["auto", "torch", "compiled", "triton"] = "auto"
    """output projection and loss in chunks; "compiled": torch.compile fuses what is between its
    products, "auto" where [compile] is enabled; "triton": that is one kernel, for GPUs"""
    grouped_gemm: Literal["auto", "torch", "triton"] = "auto"
    """products of the rows of each expert with its weights; "triton": one kernel, for GPUs"""
    permute: Literal["auto", "torch", "triton"] = "auto"
    """sorts tokens by expert, and back; "triton": three kernels, for GPUs"""


class Checkpoint(Table):
    """When state is saved and how much is kept."""

    interval: CountOrZero = 100
    """optimizer steps between checkpoints; 0: only at the end"""
    keep: Count = 2
    """how many of the newest are kept"""
    mode: Literal["sync", "async", "async_pinned"] = "async"
    """"async" copies the state and writes while training goes on; "async_pinned" copies through
    pinned memory on a GPU"""
    last: Literal["full", "weights"] = "full"
    """what the final checkpoint holds"""
    keep_best: bool = False
    """also keep the checkpoint with the best `evaluate.metric`, under the alias checkpoints/best"""
    export: Literal["none", "hf"] = "none"
    """"hf": at the end also write {dir}/{name}/hf, a folder that transformers loads"""


class Evaluate(Table):
    """Loss on the validation split."""

    interval: CountOrZero = 50
    """optimizer steps between evaluations; 0: never"""
    steps: Count = 10
    """batches of the validation split"""
    metric: Literal["loss", "perplexity"] = "loss"
    """what the best checkpoint and early stopping go by"""
    direction: Literal["min", "max"] = "min"
    """whether a lower or a higher value of the metric is better"""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """a smaller change than this is no improvement"""
    patience: CountOrZero = 0
    """evaluations in a row without improvement before the run ends early; 0: never"""


class EMA(Table):
    """An exponential moving average of the weights."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """share of the average that each update keeps, such as 0.999; 0: no average"""
    interval: Count = 1
    """optimizer steps between updates of the average"""


class LoRA(Table):
    """Low-rank adapters: the weights are frozen, and small matrices beside them are trained."""

    rank: CountOrZero = 0
    """width of the adapters; 0: none, all weights are trained"""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """the adapters' output is scaled by alpha / rank"""
    targets: Annotated[list[str], Field(min_length=1, max_length=100)] = [
        "*.attention.[qkvo].weight",
        "*.mlp.*.weight",
    ]
    """which weights get one: globs over parameter names, or "re:..." for a regular expression"""
    init_from: RecipePath = ""
    """folder of a PEFT adapter to go on from; by default adapters start at zero; resume wins"""


class Profile(Table):
    """Where the time and the memory of some steps go."""

    steps: CountOrZero = 0
    """how many optimizer steps are profiled; 0: none"""
    start: Count = 10
    """the first of them, counted from where this attempt starts"""
    memory: bool = False
    """also record every allocation: a memory snapshot on a GPU, a memory column on a CPU"""
    ranks: Annotated[list[CountOrZero], Field(min_length=1, max_length=1024)] = [0]
    """which ranks write traces to {dir}/{name}/profiles"""


class Metrics(Table):
    """What is measured and where it goes."""

    interval: Count = 10
    """optimizer steps between rows of metrics.jsonl"""
    tensorboard: bool = False
    """also write TensorBoard event files (extra `[tensorboard]`)"""
    trackers: list[Annotated[observe.TrackerConfig, Named(observe.trackers)]] = []
    """more places that get every row"""


class Resilience(Table):
    """What happens when something goes wrong."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """a NaN or infinite loss or gradient: "stop" the run, "skip" the step, or "rollback" to the
    newest checkpoint and go on after the data that led there"""
    spike: Literal["off", "warn", "skip", "rollback"] = "warn"
    """a loss or gradient norm far above those of the steps before: do nothing, "warn", "skip" the
    step, or "rollback" to the newest checkpoint and resume after the data that led there"""
    spike_window: Annotated[int, Field(ge=8, le=4096)] = 128
    """how many steps before it a step is compared with; fewer at first, but a quarter of them"""
    spike_threshold: Annotated[float, Field(gt=0, le=1000)] = 8.0
    """a spike is so many standard deviations above the median, estimated by the median absolute
    deviation; of the gradient norm's logarithm"""
    max_skips: Count = 10
    """consecutive skips, or rollbacks without progress, before the run stops"""
    stop_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """how long `--nproc` waits for ranks to save after a signal before it kills them"""
    collective_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """how long a rank waits for the others before the run fails"""
    hang_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] | None = None
    """a rank without progress for so long hangs: all ranks write their stacks to logs/, and the run
    fails; default: half of collective_timeout_seconds"""

    @property
    def hang_seconds(self) -> float:
        """The time limit of the watchdog."""
        return self.hang_timeout_seconds or self.collective_timeout_seconds / 2


class Plugins(Table):
    """Code that adds components."""

    modules: Annotated[list[str], Field(max_length=100)] = []
    """Python modules imported before validation, so that they can register components"""
