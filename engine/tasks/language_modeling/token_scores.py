"""The log-probability of each token of a text, without storing all logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.vocabulary import WHOLE, VocabularyShard, project
from ...data.batch import IGNORED
from ..outputs import OutputRecord

MAX_LOGITS = 2**24


class TokenScores(OutputRecord):
    """A loss function for `LanguageModel.forward` that stores the loss of each label.

    Args:
        vocabulary: the tokens whose logits this rank computes; all ranks that share them call it.

    Attributes:
        nll: negative log-probability of each label, [T] in fp32; 0 for ignored labels.
        is_greedy: whether each label was the likeliest token, [T]; True for ignored labels.
    """

    nll: Tensor | None = None
    is_greedy: Tensor

    def __init__(self, vocabulary: VocabularyShard = WHOLE) -> None:
        self._vocabulary = vocabulary

    def __call__(self, *outputs: Tensor, softcap: float | None = None) -> Tensor:
        """Return the loss summed over the labels that are not ignored.

        Args:
            outputs: hidden states [T, D], the output projection [V, D], and the next token of each
                position, [T], or `IGNORED`. Later calls are for what the model learns besides, and
                are not scored.
            softcap: the softcap of logits; None: logits are not capped.
        """
        hidden, weight, labels = outputs
        if self.nll is not None:
            return self.nll.new_zeros(())
        places = torch.nonzero(labels != IGNORED).squeeze(1)
        self.nll = torch.zeros(len(labels), device=labels.device)
        self.is_greedy = torch.ones_like(labels, dtype=torch.bool)
        weight, shard = weight.to(hidden.dtype), self._vocabulary
        # The same on all ranks that share the tokens, of which the last may hold fewer.
        columns = int(shard.max_(torch.tensor(len(weight), device=labels.device)))
        # A few rows at a time: all logits, [T, V] in fp32, may not fit in memory.
        for some in torch.split(places, max(1, MAX_LOGITS // columns)):
            logits, wanted = project(hidden[some], weight, 1.0, softcap), labels[some]
            column, is_here = shard.locate(wanted, logits.shape[1])
            chosen = logits.gather(1, column.unsqueeze(1)).squeeze(1).where(is_here, 0)
            self.is_greedy[some] = shard.top_k(logits, 1)[1].squeeze(1) == wanted
            largest = shard.max_(logits.amax(-1))
            powers = logits.sub_(largest.unsqueeze(1)).exp_().sum(-1)
            # One all-reduce for both: a token's logit is on one rank, zero on the others.
            total, logit = shard.sum_(torch.stack([powers, chosen]))
            self.nll[some] = (largest - logit + total.log()).to(self.nll.dtype)
        return self.nll.sum()
