"""Samples of masked language modelling: tokens of a row are hidden, and are to be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...core.errors import Problem, RecipeError
from ...core.hashing import GOLDEN, Words, mix
from ...data.batch import IGNORED
from ...data.order import Indices
from ...data.packing import PackedRows
from ...data.samples import Samples
from ...tokenizers.tokenizer import Tokenizer

KEEP, REPLACE = 0.1, 0.2
"""of the chosen tokens: share that stays, and share that stays or becomes a random token"""


@dataclass(frozen=True)
class Masking:
    """Which tokens are hidden, and what stands in their place.

    Attributes:
        rate: share of the tokens that are to be told.
        mask_id: the token that stands for a hidden one.
        vocab_size: random tokens are below it.
        seed: other seeds hide other tokens.
    """

    rate: float
    mask_id: int
    vocab_size: int
    seed: int

    def apply(self, rows: PackedRows, samples: Indices) -> PackedRows:
        """Return rows whose labels are the tokens that were chosen, -100 elsewhere.

        Of the chosen tokens 80 % are hidden, 10 % become a random token, and 10 % stay (Devlin et
        al. 2019, arXiv:1810.04805, section 3.1). The choice depends on the seed, the number of the
        sample and the position alone, so that it is the same on any number of ranks.

        Args:
            rows: rows of tokens.
            samples: the number of each row, [B].
        """
        key = mix(np.array([self.seed], dtype=np.uint64) + GOLDEN)
        words = mix(samples.astype(np.uint64) * GOLDEN + key)
        if rows.lengths is None:
            positions, words = np.arange(rows.tokens.shape[1]), words[:, None]
        else:
            assert rows.positions is not None, "flat rows have them"
            positions, words = rows.positions, np.repeat(words, rows.lengths)
        words = mix(words + positions.astype(np.uint64) * GOLDEN)
        chosen = _fractions(words) < self.rate
        if rows.padding_mask is not None:
            chosen &= ~rows.padding_mask
        action, other = _fractions(mix(words + GOLDEN)), mix(words + GOLDEN + GOLDEN)
        shown = np.where(action < KEEP, rows.tokens, self.mask_id)
        is_random = (action >= KEEP) & (action < REPLACE)
        random = (other % np.uint64(self.vocab_size)).astype(np.int64)
        shown = np.where(is_random, random, shown)
        return rows._replace(
            tokens=np.where(chosen, shown, rows.tokens),
            labels=np.where(chosen, rows.tokens, IGNORED),
        )


def _fractions(words: Words) -> NDArray[np.float64]:
    """Return hashes as numbers from 0 to 1, 1 left out."""
    fractions: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions


class MaskedSamples(Samples):
    """The samples of a language model with tokens hidden.

    Args:
        rows: the samples.
        masking: hides tokens.
    """

    def __init__(self, rows: Samples, masking: Masking) -> None:
        super().__init__(rows.sources, rows.order, rows.vocab_size, rows.labels)
        self._rows = rows
        self._masking = masking

    def ensure(self, first: int, stop: int) -> None:
        """Make samples ready; see `NumberedSamples.ensure`."""
        self._rows.ensure(first, stop)

    def gather(self, samples: Indices) -> PackedRows:
        """Return the samples of these numbers, [B], with tokens hidden."""
        return self._masking.apply(self._rows.gather(samples), samples)

    def with_dropout(self, seed: int) -> Self:
        """Return samples whose batches have keys; see `NumberedSamples.with_dropout`."""
        return type(self)(self._rows.with_dropout(seed), self._masking)

    def among(self, labels: Sequence[str]) -> Self:
        """Return the same samples among longer labels; see `NumberedSamples.among`."""
        renumbered = super().among(labels)
        renumbered._rows = self._rows.among(labels)
        return renumbered

    def each_once(self) -> Self:
        """Return the same samples, each once; see `NumberedSamples.each_once`."""
        return type(self)(self._rows.each_once(), self._masking)

    def state(self, sample: int) -> dict[str, Any]:
        """Return what is needed to resume at a sample."""
        return self._rows.state(sample)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken."""
        self._rows.restore(state)


def find_mask_id(tokenizer: Tokenizer, mask_token: str) -> int:
    """Return the token that stands for a hidden one.

    Args:
        tokenizer: the tokenizer of the recipe.
        mask_token: the text of the token; empty: the first number that no token has.

    Raises:
        RecipeError: the text is not one token.
    """
    if not mask_token:
        return tokenizer.vocab_size
    ids = tokenizer.encode(mask_token)
    if len(ids) != 1:
        message = f"{mask_token!r} is {len(ids)} tokens of this tokenizer, expected one"
        hint = "leave it out to take a number that no token has"
        raise RecipeError([Problem(message, "task.mask_token", hint=hint)])
    return int(ids[0])
