"""What the tests of sweeps share: a recipe, a grid, and programs that stand in for SLURM's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """\
[run]
steps = 4
[model]
dim = 32
n_layers = 1
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
[data]
seq_len = 32
global_batch = 4
micro_batch = 4
[[data.sources]]
name = "synthetic"
[schedule]
name = "constant"
[evaluate]
interval = 2
steps = 1
[metrics]
interval = 1
"""
GRID = ("--grid", "optimizer.lr=1e-3,1e-2")
Command = Callable[..., tuple[int, str, str]]
PROGRAMS = {
    "srun": '#!/bin/sh\nexec "$@"\n',
    "scontrol": '#!/bin/sh\necho "$@" >> requeued\n',
}


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / ".dev"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        **more,
    }
