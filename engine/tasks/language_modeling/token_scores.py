"""The log-probability of each token of a text, without storing all logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...data.batch import IGNORED
from ..outputs import OutputRecord

MAX_LOGITS = 2**24


class TokenScores(OutputRecord):
    """A loss function for `LanguageModel.forward` that stores the loss of each label.

    Attributes:
        nll: negative log-probability of each label, [T] in fp32; 0 for ignored labels.
        is_greedy: whether each label was the likeliest token, [T]; True for ignored labels.
    """

    nll: Tensor | None = None
    is_greedy: Tensor

    def __call__(self, *outputs: Tensor) -> Tensor:
        """Return the loss summed over the labels that are not ignored.

        Args:
            outputs: hidden states [T, D], the output projection [V, D], and the next token of each
                position, [T], or `IGNORED`. Later calls are for what the model learns besides, and
                are not scored.
        """
        hidden, weight, labels = outputs
        if self.nll is not None:
            return self.nll.new_zeros(())
        places = torch.nonzero(labels != IGNORED).squeeze(1)
        self.nll = torch.zeros(len(labels), device=labels.device)
        self.is_greedy = torch.ones_like(labels, dtype=torch.bool)
        weight = weight.to(hidden.dtype)
        # A few rows at a time: all logits, [T, V] in fp32, may not fit in memory.
        for some in torch.split(places, max(1, MAX_LOGITS // len(weight))):
            logits, wanted = F.linear(hidden[some], weight).float(), labels[some]
            self.nll[some] = F.cross_entropy(logits, wanted, reduction="none")
            self.is_greedy[some] = logits.argmax(-1) == wanted
        return self.nll.sum()
