"""Opens a trained model from a checkpoint or a Hugging Face folder for inference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor

from ...model_zoo.language_model import KVCache, LanguageModel
from ..assemble.build import BuiltModel, build_model, build_task
from ..assemble.found_model import FoundModel, find_model
from ..assemble.frozen import open_frozen
from ..assemble.precomputed import without_outputs
from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import load_state
from ..checkpoint.state import model_state
from ..core.errors import CheckpointError, RecipeError
from ..data.tables import Data
from ..formats.hf_load import load_huggingface
from ..launch.environment import World, find_world
from ..launch.group import pick_device, process_group
from ..lora.adapter_weights import merge_adapters
from ..parallel.axis import ParallelModel
from ..parallel.materialize import materialize
from ..parallel.pipeline.pipeline import Pipeline
from ..parallel.plan import Plan, make_plan
from ..parallel.tables import Compile, Memory, Parallel
from ..precision.tables import MX, Float8
from ..recipe.schema import Recipe
from ..tasks.frozen import FrozenModel, base_alone
from ..tasks.task import Task
from ..tokenizers.tokenizer import Tokenizer
from .inputs import Dtype, Weights
from .score import TextScorer

TIMEOUT_SECONDS = 600.0
"""process-group timeout of ranks that generate together"""


@dataclass(frozen=True)
class OpenedParts:
    """What a task needs of a model beside the model itself.

    Attributes:
        built: the model's config and kernels.
        parallel_model: the model, divided over the ranks.
        plan: how ranks share it.
    """

    built: BuiltModel
    parallel_model: ParallelModel
    plan: Plan


@dataclass(frozen=True)
class OpenedModel:
    """A model in evaluation mode.

    Attributes:
        model: the model; on several ranks, one that computes on all of them together.
        tokenizer: the tokenizer that it was trained with.
        path: the checkpoint or the Hugging Face folder that was read.
        step: the step of the checkpoint; None for a Hugging Face folder.
        recipe: the checkpoint's recipe; for a Hugging Face folder only `model` and `tokenizer` are
            known, and the rest are defaults.
        parts: what the recipe's task needs; None for a model that stages share.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    path: Path
    step: int | None
    recipe: Recipe
    parts: OpenedParts | None = None

    @property
    def data(self) -> Data:
        """The recipe's `[data]`, with rows that are padded instead of ragged."""
        return self.recipe.data.padded

    @property
    def scorer(self) -> TextScorer:
        """What scores texts with the model, on all ranks together."""
        assert self.parts is not None, "stages share the model"
        return TextScorer(self.model, self.parts.plan, self.parts.built.kernels.vocabulary)

    def build_task(self, *, with_frozen: bool = True) -> tuple[OpenedParts, Task[Any]]:
        """Return the parts of the model, and the task of the recipe for it.

        Args:
            with_frozen: open the frozen model that the loss needs; predictions need none.
        """
        assert self.parts is not None, "stages share the model"
        parts, recipe, frozen = self.parts, self.recipe, None
        recipe = recipe.model_copy(update={"data": self.data.largest})
        config, device = parts.built.config, parts.plan.device
        if with_frozen:
            frozen, _ = open_frozen(recipe, self.tokenizer, device, parts.plan, [])
            if frozen is None and learns_from_base(recipe):
                frozen = FrozenModel(parts.parallel_model, config, base_alone)
        task = build_task(recipe, parts.built.kernels, config, self.tokenizer, (), frozen)
        return parts, task


def open_model(
    path: str | Path,
    plugins: Sequence[str] = (),
    *,
    weights: Weights | Literal["model", "ema"] = Weights.MODEL,
    dtype: Dtype | Literal["fp32", "bf16", "fp16"] | None = None,
    world: World | None = None,
) -> OpenedModel:
    """Return the model and the tokenizer of a checkpoint.

    On several ranks, each reads some of the blocks, and the model generates on all ranks together.

    Args:
        path: a checkpoint, a run directory, whose newest intact checkpoint is taken, or a Hugging
            Face folder.
        plugins: modules to import first. The plugins that a checkpoint names are not imported on
            its word: a checkpoint never runs code.
        weights: "ema" reads the average that `[ema]` keeps.
        dtype: the dtype to compute in; None takes that of training.
        world: this process among the ranks of a process group; None is one process.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, needs a plugin, or holds no
            averaged weights although they were asked for.
        RecipeError: a plugin cannot be imported, or there are more ranks than blocks.
    """
    return open_found(find_model(path, plugins), weights=weights, dtype=dtype, world=world)


def open_found(
    found: FoundModel,
    *,
    weights: Weights | Literal["model", "ema"] = Weights.MODEL,
    dtype: Dtype | Literal["fp32", "bf16", "fp16"] | None = None,
    world: World | None = None,
    is_sharded: bool = False,
) -> OpenedModel:
    """Read a model that `find_model` found; see `open_model`.

    Args:
        found: the model on disk.
        weights: see `open_model`.
        dtype: see `open_model`.
        world: see `open_model`.
        is_sharded: on several ranks, each holds a shard of every weight (FSDP) and computes rows of
            its own; otherwise blocks are divided.
    """
    world, manifest = world or World(), found.manifest
    recipe = without_outputs(found.recipe)  # other samples have none
    if dtype is not None:
        precision = recipe.precision.model_copy(update={"compute": Dtype(dtype).value})
        recipe = recipe.model_copy(update={"precision": precision})
    average = Weights(weights) is Weights.EMA
    if average and manifest is None:
        raise CheckpointError(f"{found.path} is a Hugging Face folder: it has one set of weights")
    tokenizer = recipe.tokenizer.build()
    _check_tokenizer(found, tokenizer)
    if manifest is not None and average and not _averaged(manifest):
        raise CheckpointError(
            f"{found.path} holds no averaged weights", "train with [ema] decay, such as 0.999"
        )
    device, ranks = pick_device(world), world.world_size
    split = recipe
    if ranks > 1:
        parallel = Parallel(shard=ranks) if is_sharded else _divide_blocks(recipe, ranks)
        split = _replace_plan(recipe, parallel)
    split = split.for_largest_split()
    plan = make_plan(split.parallel if ranks > 1 else Parallel(), world.rank, ranks, device)
    built = build_model(split, tokenizer.vocab_size, device, plan if ranks > 1 else None)
    model = cast("LanguageModel", built.model)
    materialize(model, device, seed=0, fill=False)
    if manifest is None:
        load_huggingface(found.path, model, recipe.model)
    else:
        _load_native(found.path, manifest, model, average=average)
    holds_shards = ranks > 1 and is_sharded
    if not holds_shards:
        if not learns_from_base(recipe):
            merge_adapters(model)
        # Cast once here, or the forward pass would cast the weights again for every token. FSDP
        # casts what it gathers, and autocast casts for each operation.
        for parameter in () if model.autocasts else model.parameters():
            parameter.data = parameter.data.to(model.compute_dtype)
    model.eval()
    compute, step = model.compute_dtype, manifest.step if manifest else None
    ready = plan.parallelize(model, built.pieces, compute, num_positions=1, micro_batches=1)
    if ready.pipeline is not None:
        pipelined = PipelinedModel(model, ready.pipeline, built.config.vocab).eval()
        return OpenedModel(pipelined, tokenizer, found.path, step, recipe)
    parts = OpenedParts(built, ready, plan)
    return OpenedModel(model, tokenizer, found.path, step, recipe, parts)


@contextmanager
def join_ranks() -> Iterator[World]:
    """Join the ranks that compute with a model together, and give this process's place."""
    world = find_world()
    with process_group(world, pick_device(world), TIMEOUT_SECONDS):
        yield world


def learns_from_base(recipe: Recipe) -> bool:
    """Return whether the loss needs the model without its adapters, which stay apart then."""
    return bool(recipe.lora.rank) and recipe.task.frozen_model(recipe.loss) == ""


def _averaged(manifest: Manifest) -> list[str]:
    """Return the names of the weights whose average a checkpoint holds."""
    return [name.removeprefix("ema.") for name in manifest.tensors if name.startswith("ema.")]


def _load_native(path: Path, manifest: Manifest, model: LanguageModel, *, average: bool) -> None:
    """Fill a model from a checkpoint; with `average`, averaged weights replace the trained ones."""
    state = model_state(model)
    load_state(path, manifest, state, None, model.remote_state)
    if average:  # frozen weights have no average and keep the values that were just read
        here = [name for name in _averaged(manifest) if f"model.{name}" in state]
        averages = {f"ema.{name}": state[f"model.{name}"] for name in here}
        load_state(path, manifest, averages, None, model.remote_state)


def _divide_blocks(recipe: Recipe, ranks: int) -> Parallel:
    """Return a plan with one pipeline stage a rank."""
    blocks = getattr(recipe.model, "n_layers", 0)
    if not recipe.model.layout.pipeline or blocks < ranks:
        raise RecipeError(
            f'{ranks} ranks cannot share the {blocks} blocks of "{recipe.model.name}"',
            f"take at most {blocks}" if recipe.model.layout.pipeline else "take one process",
        )
    return Parallel(pipeline=ranks, shard=1)


def _replace_plan(recipe: Recipe, parallel: Parallel) -> Recipe:
    """Return a recipe with another plan, and without settings that only train."""
    precision = recipe.precision.model_copy(update={"float8": Float8(), "mx": MX()})
    return recipe.model_copy(
        update={
            "parallel": parallel,
            "memory": Memory(),
            "compile": Compile(),
            "precision": precision,
        }
    )


def _check_tokenizer(found: FoundModel, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that the model was not trained with."""
    name, size = found.recipe.tokenizer.name, tokenizer.vocab_size
    # config.json says how many rows there are; a checkpoint's recipe may leave it open.
    if found.manifest is None and size > (rows := found.recipe.model.vocab):
        message = f"{rows} rows of {found.path} cannot embed its tokenizer's {size} tokens"
        hint = f"train it with run.init_from and model.vocab_size = {size}, which adds rows"
        raise CheckpointError(message, hint)
    if found.manifest is not None and tokenizer.fingerprint != found.manifest.tokenizer:
        message = f"{found.path} was trained with another tokenizer than {name} is now"
        raise CheckpointError(message, "restore the tokenizer's files as they were")


class PipelinedModel(LanguageModel):
    """A model over pipeline stages that returns the last position's logits on every rank.

    All ranks must call it with the same tokens. Each stage has KV caches for its own blocks.

    Args:
        model: this rank's part of the model.
        pipeline: the pipeline that runs the stages of this rank.
        vocab: the vocabulary size.
    """

    def __init__(self, model: LanguageModel, pipeline: Pipeline, vocab: int) -> None:
        super().__init__()
        self.part = model
        self.pipeline = pipeline
        self.vocab = vocab
        self.takes_padding = model.takes_padding
        self.takes_max_documents = model.takes_max_documents
        self._caches: tuple[KVCache | None, dict[int, KVCache]] = None, {}

    def forward(
        self, tokens: Tensor | None, *, cache: KVCache | None = None, **columns: Any
    ) -> Tensor:
        """Return the logits of the last position, [B, 1, V]; see `LanguageModel.forward`."""
        assert tokens is not None, "the first stage embeds"
        assert cache is not None, "positions are generated one after the other"
        if self._caches[0] is not cache:
            own = {number: KVCache(cache.capacity) for number in self.pipeline.stages}
            self._caches = cache, own
        own = self._caches[1]
        return self.pipeline.last_outputs(
            tokens, lambda number: {**columns, "cache": own[number]}, self.vocab
        )
