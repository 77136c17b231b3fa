"""Opens a trained model from a checkpoint or a Hugging Face folder for inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ...model_zoo.language_model import KVCache, LanguageModel
from ..assemble.build import build_model
from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import load_state
from ..checkpoint.state import model_state
from ..core.errors import CheckpointError, RecipeError
from ..formats.hf_load import load_huggingface
from ..launch.environment import World
from ..launch.group import pick_device
from ..lora.adapter_weights import merge_adapters
from ..parallel.materialize import materialize
from ..parallel.pipeline.pipeline import Pipeline
from ..parallel.plan import make_plan
from ..parallel.tables import Compile, Memory, Parallel
from ..precision.tables import MX, Float8
from ..recipe.schema import Recipe
from ..tokenizers.tokenizer import Tokenizer
from .inputs import Dtype, FoundModel, Weights, find_model

TIMEOUT_SECONDS = 600.0
"""process-group timeout of ranks that generate together"""


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
    """

    model: LanguageModel
    tokenizer: Tokenizer
    path: Path
    step: int | None
    recipe: Recipe


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
) -> OpenedModel:
    """Read a model that `find_model` found; see `open_model`."""
    world, manifest = world or World(), found.manifest
    recipe = found.recipe
    if dtype is not None:
        precision = recipe.precision.model_copy(update={"compute": Dtype(dtype).value})
        recipe = recipe.model_copy(update={"precision": precision})
    average = Weights(weights) is Weights.EMA
    if average and manifest is None:
        raise CheckpointError(f"{found.path} is a Hugging Face folder: it has one set of weights")
    tokenizer = recipe.tokenizer.build()
    if manifest is not None and tokenizer.fingerprint != manifest.tokenizer:
        raise CheckpointError(
            f"{found.path} was trained with another tokenizer than {recipe.tokenizer.name} is now",
            "restore the tokenizer's files as they were",
        )
    if manifest is not None and average and not _averaged(manifest):
        raise CheckpointError(
            f"{found.path} holds no averaged weights", "train with [ema] decay, such as 0.999"
        )
    device, split, plan = pick_device(world), recipe, None
    if world.world_size > 1:
        split = _split_into_stages(recipe, world.world_size)
        plan = make_plan(split.parallel, world.rank, world.world_size, device)
    built = build_model(split, tokenizer.vocab_size, device, plan)
    model = built.model
    materialize(model, device, seed=0, fill=False)
    if manifest is None:
        load_huggingface(found.path, model, recipe.model)
    else:
        _load_native(found.path, manifest, model, average=average)
    merge_adapters(model)
    # Cast once here, or the forward pass would cast the weights again for every token.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(model.compute_dtype)
    model.eval()
    if plan is not None:
        compute = model.compute_dtype
        ready = plan.parallelize(model, built.pieces, compute, seq_len=1, micro_batches=1)
        assert ready.pipeline is not None, "the plan has stages"
        model = PipelinedModel(model, ready.pipeline, built.config.vocab).eval()
    step = manifest.step if manifest else None
    return OpenedModel(model, tokenizer, found.path, step, recipe)


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


def _split_into_stages(recipe: Recipe, ranks: int) -> Recipe:
    """Return a recipe with one pipeline stage a rank, and without settings that only train."""
    blocks = getattr(recipe.model, "n_layers", 0)
    if not recipe.model.layout.pipeline or blocks < ranks:
        raise RecipeError(
            f'{ranks} ranks cannot share the {blocks} blocks of "{recipe.model.name}"',
            f"take at most {blocks}" if recipe.model.layout.pipeline else "take one process",
        )
    precision = recipe.precision.model_copy(update={"float8": Float8(), "mx": MX()})
    return recipe.model_copy(
        update={
            "parallel": Parallel(pipeline=ranks, shard=1),
            "memory": Memory(),
            "compile": Compile(),
            "precision": precision,
        }
    )


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
        return self.pipeline.next_logits(
            tokens, lambda number: {**columns, "cache": own[number]}, self.vocab
        )
