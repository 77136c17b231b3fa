"""The small dense Llama that every baseline trains, and the tokens that it reads.

Only the standard library is imported at the top, so that a baseline's own imports are its own.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

SEED = 1234
NUM_TOKENS = 1_000_000


@dataclass(frozen=True)
class Workload:
    vocab: int
    tokens: Path
    """flat uint16 tokens; row i of the data starts at token i * seq_len"""
    dim: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 768
    seq_len: int = 256
    batch: int = 8
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float = 1.0
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    max_steps: int = 400
    """more than are measured: the coordinator ends a baseline, not its own schedule"""

    @property
    def rows(self) -> int:
        return (NUM_TOKENS - 1) // self.seq_len


def baseline_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every baseline is started with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    return parser


def write_tokens(path: Path, vocab: int) -> None:
    """Write seeded tokens that follow Zipf's law, so that there is something to learn."""
    import numpy as np

    frequency = 1.0 / np.arange(1, vocab + 1)
    draws = np.random.default_rng(SEED).random(NUM_TOKENS)
    cumulative = np.cumsum(frequency / frequency.sum())
    ids = np.minimum(np.searchsorted(cumulative, draws), vocab - 1)
    ids.astype(np.uint16).tofile(path)


def rows_with_successor(workload: Workload):  # type: ignore[no-untyped-def]
    """Return a torch dataset of rows [seq_len + 1]: the last token is the next row's first."""
    import numpy as np
    import torch

    flat = np.memmap(workload.tokens, dtype=np.uint16, mode="r")

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return workload.rows

        def __getitem__(self, row: int) -> torch.Tensor:
            start = row * workload.seq_len
            return torch.from_numpy(flat[start : start + workload.seq_len + 1].astype(np.int64))

    return Rows()
