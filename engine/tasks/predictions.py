"""Turns outputs of a model into predictions of values that JSON has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.summation import widen
from .metrics.tables import Outputs


def list_outputs(outputs: Any, meaning: Outputs | None) -> list[dict[str, Any]]:
    """Return `outputs` of each sample as lists, and `label`, the likeliest class, if there are any.

    Args:
        outputs: a tensor with samples along dimension 0, or several.
        meaning: what they are; None: nobody says.
    """
    if not isinstance(outputs, Tensor):
        columns = [_to_lists(each) for each in outputs]
        return [{"outputs": list(values)} for values in zip(*columns, strict=True)]
    rows = [{"outputs": values} for values in _to_lists(outputs)]
    if meaning is None or meaning.kind != "multiclass":
        return rows
    labels = outputs.argmax(-1).tolist()
    return [{"label": label, **row} for label, row in zip(labels, rows, strict=True)]


def name_classes(outputs: Tensor, meaning: Outputs | None) -> list[dict[str, Any]]:
    """Return the classes of texts by their names, with the probability of each, or numbers.

    Args:
        outputs: [B, C] logits, or numbers of a regression.
        meaning: "multiclass": one class a text; "multilabel": those above 0.5; else numbers.
    """
    if meaning is None or meaning.kind not in ("multiclass", "multilabel"):
        return [{"values": values} for values in _to_lists(outputs)]
    is_single = meaning.kind == "multiclass"
    scores = outputs.float().softmax(-1) if is_single else outputs.float().sigmoid()
    found: list[dict[str, Any]] = []
    for row in scores.tolist():
        named: dict[str, float] = dict(zip(meaning.labels, row, strict=True))
        if is_single:
            likeliest = meaning.labels[row.index(max(row))]
            found.append({"label": likeliest, "scores": named})
        else:
            chosen = [name for name, score in named.items() if score > 0.5]
            found.append({"labels": chosen, "scores": named})
    return found


def find_spans(
    outputs: Tensor, context_start: Tensor, lengths: Tensor, longest: int
) -> list[dict[str, Any]]:
    """Return the likeliest span of tokens of each context, or none.

    The score of a span is the product of the probabilities of both ends, among all tokens of the
    row. The end-of-document token, the last of a row, stands for no answer.

    Args:
        outputs: [B, S, 2] logits of the first and the last token.
        context_start: [B], the first token of each context.
        lengths: [B], the tokens of each row.
        longest: the most tokens of a span.

    Returns:
        `span`, the first and the last token, or None where no answer is likelier; and `score`.
    """
    place = torch.arange(outputs.shape[1], device=outputs.device)
    is_padding = place >= lengths.unsqueeze(1)
    logits = widen(outputs).masked_fill(is_padding.unsqueeze(-1), -torch.inf)
    first, last = logits.log_softmax(1).unbind(-1)
    is_last = place == lengths.unsqueeze(1) - 1
    none = torch.where(is_last, first + last, 0).sum(1)
    is_legal = (place >= context_start.unsqueeze(1)) & ~is_padding & ~is_last
    first, last = (x.masked_fill(~is_legal, -torch.inf) for x in (first, last))
    best, span = none, torch.full((len(outputs), 2), -1, device=outputs.device)
    # A length at a time: all pairs of positions, [B, S, S], may not fit in memory.
    for length in range(min(longest, outputs.shape[1])):
        scores, start = (first[:, : len(place) - length] + last[:, length:]).max(1)
        is_better = scores > best
        best = torch.where(is_better, scores, best)
        pair = torch.stack([start, start + length], 1)
        span = torch.where(is_better.unsqueeze(1), pair, span)
    rows = zip(span.tolist(), best.exp().tolist(), strict=True)
    return [{"span": pair if pair[0] >= 0 else None, "score": score} for pair, score in rows]


def _to_lists(outputs: Tensor) -> list[Any]:
    """Return a tensor as lists; torch has no bf16 numbers for Python."""
    values: list[Any] = (outputs.float() if outputs.is_floating_point() else outputs).tolist()
    return values
