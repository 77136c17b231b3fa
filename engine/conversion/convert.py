"""Converts a checkpoint from one format to another, a few rows at a time to bound the memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from pydantic import ValidationError

from ...model_zoo.layout import is_load
from ..checkpoint.tensors import DTYPES, TensorRows, differs, nbytes
from ..core.errors import CheckpointError, DataError, RecipeError
from ..core.files import require_path
from ..core.text.display import list_problems
from ..core.unfinished import refuse_existing
from ..download.hub import resolve_folder, resolve_tokenizer
from ..recipe.load import load_recipe
from ..recipe.schema import Recipe
from ..tasks.classification.config import table_of_head
from ..tokenizers.configs import BytesTokenizer, HFTokenizer, TiktokenTokenizer, TokenizerConfig
from ..tokenizers.tokenizer import Tokenizer
from . import gguf, targets
from .meta import open_meta
from .source_weights import SourceWeights
from .sources import open_huggingface, open_native, open_torch
from .targets import Job
from .titan import open_titan
from .writing import Advance, Counter, publish_when_complete, run_in_threads

TARGET_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Open = Callable[[Path, Recipe | None], SourceWeights]


@dataclass(frozen=True)
class Target:
    """The functions that write a checkpoint format and read it back for verification.

    Attributes:
        write: writes the job's tensors to a temporary path.
        read: returns the tensors at a path that `write` has written, by our parameter names.
    """

    write: Callable[[Job, Path], None]
    read: Callable[[Path, Job], dict[str, TensorRows]]


NATIVE = Target(targets.write_checkpoint, targets.read_checkpoint)
HUGGINGFACE = Target(targets.write_huggingface, targets.read_huggingface)
TORCH = Target(targets.write_torch, targets.read_torch)
GGUF = Target(gguf.write_gguf, gguf.read_gguf)
Q8_0 = "q8_0"
CONVERSIONS: dict[str, tuple[Open, Target]] = {
    "hf2dcp": (open_huggingface, NATIVE),
    "dcp2hf": (open_native, HUGGINGFACE),
    "meta2dcp": (open_meta, NATIVE),
    "torch2dcp": (open_torch, NATIVE),
    "titan2dcp": (open_titan, NATIVE),
    "dcp2torch": (open_native, TORCH),
    "hf2hf": (open_huggingface, HUGGINGFACE),
    "gguf2dcp": (gguf.open_gguf, NATIVE),
    "dcp2gguf": (open_native, GGUF),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a conversion.

    Args:
        dtype: a key of `TARGET_DTYPES`, or "q8_0" for a GGUF file; None keeps each tensor's dtype.
        shard_bytes: largest size in bytes of a Hugging Face file, unless one tensor is larger.
        recipe: a recipe that describes the model; None takes the description in the source.
        tokenizer: "bytes", a tokenizer.json or its folder; None takes the tokenizer of the source.
        section: the weights to read from one of our checkpoints: "model" or "ema".
        verify: read the target back and compare it with the source bit for bit.
    """

    dtype: str | None = None
    shard_bytes: int = 5 * 10**9
    recipe: Path | None = None
    tokenizer: str | None = None
    section: str = "model"
    verify: bool = False


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        tensors: the number of tensors that were written, by our parameter names.
        bytes: the size of these tensors in the target.
        notes: sentences that the user should read.
    """

    tensors: int
    bytes: int
    notes: list[str]


def convert(
    conversion: str,
    source: Path,
    target: Path,
    options: Options,
    started: Callable[[int], Advance] = lambda _: lambda _: None,
) -> Converted:
    """Convert a checkpoint. The target appears under its name only when it is complete.

    Args:
        conversion: a key of `CONVERSIONS`.
        source: path of the checkpoint to read.
        target: path to write, which must not exist.
        options: the options of the conversion.
        started: called once with the number of bytes to write; returns a function that is called
            with the size of each piece that was written.

    Raises:
        RecipeError: the target exists, or the recipe is wrong.
        CheckpointError: the source cannot be read or does not fit the model, or writing failed.
        DataError: the tokenizer cannot be read.
    """
    for path in (source, target, options.tokenizer or ""):
        require_path(path)
    _refuse_nesting(source := resolve_folder(source), target)
    recipe = load_recipe(options.recipe).recipe if options.recipe else None
    opener, format_ = CONVERSIONS[conversion]
    if options.section != "model":
        opener = partial(open_native, section=options.section)
    opened = opener(source, recipe)
    if format_ is HUGGINGFACE:
        opened.tensors = {name: t for name, t in opened.tensors.items() if not is_load(name)}
    if format_ is GGUF and options.dtype == Q8_0:
        opened.tensors = gguf.round_to_q8(opened.tensors)
        options = replace(options, dtype="fp32")
    # A Hugging Face folder's own files say what transformers needs.
    has_own = format_ is HUGGINGFACE and opened.settings is not None
    job = _prepare_job(
        opened, target, options, wants_tokenizer=not has_own and format_ is not TORCH
    )
    if format_ is GGUF:
        job.forms = gguf.choose_forms(job.forms)
    with publish_when_complete(target, job.bytes) as temporary:
        job.advance = Counter(started(job.bytes * (1 + options.verify)))
        format_.write(job, temporary)
        if options.verify:
            _verify(job, format_, temporary)
    return Converted(len(job.forms), job.bytes, opened.notes)


def _refuse_nesting(source: Path, target: Path) -> None:
    """Check that the target does not exist and does not lie inside the source.

    Raises:
        RecipeError: the target exists, lies inside the source, or one of the paths is unusable.
    """
    refuse_existing(target)
    try:
        source.exists()  # raises where it cannot be a name
        there, here = source.resolve(), target.resolve()
    except (OSError, RuntimeError) as error:  # of links in a circle, Python 3.11 raises the latter
        raise RecipeError(f"{source} or {target} is no usable path: {error}") from error
    if there == here or there in here.parents:
        raise RecipeError(f"{target} lies inside of {source}", "name a target outside of it")


def _prepare_job(
    opened: SourceWeights, target: Path, options: Options, *, wants_tokenizer: bool
) -> Job:
    odd = [
        f"{name} is {tensor.dtype}"
        for name, tensor in opened.tensors.items()
        if tensor.dtype not in DTYPES.values()
    ]
    if odd:
        raise CheckpointError(list_problems(f"{opened.place} holds more than plain weights:", odd))
    config, side = _choose_tokenizer(opened, options)
    tokenizer = _build(config, opened, options) if wants_tokenizer else None
    if config is None or tokenizer is None:
        config, side = BytesTokenizer(), opened.side
    base = opened.recipe or _make_recipe(opened)
    forms = {
        name: (TARGET_DTYPES[options.dtype] if options.dtype else tensor.dtype, tensor.shape)
        for name, tensor in opened.tensors.items()
    }
    return Job(
        opened=opened,
        target=target,
        forms=forms,
        recipe=base.model_copy(update={"model": opened.config, "tokenizer": config}),
        tokenizer=tokenizer,
        side=side,
        shard_bytes=options.shard_bytes,
        advance=lambda _: None,
    )


def _make_recipe(opened: SourceWeights) -> Recipe:
    """Return a recipe with the task of a foreign model's head.

    Raises:
        CheckpointError: no task has such a head.
    """
    head = opened.config.task_head
    table = {"task": table_of_head(head)} if head else {}
    try:
        recipe = Recipe.model_validate({"run": {"steps": 1}, **table})
    except ValidationError as error:
        reasons = [str(each["msg"]).removeprefix("Value error, ") for each in error.errors()]
        raise CheckpointError(list_problems(f"{opened.place} fits no task:", reasons)) from None
    ours = recipe.task.adapt_model(opened.config)
    if head and ours.parameter_shapes() != opened.config.parameter_shapes():
        raise CheckpointError(f"{opened.place} fits no task: the head of {head.kind} has a bias")
    return recipe


def _choose_tokenizer(
    opened: SourceWeights, options: Options
) -> tuple[TokenizerConfig | None, Path | None]:
    """Choose the tokenizer of the target.

    The order is: the `--tokenizer` option, the tokenizer of `--recipe` unless it is "bytes", a
    tokenizer.json beside the weights, the recipe's tokenizer, a `tokenizer.model` in Meta's folder.

    Returns:
        The config of the tokenizer, or None if none is known, and the folder whose tokenizer files
        are copied unchanged, or None.
    """
    if options.tokenizer == "bytes":
        return BytesTokenizer(), None
    if options.tokenizer:
        return HFTokenizer(path=str(resolve_tokenizer(options.tokenizer))), None
    recorded = opened.recipe.tokenizer if opened.recipe else None
    is_named = options.recipe is not None and not isinstance(recorded, BytesTokenizer)
    side, vocabulary = opened.side, opened.place / "tokenizer.model"
    if side is not None and (side / "tokenizer.json").is_file() and not is_named:
        eos_token = getattr(recorded, "eos_token", None)
        return HFTokenizer(path=str(side.absolute()), eos_token=eos_token), side
    if recorded is None and vocabulary.is_file():
        return TiktokenTokenizer(path=str(vocabulary.absolute()), pattern="llama3"), None
    return recorded, None


def _build(
    config: TokenizerConfig | None, opened: SourceWeights, options: Options
) -> Tokenizer | None:
    """Build the tokenizer, or add a note and return None if there is none or it cannot be built.

    Raises:
        DataError, RecipeError: the user named the tokenizer, and it cannot be built.
        CheckpointError: the embedding has fewer rows than the tokenizer has tokens.
    """
    if config is None:
        opened.notes.append(
            f"{opened.place} has no tokenizer.json: give the tokenizer with --tokenizer; "
            "until then text is taken as bytes"
        )
        return None
    try:
        tokenizer = config.build()
    except (DataError, RecipeError) as error:
        if options.tokenizer or options.recipe:
            raise
        opened.notes.append(f"the tokenizer cannot be used: {error.message}")
        return None
    if tokenizer.vocab_size > opened.config.vocab:
        raise CheckpointError(
            f"{opened.config.vocab} rows cannot embed the {tokenizer.vocab_size} tokens of the "
            "tokenizer",
            "give the tokenizer of its training by --tokenizer, or add rows: run.init_from",
        )
    return tokenizer


def _verify(job: Job, target: Target, temporary: Path) -> None:
    """Read the target back and compare each tensor with the source, bit for bit.

    Raises:
        CheckpointError: a tensor differs.
    """
    written = target.read(temporary, job)

    def compare(name: str) -> str:
        dtype, shape = job.forms[name]
        is_wrong = differs(written[name], job.opened.tensors[name], dtype)
        job.advance(nbytes(shape, dtype))
        return name if is_wrong else ""

    wrong = [
        name for name in run_in_threads([partial(compare, name) for name in job.forms]) if name
    ]
    if wrong:
        raise CheckpointError(
            list_problems(f"what was written differs from {job.opened.place}:", wrong),
            "the disk or the memory of this machine may be faulty",
        )
