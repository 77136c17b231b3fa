"""Opens Llama 4's text model in Meta's format: wide weights apart over files, experts in stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ...model_zoo.layout import translate
from ...model_zoo.llama4.config import Llama4Config
from ...model_zoo.llama4.meta import LEFT, LEFT_ENDINGS, NAMES, RENAMED, config_from_params
from ..checkpoint.tensors import DerivedTensor, FileTensor, TensorRows, row_count
from ..core.errors import CheckpointError
from ..core.text.display import list_problems
from ..formats.hf_layout import RowRange, stack_halves
from ..formats.hf_match import Shape
from .meta_join import join
from .source_weights import SourceWeights, config_or_error, parameter_shapes

EMBED, W1 = "tok_embeddings.weight", "feed_forward.w1.weight"
EXPERTS = "feed_forward.experts."


def open_llama4(
    folder: Path, params: Mapping[str, Any], files: Sequence[Mapping[str, FileTensor]]
) -> SourceWeights:
    """Open the text model of a folder of Llama 4; tensors for images are left there.

    Args:
        folder: the folder.
        params: the content of params.json.
        files: the tensors of each consolidated file, by Meta's names.

    Raises:
        CheckpointError: the folder does not fit the model. The message lists every mismatch.
    """
    heads = [params.get(key) for key in ("n_heads", "n_kv_heads")]
    moe = params["moe_args"] if isinstance(params["moe_args"], dict) else {}
    numbers = [*heads, moe.get("num_experts")]
    if not all(type(number) is int and number > 0 for number in numbers):
        raise CheckpointError(
            f"{folder}: params.json does not say n_heads, n_kv_heads and moe_args.num_experts"
        )
    queries, keys, experts = cast("list[int]", numbers)
    parts = [_by_module(file, queries, keys, experts) for file in files]
    first, count = parts[0], len(parts)
    widths = [
        next((each.shape[dim] * count for name, each in first.items() if name.endswith(end)), 0)
        for end, dim in ((f"{EXPERTS}w1", 1), (f".{W1}", 0))
    ]
    embed = first.get(EMBED)
    rows = embed.shape[0] if embed else 1
    if embed and embed.shape[1:] == (params.get("dim"),):
        rows *= count
    make = partial(config_from_params, params, rows, *widths)
    config = cast("Llama4Config", config_or_error(make, folder / "params.json"))
    found = {
        f"{at} {name}": each.shape for at, part in enumerate(parts) for name, each in part.items()
    }
    shapes = parameter_shapes(config, found, folder)
    tensors = _match(folder, shapes, parts)
    images = any(name.startswith("vision_") for name in files[0])
    notes = ["the text model alone is taken: tensors for images are left"] * images
    return SourceWeights(folder, config, tensors, None, None, folder, notes)


def _match(
    folder: Path, shapes: Mapping[str, Shape], parts: Sequence[Mapping[str, TensorRows]]
) -> dict[str, TensorRows]:
    """Return the parameters of a model by our names, joined from all files.

    Raises:
        CheckpointError: they do not fit. The message lists every mismatch.
    """
    tensors, problems, used = dict[str, TensorRows](), [], set[str]()
    for name, shape in shapes.items():
        theirs = translate(name, NAMES) or name
        names = [theirs, f"{theirs[:-1]}3"] if name.endswith("gate_up") else [theirs]
        used.update(names)
        part = (shape[0], *shape[2:]) if len(names) == 2 else shape
        whole = []
        for each in names:
            tensor = join(each, part, parts)
            if tensor is None:
                problems.append(f"{each} is not in the files ({name} here)")
            elif tensor.shape != part:
                found = list(tensor.shape)
                problems.append(f"{each} is {found} there and {list(part)} here ({name})")
            else:
                whole.append(tensor)
        if len(whole) == len(names):
            tensors[name] = whole[0] if len(whole) == 1 else stack_halves(whole, shape)
    left = [name for name in parts[0] if name not in used]
    problems += [f"{name} is in the files but not in the model" for name in left]
    if problems:
        raise CheckpointError(list_problems(f"{folder} does not fit the model:", problems))
    return tensors


def _by_module(
    file: Mapping[str, FileTensor], queries: int, keys: int, experts: int
) -> dict[str, TensorRows]:
    """Return one file's tensors of the text model by the names of Meta's modules, in our layout.

    The published files hold some of them together, and experts in other layouts.
    """
    found: dict[str, TensorRows] = {}
    for name, tensor in file.items():
        if name.startswith(LEFT) or name.endswith(LEFT_ENDINGS):
            continue
        block, end = _split(name)
        end = RENAMED.get(end, end)
        if end == "attention.wqkv.weight":
            unit = tensor.shape[0] // (queries + 2 * keys)
            sizes = {"wq": queries * unit, "wk": keys * unit, "wv": keys * unit}
            found |= _rows(tensor, {f"{block}attention.{k}.weight": n for k, n in sizes.items()})
        elif end == "feed_forward.mlp.fc1_weight":
            half = tensor.shape[0] // 2
            found |= _rows(tensor, {f"{block}feed_forward.w{n}.weight": half for n in (1, 3)})
        elif end.startswith(EXPERTS):
            rows = tensor.shape[0] if len(tensor.shape) == 2 else tensor.shape[0] * tensor.shape[1]
            shape = (experts, tensor.shape[-1], rows // experts)
            found[block + end] = TransposedMatrices(tensor, shape)
        elif end == "feed_forward.router_DE":
            found[block + end] = TransposedMatrix(tensor, tensor.shape[::-1])
        else:
            found[block + end] = tensor
    return found


def _split(name: str) -> tuple[str, str]:
    """Return `layers.3.` and the rest of a name; the first is empty outside of blocks."""
    if not name.startswith("layers."):
        return "", name
    _, number, end = name.split(".", 2)
    return f"layers.{number}.", end


def _rows(tensor: TensorRows, sizes: Mapping[str, int]) -> dict[str, TensorRows]:
    """Return ranges of a tensor's rows, one after the other."""
    found, start = dict[str, TensorRows](), 0
    for name, size in sizes.items():
        found[name] = RowRange(tensor, (size, *tensor.shape[1:]), start)
        start += size
    return found


@dataclass(frozen=True)
class TransposedMatrices(DerivedTensor):
    """Matrices [E, columns, rows] of a stack [E, rows, columns], which may be stored flat."""

    def read(self, first: int, last: int) -> Tensor:
        """Return experts `first` to `last`, exclusive."""
        experts, columns, rows = self.shape
        step = row_count(self.source.shape) // experts
        stored = self.source.read(first * step, last * step)
        return stored.reshape(last - first, rows, columns).mT.contiguous()


@dataclass(frozen=True)
class TransposedMatrix(DerivedTensor):
    """A small matrix whose rows are stored as columns."""

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive."""
        return self.source.read(0, self.source.shape[0]).mT[first:last].contiguous()
