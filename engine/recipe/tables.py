"""The tables of a recipe that no component owns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..config import Count, CountOrZero, RecipePath, Table
from ..observe import configs as observe
from ..registry import Named

Degree = Annotated[int, Field(ge=-1, le=2**20)]


class Run(Table):
    """What is run, for how long, and where it is kept."""

    name: str = ""
    """default: the recipe file's stem"""
    dir: str = "runs"
    """the run directory is {dir}/{name}"""
    steps: Count | None = None
    """optimizer steps; or give epochs"""
    epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """passes over the training sources; or give steps"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seeds the initial weights and the order of the data"""
    deterministic: bool = False
    """only use operations that give the same bits each time (slower on GPUs)"""
    resume: str = "auto"
    """"auto": the newest intact checkpoint, else start; "never"; or a checkpoint's path"""
    init_from: RecipePath = ""
    """weights only, from a native checkpoint or a Hugging Face folder; resume wins over it"""
    gc_interval: CountOrZero = 50
    """Python garbage collection every N steps on all ranks together; 0 leaves Python alone"""


class FSDP(Table):
    """How parameters are sharded."""

    strategy: Literal[
        "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"
    ] = "full_shard"
    """"full_shard" gathers weights for forward and again for backward; "shard_grad_op" keeps them
    between the two; "no_shard" replicates; "hybrid_shard" and "hybrid_shard_zero2" do the first two
    inside the shard axis and replicate over the replicate axis"""
    offload: bool = False
    """keep parameters, gradients and optimizer state in CPU memory"""


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
    micro_batches: CountOrZero = 0
    """into how many a rank's rows of a step are cut; 0: as data.micro_batch says"""
    stages_per_rank: CountOrZero = 0
    """stages that each rank holds; 0: one for "1F1B" and "GPipe", two for the others"""
    layers_per_stage: Annotated[list[Count], Field(max_length=10_000)] = []
    """blocks of each stage; default: stages that cost about the same"""


class Parallel(Table):
    """Degrees of each kind of parallelism; their product is the world size."""

    replicate: Degree = 1
    """data parallel, replicated (DDP, or the outer axis of HSDP)"""
    shard: Degree = -1
    """data parallel, sharded (FSDP2); -1: what is left over"""
    context: Degree = 1
    """context parallel: each sequence split over ranks"""
    tensor: Degree = 1
    """tensor parallel: each matrix split over ranks"""
    pipeline: Degree = 1
    """pipeline parallel: the blocks split over ranks"""
    expert: Degree = 1
    """expert parallel: carved out of replicate, shard and context"""
    expert_tensor: Degree = 1
    """tensor parallel inside the experts"""
    fsdp: FSDP = FSDP()
    """how parameters are sharded"""
    pipelining: Pipelining = Pipelining()
    """how micro batches pass through a pipeline"""


class Precision(Table):
    """In which dtypes a step computes."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """"auto": bf16 where the device multiplies it in hardware, else fp32"""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """dtype of gradient reduction between ranks"""


class Memory(Table):
    """What is traded for memory."""

    recompute: Literal["none", "full"] = "none"
    """activation checkpointing: "none" keeps all activations, "full" recomputes each block"""


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
    rms_norm: Literal["auto", "torch"] = "auto"
    """root-mean-square norm"""
    rotary: Literal["auto", "torch"] = "auto"
    """rotary position embedding"""
    swiglu: Literal["auto", "torch"] = "auto"
    """gated feed-forward activation"""
    linear_cross_entropy: Literal["auto", "torch", "compiled"] = "auto"
    """output projection and loss in chunks; "compiled": torch.compile fuses what is between its
    products, "auto" where [compile] is enabled"""


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
    max_skips: Count = 10
    """consecutive skips, or rollbacks without progress, before the run stops"""
    stop_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """how long `--nproc` waits for ranks to save after a signal before it kills them"""
    collective_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """how long a rank waits for the others before the run fails"""


class Plugins(Table):
    """Code that adds components."""

    modules: Annotated[list[str], Field(max_length=100)] = []
    """Python modules imported before validation, so that they can register components"""
