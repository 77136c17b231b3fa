"""Export the weights of a finished run as folders that Hugging Face's libraries load."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from ...model_zoo.matrices import is_adapter
from ..checkpoint.find import IntactCheckpoint
from ..checkpoint.ranks import Ranks
from ..checkpoint.reader import load_state
from ..checkpoint.state import model_state
from ..conversion.export import export_huggingface
from ..conversion.peft import save_adapter
from ..conversion.source_weights import hf_parts
from ..core import faults
from ..core.files import atomic_write, read_regular
from ..core.run_dir import EXPORTS
from ..lora.adapter_weights import merged_weights
from ..lora.peft_folder import name_in_peft
from ..precision.hardware import DTYPES

if TYPE_CHECKING:
    from ..assemble.assemble import Assembled

FINAL, AVERAGE, ADAPTER = EXPORTS
RECORD = "exported.json"


def require_exportable(parts: Assembled) -> None:
    """Check before training that the weights have names in the format that they are exported in.

    Raises:
        CheckpointError: some weights have none in Hugging Face's format.
    """
    if parts.checkpoint.export == "none":
        return
    weights = parts.model.named_parameters()
    shapes = {name: tuple(weight.shape) for name, weight in weights if not is_adapter(name)}
    hf_parts(shapes, parts.model_config)


def export_run(
    parts: Assembled,
    run: Path,
    step: int,
    group: ProcessGroup | None,
    found: IntactCheckpoint | None = None,
) -> list[Path]:
    """Write the weights after the run's last step, unless that is done; all ranks call it.

    `hf` gets the weights, adapters merged; `hf-ema` their average, `adapter` the adapters alone,
    where there are such that PEFT has names for. Folders of an earlier end of the run are replaced.

    Args:
        parts: the parts of the run, with the model and its average.
        run: the run directory.
        step: the last step.
        group: a gloo group of all ranks; None in one process.
        found: the last checkpoint, which is read first; None where the weights are in place.

    Returns:
        the folders written.

    Raises:
        CheckpointError: writing failed; nothing incomplete is left.
    """
    ranks = Ranks(group)
    dtype = parts.recipe.checkpoint.export_dtype
    if ranks.reduce(lambda: None, lambda _: _is_done(run, step, dtype)):
        return []
    average = parts.average
    if found is not None:
        tensors = model_state(parts.model)
        if average and average.is_separate:  # otherwise the saved weights are the average
            tensors |= average.prepare(found.manifest.tensors)
        load_state(found.path, found.manifest, tensors, group, parts.model.remote_state)
    names = [FINAL]
    names += [AVERAGE] * (average is not None and average.has_begun)
    names += [ADAPTER] * (parts.recipe.lora.rank > 0 and _fits_peft(parts))
    ranks.reduce(lambda: None, lambda _: _clear(run))
    faults.point("train.export", ranks.rank, step)
    for name in names:
        if name == ADAPTER:
            base = parts.recipe.run.init_from
            to = DTYPES.get(dtype or "")
            save_adapter(
                run / ADAPTER,
                parts.model,
                parts.model_config,
                parts.recipe.lora,
                base=base,
                dtype=to,
                group=group,
            )
        else:
            is_averaged = average and average.is_separate == (name == AVERAGE)
            with average.swap_in() if average and is_averaged else nullcontext():
                _export(parts, run / name, group)
    record = json.dumps({"step": step, "folders": names, "dtype": dtype}) + "\n"
    ranks.reduce(lambda: None, lambda _: atomic_write(run / RECORD, record))
    return [run / name for name in names]


def _fits_peft(parts: Assembled) -> bool:
    """Return whether PEFT has names for the adapters: none beside rows of a larger tensor."""
    # With the names of all stages of a pipeline, so that all ranks decide alike.
    named = (name for name, _ in parts.model.named_parameters())
    names = [*filter(is_adapter, [*parts.model.remote_parameters, *named])]
    return all(name_in_peft(name, parts.model_config, names) for name in names)


def _export(parts: Assembled, folder: Path, group: ProcessGroup | None) -> None:
    for module in parts.model.modules():
        if reshard := getattr(module, "reshard", None):
            reshard()  # FSDP may still hold weights that it has gathered, in another dtype
    weights = merged_weights(parts.model)
    saved = parts.model.saved_buffers()
    to_hf = parts.model_config.layout.to_hf
    weights |= {name: buffer for name, buffer in saved.items() if to_hf(name)}
    copies = set(map(id, parts.parallel_model.duplicate_parameters))
    for name, weight in parts.model.named_parameters():
        if id(weight) in copies:
            del weights[name]
    dtype = DTYPES.get(parts.recipe.checkpoint.export_dtype or "")
    config, tokenizer = parts.model_config, parts.tokenizer
    export_huggingface(folder, weights, config, tokenizer, dtype=dtype, group=group)


def _is_done(run: Path, step: int, dtype: str | None) -> bool:
    try:
        recorded = json.loads(read_regular(run / RECORD))
        made = all((run / name).is_dir() for name in recorded["folders"])
        return made and recorded["step"] == step and recorded.get("dtype") == dtype
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _clear(run: Path) -> None:
    (run / RECORD).unlink(missing_ok=True)
    for name in (FINAL, AVERAGE, ADAPTER):
        shutil.rmtree(run / name, ignore_errors=True)
