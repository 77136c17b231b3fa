"""A trained model from a checkpoint or a Hugging Face folder, ready to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from ..core.errors import CheckpointError, RecipeError, nearest
from ..core.registry import require_plugins

if TYPE_CHECKING:
    from ...model_zoo.language_model import LanguageModel
    from ..checkpoint.find import Found
    from ..launch.environment import World
    from ..recipe.schema import Recipe
    from ..tokenizers.tokenizer import Tokenizer

TIMEOUT_SECONDS = 600.0
FOREIGN_SEQ_LEN = 2048
"""A Hugging Face folder does not say how long the rows were that it was trained on"""


class Weights(StrEnum):
    """Which weights of a checkpoint."""

    MODEL = "model"
    EMA = "ema"


class Dtype(StrEnum):
    """What to compute in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@dataclass(frozen=True)
class OpenedModel:
    """A model, and what is known of it."""

    model: LanguageModel
    tokenizer: Tokenizer
    path: Path
    """the checkpoint that was taken"""
    step: int | None
    """None: a Hugging Face folder"""
    recipe: Recipe
    """of a Hugging Face folder only model and tokenizer are known, the rest are defaults"""


@contextmanager
def meeting(world: World) -> Iterator[None]:
    """Let the ranks of a job meet and part; one process is alone.

    Raises:
        EnvironmentFault: they could not meet.
    """
    if world.world_size == 1:
        yield
        return
    from ..launch.group import pick_device, process_group

    with process_group(world, pick_device(world), TIMEOUT_SECONDS):
        yield


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
        plugins: modules to import first. Those that the checkpoint names are not imported on its
            word: a checkpoint never runs code.
        weights: "ema" is the average that `[ema]` keeps.
        dtype: to compute in; None: as in training.
        world: this process among ranks that have met; None: one process.

    Raises:
        CheckpointError: there is none, it is damaged, it needs a plugin, or has no average.
        RecipeError: a plugin cannot be imported, or there are more ranks than blocks.
    """
    from ..checkpoint.find import candidates, find_checkpoint
    from ..formats.hf_folder import read_config
    from ..recipe.changes import load_saved_recipe

    path, weights, dtype = Path(path), Weights(weights), Dtype(dtype) if dtype else None
    require_plugins(plugins)
    settings = None if not path.is_dir() or candidates(path) else read_config(path)
    if settings is None:
        found = find_checkpoint(path)
        recipe = load_saved_recipe(found.path, found.manifest)
        return _open_native(found, _in_dtype(recipe, dtype), weights, world)
    if weights is Weights.EMA:
        raise CheckpointError(f"{path} is a Hugging Face folder: it has one set of weights")
    return _open_foreign(path, _in_dtype(_foreign_recipe(path, settings), dtype), world)


def _open_native(
    found: Found, recipe: Recipe, weights: Weights, world: World | None
) -> OpenedModel:
    from ..checkpoint.reader import load_state
    from ..checkpoint.state import model_state

    tokenizer = recipe.tokenizer.build()
    if tokenizer.fingerprint != found.manifest.tokenizer:
        raise CheckpointError(
            f"{found.path} was trained with another tokenizer than {recipe.tokenizer.name} is now",
            "restore the tokenizer's files as they were",
        )
    averaged = [n.removeprefix("ema.") for n in found.manifest.tensors if n.startswith("ema.")]
    if weights is Weights.EMA and not averaged:
        raise CheckpointError(
            f"{found.path} holds no averaged weights", "train with [ema] decay, such as 0.999"
        )
    model, finish = _empty_model(recipe, tokenizer, world)
    state = model_state(model)
    load_state(found.path, found.manifest, state, None, model.saved_elsewhere)
    if weights is Weights.EMA:  # over the others: frozen weights have no average
        here = [name for name in averaged if f"model.{name}" in state]
        average = {f"ema.{name}": state[f"model.{name}"] for name in here}
        load_state(found.path, found.manifest, average, None, model.saved_elsewhere)
    return OpenedModel(finish(), tokenizer, found.path, found.manifest.step, recipe)


def _open_foreign(folder: Path, recipe: Recipe, world: World | None) -> OpenedModel:
    from ..formats.hf_load import load_huggingface

    tokenizer = recipe.tokenizer.build()
    model, finish = _empty_model(recipe, tokenizer, world)
    load_huggingface(folder, model, recipe.model)
    return OpenedModel(finish(), tokenizer, folder, None, recipe)


def _empty_model(
    recipe: Recipe, tokenizer: Tokenizer, world: World | None
) -> tuple[LanguageModel, Callable[[], LanguageModel]]:
    """Return a model to fill, or this rank's part of it, and what then makes it ready."""
    from ..assemble.assemble import build_model
    from ..launch.environment import World
    from ..launch.group import pick_device
    from ..parallel.materialize import materialize

    device, plan = pick_device(world or World()), None
    if world and world.world_size > 1:
        from ..parallel.plan import make_plan

        recipe = _in_stages(recipe, world.world_size)
        plan = make_plan(recipe.parallel, world.rank, world.world_size, device)
    built = build_model(recipe, tokenizer.vocab_size, device, plan)
    materialize(built.model, device, seed=0, fill=False)

    def finish() -> LanguageModel:
        model = _settled(built.model)
        if plan is None:
            return model
        from .pipelined import PipelinedModel

        reduce = model.compute_dtype
        ready = plan.parallelize(model, built.pieces, reduce, seq_len=1, micro_batches=1)
        assert ready.pipeline is not None, "the plan has stages"
        return PipelinedModel(model, ready.pipeline, built.config.vocab).eval()

    return built.model, finish


def _in_stages(recipe: Recipe, ranks: int) -> Recipe:
    """Return a recipe whose model's blocks are split over ranks, and nothing else."""
    from ..parallel.tables import Compile, Memory, Parallel
    from ..precision.tables import MX, Float8

    blocks = getattr(recipe.model, "n_layers", 0)
    if not recipe.model.layout.pipeline or blocks < ranks:
        raise RecipeError(
            f'{ranks} ranks cannot share the {blocks} blocks of "{recipe.model.name}"',
            f"take at most {blocks}" if recipe.model.layout.pipeline else "take one process",
        )
    parallel = Parallel(pipeline=ranks, shard=1)
    precision = recipe.precision.model_copy(update={"float8": Float8(), "mx": MX()})
    update = {"parallel": parallel, "memory": Memory(), "compile": Compile()}
    update["precision"] = precision
    return recipe.model_copy(update=update)


def _settled(model: LanguageModel) -> LanguageModel:
    from ..lora.adapter_weights import merge_adapters

    merge_adapters(model)
    for parameter in model.parameters():  # once, instead of for every token
        parameter.data = parameter.data.to(model.compute_dtype)
    return model.eval()


def _in_dtype(recipe: Recipe, dtype: Dtype | None) -> Recipe:
    if dtype is None:
        return recipe
    return recipe.model_copy(
        update={"precision": recipe.precision.model_copy(update={"compute": dtype.value})}
    )


def _foreign_recipe(folder: Path, settings: dict[str, Any]) -> Recipe:
    from ...model_zoo.config import SettingsError, sizes_of
    from ..core.models import models
    from ..recipe.schema import Recipe

    kinds = {
        kind: models[name]
        for name in models
        for kind in models[name].layout.hf_possible.get("model_type", ())
    }
    kind = str(settings.get("model_type"))
    if kind not in kinds:
        raise CheckpointError(
            f'{folder} is of a model of type "{kind[:80]}"; known: {", ".join(kinds)}',
            nearest(kind, kinds),
        )
    try:
        sizes = sizes_of(settings, kinds[kind])
        recipe = Recipe.model_validate(
            {"model": sizes, "tokenizer": {"name": "hf", "path": str(folder)}}
        )
    except (SettingsError, ValidationError) as error:
        raise CheckpointError(
            f"{folder}: config.json does not describe a model: {error}"
        ) from error
    longest = getattr(recipe.model, "max_seq_len", FOREIGN_SEQ_LEN)
    data = recipe.data.model_copy(update={"seq_len": min(longest, FOREIGN_SEQ_LEN)})
    return recipe.model_copy(update={"data": data})
