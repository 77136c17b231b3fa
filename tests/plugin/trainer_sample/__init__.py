"""A package outside the trainer that adds an optimizer, a model, a data source and a tracker.

`[plugins] modules = ["trainer_sample"]` registers them; as an installed package, its entry
points name each (`tests/recipes/test_plugins.py` writes them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from trainer.model_zoo.config import Size
from trainer.model_zoo.layout import Layout
from trainer.plugins import (
    Count,
    DocumentSource,
    ModelConfig,
    OptimizerConfig,
    TrackerConfig,
    models,
    optimizers,
    sources,
    trackers,
)


@optimizers.register
class SignDescent(OptimizerConfig):
    """Steps of one size along the sign of a running mean (arXiv:1802.04434, algorithm 2)."""

    name: Literal["sign_descent"] = "sign_descent"
    lr: float = 1e-3
    """size of a step"""
    weight_decay: float = 0.0
    """decoupled weight decay"""
    momentum: float = 0.9
    """decay of the running mean"""

    def build(self, groups: Sequence[dict[str, Any]], device: Any) -> Any:
        """Return the optimizer."""
        from .training import SignDescentOptimizer

        return SignDescentOptimizer(groups, self.lr, self.weight_decay, self.momentum)


@models.register
class PositionWiseConfig(ModelConfig):
    """Feed-forward blocks on each position alone: a bigram model with depth."""

    layout: ClassVar = Layout(embed="embed", blocks="layers", head="head")
    flavors: ClassVar = {"debug": {}, "wide": {"dim": 128}}

    name: Literal["position_wise"] = "position_wise"
    dim: Size = 64
    """width of the residual stream"""
    n_layers: Size = 2
    """number of blocks"""
    vocab_size: Size | None = None
    """rows of the embedding; default: the tokenizer's, rounded up to a multiple of 64"""

    @property
    def vocab(self) -> int:
        """Rows of the embedding, once settled."""
        assert self.vocab_size is not None
        return self.vocab_size

    def with_vocab(self, vocab_size: int) -> Self:
        """Return the config with its vocabulary size settled."""
        size = self.vocab_size or -(-vocab_size // 64) * 64
        return self.model_copy(update={"vocab_size": size})

    def flops_per_token(self, seq_len: int) -> float:
        """Return floating-point operations a token of one training step."""
        return 6.0 * (self.n_layers * 6 * self.dim**2 + self.dim * self.vocab)

    def build(self, kernels: Any) -> Any:
        """Return the module."""
        from .training import PositionWise

        return PositionWise(self, kernels)


@sources.register
class Counting(DocumentSource):
    """Documents that count: `0 1 2 3 ...`."""

    name: Literal["counting"] = "counting"
    num_documents: Count = 64
    """how many documents"""
    longest: Count = 200
    """document n counts to n modulo this"""

    def documents(self) -> Iterator[str]:
        """Yield the documents."""
        for number in range(self.num_documents):
            yield " ".join(map(str, range(number % self.longest + 1)))

    def fingerprint(self) -> str:
        """Return what the documents depend on."""
        return f"{self.num_documents} {self.longest}"


@trackers.register
class Tally(TrackerConfig):
    """Counts rows by kind, over all attempts."""

    name: Literal["tally"] = "tally"
    file: str = "tally.txt"
    """its name in the run directory"""

    def build(self, run_dir: Path, resume_step: int) -> Any:
        """Return the tracker."""
        return TallyTracker(run_dir / self.file)


class TallyTracker:
    """Appends the kind of each row, and says when an attempt has ended."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def log(self, row: Mapping[str, Any]) -> None:
        """Take a row."""
        self._file.write(f"{row['kind']} {row['step']}\n")

    def close(self) -> None:
        """End the attempt."""
        self._file.write("end\n")
        self._file.close()
