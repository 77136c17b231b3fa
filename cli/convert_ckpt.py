"""`trainer convert-ckpt`: checkpoints from one format to another."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.core.errors import RecipeError
from ..engine.core.terminal import ProgressBar, is_terminal
from ..engine.inference import inputs
from .options import AsJson, Plugins
from .table import echo

if TYPE_CHECKING:
    from ..engine.conversion.writing import Advance

app = typer.Typer(
    no_args_is_help=True, help="Convert checkpoints; the target appears when it is complete."
)


class GgufType(StrEnum):
    """What the matrices of a GGUF file are; vectors are fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    Q8_0 = "q8_0"


Source = Annotated[
    Path, typer.Argument(metavar="SRC", help="a file, a folder, a run or an id of the hub")
]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="must not exist")]
Dtype = Annotated[inputs.Dtype | None, typer.Option(help="cast to this; default: kept")]
GgufDtype = Annotated[GgufType | None, typer.Option(help="type of the matrices; default: kept")]
RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", help="TOML file that describes model and tokenizer")
]
TokenizerPath = Annotated[
    str | None,
    typer.Option("--tokenizer", help='tokenizer.json, its folder, an id of the hub, or "bytes"'),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="read the target back and compare it bit for bit")
]
ShardSize = Annotated[str, typer.Option(help="largest file, such as 5GB or 500MB")]
Which = Annotated[
    inputs.Weights, typer.Option("--weights", help="trained weights, or their average")
]


@app.command()
def hf2dcp(
    source: Source,
    target: Destination,
    dtype: Dtype = None,
    recipe: RecipeFile = None,
    tokenizer: TokenizerPath = None,
    verify: Verify = False,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Hugging Face folder to a checkpoint of ours."""
    _convert("hf2dcp", source, target, dtype, recipe, tokenizer, verify, plugin, as_json)


@app.command()
def dcp2hf(
    source: Source,
    target: Destination,
    dtype: Dtype = None,
    shard_size: ShardSize = "5GB",
    weights: Which = inputs.Weights.MODEL,
    recipe: RecipeFile = None,
    tokenizer: TokenizerPath = None,
    verify: Verify = False,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Checkpoint of ours (or a run: its newest) to a Hugging Face folder."""
    _convert(
        "dcp2hf", source, target, dtype, recipe, tokenizer, verify, plugin, as_json,
        shard_size, weights,
    )  # fmt: skip


@app.command()
def meta2dcp(
    source: Source,
    target: Destination,
    dtype: Dtype = None,
    recipe: RecipeFile = None,
    tokenizer: TokenizerPath = None,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Meta's original folder (params.json, consolidated.*.pth) to a checkpoint of ours."""
    _convert("meta2dcp", source, target, dtype, recipe, tokenizer, verify, None, as_json)


@app.command()
def torch2dcp(
    source: Source,
    target: Destination,
    dtype: Dtype = None,
    recipe: RecipeFile = None,
    tokenizer: TokenizerPath = None,
    verify: Verify = False,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """State dict of torch.save (our names, or Hugging Face's) to a checkpoint of ours."""
    _convert("torch2dcp", source, target, dtype, recipe, tokenizer, verify, plugin, as_json)


@app.command()
def titan2dcp(
    source: Source,
    target: Destination,
    dtype: Dtype = None,
    recipe: RecipeFile = None,
    tokenizer: TokenizerPath = None,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """torchtitan's DCP folder of a step, with --recipe, to a checkpoint of ours."""
    _convert("titan2dcp", source, target, dtype, recipe, tokenizer, verify, None, as_json)


@app.command()
def dcp2torch(
    source: Source,
    target: Destination,
    dtype: Dtype = None,
    weights: Which = inputs.Weights.MODEL,
    recipe: RecipeFile = None,
    verify: Verify = False,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Checkpoint of ours (or a run: its newest) to a state dict of torch.save."""
    _convert(
        "dcp2torch", source, target, dtype, recipe, None, verify, plugin, as_json, weights=weights
    )


@app.command()
def hf2hf(
    source: Source,
    target: Destination,
    dtype: Dtype = None,
    shard_size: ShardSize = "5GB",
    verify: Verify = False,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Hugging Face folder to another, cast or split into files of another size."""
    _convert("hf2hf", source, target, dtype, None, None, verify, plugin, as_json, shard_size)


@app.command()
def gguf2dcp(
    source: Source,
    target: Destination,
    dtype: Dtype = None,
    recipe: RecipeFile = None,
    tokenizer: TokenizerPath = None,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """GGUF file (f32, f16, bf16, q8_0) to a checkpoint of ours."""
    _convert("gguf2dcp", source, target, dtype, recipe, tokenizer, verify, None, as_json)


@app.command()
def dcp2gguf(
    source: Source,
    target: Destination,
    dtype: GgufDtype = None,
    weights: Which = inputs.Weights.MODEL,
    recipe: RecipeFile = None,
    tokenizer: TokenizerPath = None,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Checkpoint of ours (or a run: its newest) to a GGUF file, with its tokenizer."""
    _convert(
        "dcp2gguf", source, target, dtype, recipe, tokenizer, verify, None, as_json, weights=weights
    )


@app.command()
def dcp2peft(
    source: Source,
    target: Destination,
    base: Annotated[
        str | None, typer.Option(help="name or folder of the base model; default: run.init_from")
    ] = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Adapters of a checkpoint of ours (or of a run: its newest) to a folder that PEFT loads."""
    from ..engine.conversion.peft import export_adapter
    from ..engine.core.plugin_modules import require_plugins

    require_plugins(plugin or [])
    count = export_adapter(source, target, base=base)
    content = json.dumps({"target": str(target), "tensors": count})
    echo(content if as_json else f"{target}: {count} tensors")


def _convert(
    conversion: str,
    source: Path,
    target: Path,
    dtype: inputs.Dtype | GgufType | None,
    recipe: Path | None,
    tokenizer: str | None,
    verify: bool,
    plugin: list[str] | None,
    as_json: bool,
    shard_size: str = "5GB",
    weights: inputs.Weights = inputs.Weights.MODEL,
) -> None:
    shard_bytes = _bytes(shard_size)
    from ..engine.conversion.convert import Options, convert
    from ..engine.core.plugin_modules import require_plugins

    require_plugins(plugin or [])
    options = Options(
        dtype=dtype.value if dtype else None,
        shard_bytes=shard_bytes,
        recipe=recipe,
        tokenizer=tokenizer,
        section=weights.value,
        verify=verify,
    )
    begin = time.monotonic()
    with ExitStack() as stack:
        done = convert(conversion, source, target, options, _progress(stack, conversion))
    seconds = time.monotonic() - begin
    if as_json:
        echo(
            json.dumps(
                {"target": str(target), **vars(done), "seconds": seconds, "verified": verify}
            )
        )
        return
    for note in done.notes:
        echo(f"note: {note}")
    size = f"{done.bytes / 1e9:.2f} GB" if done.bytes >= 1e8 else f"{done.bytes / 1e6:.2f} MB"
    verified = ", read back and compared" if verify else ""
    echo(f"{target}: {done.tensors} tensors, {size}, {seconds:.1f} s{verified}")


def _bytes(text: str) -> int:
    """Return the number of bytes in `5GB`.

    Raises:
        RecipeError: that is no size.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT]?)B", text.strip(), re.IGNORECASE)
    count = int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ")) if found else 0
    if count < 1:
        raise RecipeError(f"--shard-size {text} is no size", "such as 5GB or 500MB")
    return count


def _progress(stack: ExitStack, conversion: str) -> Callable[[int], Advance]:
    """Return what shows a bar on a terminal, and nothing elsewhere."""
    if not is_terminal(sys.stderr):
        return lambda _: lambda _: None
    bar = stack.enter_context(closing(ProgressBar(sys.stderr, transient=True)))
    bar.start()

    def start(total: int) -> Advance:
        started, done = time.monotonic(), 0
        units = (("GB", 10**9), ("MB", 10**6), ("kB", 1000))
        unit, scale = next((each for each in units if total >= each[1]), units[-1])

        def advance(count: int) -> None:
            nonlocal done
            done += count
            speed = max(done, 1) / max(time.monotonic() - started, 1e-3)
            below = f"{done / scale:.1f}/{total / scale:.1f} {unit} · {speed / 1e6:,.0f} MB/s"
            bar.update(conversion, done, total, (total - done) / speed, below, force=done >= total)

        return advance

    return start
