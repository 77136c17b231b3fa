"""What `trainer run --replay` prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ..engine.core.text.display import make_printable
from ..engine.observe.metrics import replace_non_finite
from .table import print_table

if TYPE_CHECKING:
    from ..engine.run.replay import Replay
    from ..engine.train.probe import LayerSums

HEAD = ("LAYER", "ACTIVATIONS", "LARGEST", "THEIR GRADIENT", "LARGEST", "WEIGHTS' GRADIENT",
        "LARGEST", "NON-FINITE")  # fmt: skip


def launch_replay(command: list[str], nproc: int) -> int:
    """Start the ranks of a replay on this machine, leaving no logs; return the job's exit code."""
    from ..engine.launch.child import trainer_command
    from ..engine.launch.local import launch

    with TemporaryDirectory(prefix="trainer-replay-") as logs:
        return launch(trainer_command(command), nproc, log_dir=Path(logs))


def print_replay(replay: Replay, as_json: bool) -> None:
    """Print the step beside what was recorded, and a line for each layer."""
    if as_json:
        layers = {
            name: asdict(sums)
            | {
                "activation_rms": sums.activations.rms,
                "gradient_rms": sums.gradients.rms,
                "weight_gradient_norm": sums.weights.norm,
            }
            for name, sums in replay.layers.items()
        }
        print(json.dumps(replace_non_finite(asdict(replay) | {"layers": layers}), indent=1))
        return
    target = replay.target
    start = make_printable(replay.start) or "the start of the run"
    again = target.step - 1 - replay.start_step
    print(f"step {target.step:,}, from {start}; steps trained once more: {again:,}")
    rows = [("", "RECORDED", "REPLAYED", "")]
    for key, value in (("loss", replay.loss), ("grad_norm", replay.grad_norm)):
        recorded = target.recorded.get(key)
        same = recorded == value or (recorded != recorded and value != value)
        word = "" if recorded is None else "the same bits" if same else "differs"
        rows.append((key, "" if recorded is None else f"{recorded:.9g}", f"{value:.9g}", word))
    print_table(rows)
    print()
    print_table([HEAD, *map(_cells, replay.layers.items())])
    print("\nactivations and their gradients: root mean square; weights' gradient: L2 norm")


def _cells(item: tuple[str, LayerSums]) -> tuple[str, ...]:
    name, sums = item
    parts = (sums.activations, sums.gradients, sums.weights)
    bad = sum(part.non_finite for part in parts)
    numbers: list[str] = []
    for part, value in zip(parts, (parts[0].rms, parts[1].rms, parts[2].norm), strict=True):
        numbers += [f"{value:.4g}", f"{part.largest:.4g}"] if part.count else ["", ""]
    return (name, *numbers, f"{bad:,.0f}")
