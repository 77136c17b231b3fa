"""Reads the checkpoints of torchtitan: torch DCP folders with torchtitan's names of parameters.

Names: `state_dict_adapter.py` of each model in https://github.com/pytorch/torchtitan,
torchtitan/models. A checkpoint says nothing of the model's sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ...model_zoo.layout import translate
from ...model_zoo.llama3.meta import NAMES as LLAMA_NAMES
from ...model_zoo.llama3.meta import ROTATED
from ...model_zoo.matrices import is_adapter
from ..checkpoint.chunks import read_dcp
from ..checkpoint.manifest import CONTENTS
from ..checkpoint.tensors import TensorRows, add_mean_rows, differs
from ..core.errors import CheckpointError
from ..core.text.display import list_problems, quote_name
from ..core.text.selection import NameSelection
from .hf_layout import Interleaved, stack_halves
from .hf_load import describe_added_rows, fill_parameter, hint_at_rows, remove_rows
from .hf_match import Shape

BLOCK = "layers.{i}."
NAMES = LLAMA_NAMES | {
    BLOCK + ours: BLOCK + theirs
    for ours, theirs in {
        "attention.q_norm.weight": "attention.q_norm.weight",
        "attention.k_norm.weight": "attention.k_norm.weight",
        "attention.q_down.weight": "attention.wq_a.weight",
        "attention.q_up.weight": "attention.wq_b.weight",
        "attention.kv_down.weight": "attention.wkv_a.weight",
        "attention.kv_norm.weight": "attention.kv_norm.weight",
        "attention.kv_up.weight": "attention.wkv_b.weight",
        "mlp.router.weight": "moe.router.gate.weight",
        "mlp.router.bias": "moe.expert_bias",
        "mlp.experts.down": "moe.experts.w2",
        "mlp.shared.gate.weight": "moe.shared_experts.w1.weight",
        "mlp.shared.up.weight": "moe.shared_experts.w3.weight",
        "mlp.shared.down.weight": "moe.shared_experts.w2.weight",
    }.items()
}
GATE_UP = {"layers.{i}.mlp.experts.gate_up": "layers.{i}.moe.experts.w1"}
"""gate, in a tensor of its own; up is in w3"""
FAMILIES = {"llama3", "qwen3", "deepseek_v3", "llama4"}
EMBED, HEAD = "tok_embeddings.weight", "output.weight"
COMPUTED = {"freqs_cis", "rope_cache"}
"""buffers in some checkpoints, which our models compute"""
BESIDE = re.compile(r"(optimizer|optim|dataloader|lr_scheduler|train_state|ema)\b.*")
"""names of what a checkpoint holds beside the model"""


def is_titan_folder(folder: Path) -> bool:
    """Return whether a folder is one of torch.distributed.checkpoint."""
    return (folder / CONTENTS).is_file()


def list_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint."""
    return [folder / CONTENTS, *sorted(folder.glob("*.distcp"))]


def open_model_tensors(folder: Path) -> dict[str, TensorRows]:
    """Return the tensors of a checkpoint's model by torchtitan's names.

    Raises:
        CheckpointError: the folder cannot be read or holds none.
    """
    every = read_dcp(folder)
    # Older versions of torchtitan save the model under a name of its own.
    inner = {name[6:]: each for name, each in every.items() if name.startswith("model.")}
    tensors = {
        name: tensor
        for name, tensor in (inner if EMBED in inner else every).items()
        if name not in COMPUTED and not BESIDE.fullmatch(name)
    }
    if EMBED not in tensors:
        some = ", ".join(map(quote_name, sorted(every)[:3])) or "none"
        raise CheckpointError(
            f"{folder} has no {EMBED}: it is no checkpoint of torchtitan; it holds {some}"
        )
    return tensors


def match_titan(
    folder: Path,
    stored: Mapping[str, TensorRows],
    shapes: Mapping[str, Shape],
    config: ModelConfig,
) -> dict[str, TensorRows]:
    """Return our parameters, read from the tensors in which torchtitan stores them.

    Args:
        folder: for messages.
        stored: what `open_model_tensors` returned.
        shapes: the shape of each parameter by our names, also of those on other pipeline stages.
        config: the model's config.

    Raises:
        CheckpointError: the tensors do not fit the model. The message lists every mismatch.
    """
    if config.name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f'torchtitan\'s names are not known for "{config.name}": {known} are')
    left, problems, found = dict(stored), [], {}
    for ours, shape in shapes.items():
        names, part = _sources(ours), shape
        if len(names) == 2:
            part = (shape[0], *shape[2:])
        parts = [left.pop(name) for name in names if name in left]
        wrong = [f"{list(each.shape)}" for each in parts if each.shape != part]
        if len(parts) < len(names):
            problems.append(f"{' and '.join(names)} ({ours} here) is not in the folder")
        elif wrong:
            problems.append(f"{names[0]} is {wrong[0]} there and {list(part)} here ({ours})")
        else:
            found[ours] = _join(ours, parts, shape, config)
    head = left.pop(HEAD, None) if "head.proj.weight" not in shapes else None
    if head is not None and EMBED in stored and differs(head, stored[EMBED], head.dtype):
        problems.append(f"{HEAD} is not {EMBED}: give the model two, tie_embeddings = false")
    problems += [f"{quote_name(name)} is in the folder but not in the model" for name in left]
    if problems:
        hint = ""
        if any(name.endswith("moe.expert_bias") for name in left):
            hint = "set model.moe.balance_bias = true: torchtitan balanced by biases"
        raise CheckpointError(list_problems(f"{folder} does not fit the model:", problems), hint)
    return found


def _sources(ours: str) -> list[str]:
    gate = translate(ours, GATE_UP)
    if gate is not None:
        return [gate, f"{gate[:-1]}3"]
    return [translate(ours, NAMES) or ours]


def _join(ours: str, parts: list[TensorRows], shape: Shape, config: ModelConfig) -> TensorRows:
    if len(parts) == 2:
        return stack_halves(parts, shape)
    if config.name == "llama3" and ours.endswith(ROTATED):
        width: int = config.head_width  # type: ignore[attr-defined]
        return Interleaved(parts[0], shape, width)
    return parts[0]


def load_titan(
    folder: Path,
    model: Model,
    config: ModelConfig,
    selection: NameSelection,
    *,
    may_grow: bool = False,
) -> list[str]:
    """Fill a model's weights in place from a checkpoint of torchtitan, cast to the model's dtypes.

    Adapters keep their values. Each rank reads its own part, without communication.

    Args:
        folder: the folder of one step.
        model: the model, with storage for its parameters.
        config: the config that the model was built from.
        selection: the weights that stay as they are, and tensors that have other names.
        may_grow: whether the checkpoint may have fewer tokens: see `add_mean_rows`.

    Returns:
        Sentences that the user should read.

    Raises:
        CheckpointError: the folder cannot be read or holds another model. The message lists every
            mismatch, and no parameter was changed.
    """
    stored = open_model_tensors(folder)
    here: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if not is_adapter(n)}
    buffers = model.saved_buffers()
    here |= {name: each for name, each in buffers.items() if _sources(name)[0] in stored}
    shapes = {name: tuple(each.shape) for name, each in here.items()}
    remote = model.remote_state.items()
    shapes |= {
        name: shape
        for name, shape in remote
        if (name in model.remote_parameters or _sources(name)[0] in stored) and not is_adapter(name)
    }
    selection.require_used(shapes, stored)
    stored = {selection.rename(name): tensor for name, tensor in stored.items()}
    excluded = set(filter(selection.excludes, [*shapes, *stored]))
    excluded |= {source for name in excluded & shapes.keys() for source in _sources(name)}
    stored = {name: tensor for name, tensor in stored.items() if name not in excluded}
    shapes = {name: shape for name, shape in shapes.items() if name not in excluded}
    wanted, notes = shapes, list[str]()
    lacking = config.vocab - stored[EMBED].shape[0] if EMBED in stored else 0
    if lacking > 0:
        if not may_grow:
            message = f"{folder} has fewer tokens than the model's {config.vocab}"
            raise CheckpointError(message, hint_at_rows(config.vocab - lacking))
        shapes = remove_rows(shapes, lacking, config)
        notes = [describe_added_rows(config.vocab - lacking, config.vocab)]
    rows = match_titan(folder, stored, shapes, config)
    with torch.no_grad():
        for name in here.keys() & rows.keys():
            tensor = rows[name]
            if wanted[name] != shapes[name]:
                tensor = add_mean_rows(tensor, wanted[name][0])
            fill_parameter(here[name], tensor)
    return notes + [
        f"{name} starts again: not in the folder" for name in buffers if name not in here
    ]
