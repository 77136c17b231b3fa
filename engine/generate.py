"""Text from a model, one token at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from ..model_zoo.layers.cache import KVCache

if TYPE_CHECKING:
    from ..model_zoo.language_model import LanguageModel
    from .data.tokenizer import Tokenizer


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    until: Sequence[str] = (),
) -> list[str]:
    """Continue each prompt until the end of the document or for `max_new_tokens`.

    Prompts are computed together, and sampled apart: what follows one depends on the seed and on
    that prompt alone.

    Args:
        model: in evaluation mode.
        tokenizer: of the model.
        prompts: texts to continue; an empty one begins a document.
        max_new_tokens: at most so many are added.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only this many of the likeliest tokens are drawn from; 0: all.
        top_p: only the likeliest tokens that together have this probability are drawn from
            (nucleus sampling, arXiv:1904.09751).
        seed: of the draws.
        until: a text ends before the first of these; empty: only with the document.

    Returns:
        The new text of each prompt.
    """
    rows = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    return continue_rows(
        model,
        tokenizer,
        rows,
        _generators(prompts, seed),
        lambda logits: sampling_probabilities(logits, temperature, top_k, top_p),
        max_new_tokens,
        until,
    )


@torch.inference_mode()
def continue_rows(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    generators: Sequence[torch.Generator],
    probabilities_of: Callable[[Tensor], Tensor],
    max_new_tokens: int,
    until: Sequence[str] = (),
) -> list[str]:
    """Continue prompts that are tokens; see `generate`.

    Args:
        model: in evaluation mode.
        tokenizer: of the model.
        prompts: tokens of each; none begin a document.
        generators: one a prompt.
        probabilities_of: from logits, [B, V], to what is drawn from.
        max_new_tokens: at most so many are added.
        until: a text ends before the first of these.
    """
    tokens, positions, document_ids = _left_padded(model, tokenizer, prompts)
    columns = {}
    if document_ids is not None and model.takes_padding:
        columns["padding_mask"] = document_ids == 0
    cache = KVCache(tokens.shape[1] + max_new_tokens)
    stops = [tokenizer.encode(word).tolist() for word in until]
    texts: list[list[int]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    for _ in range(max_new_tokens):
        logits = model(
            tokens, positions=positions, document_ids=document_ids, cache=cache, **columns
        )
        columns.clear()
        probabilities = probabilities_of(logits[:, -1].cpu())
        chosen = [
            int(torch.multinomial(row, 1, generator=generator))
            for row, generator in zip(probabilities, generators, strict=True)
        ]
        for row, token in enumerate(chosen):
            finished[row] |= token == tokenizer.eos_id
            if not finished[row]:
                texts[row].append(token)
                finished[row] = _ends(tokenizer, texts[row], until, stops)
        if all(finished):
            break
        tokens = tokens.new_tensor(chosen).unsqueeze(1)
        positions = positions[:, -1:] + 1
        document_ids = None if document_ids is None else document_ids[:, -1:]
    return [_cut(tokenizer.decode(text), until) for text in texts]


def _ends(
    tokenizer: Tokenizer, text: list[int], until: Sequence[str], stops: Sequence[list[int]]
) -> bool:
    """Return whether a word that ends texts has come, as its own tokens or within others."""
    for ids in stops:
        if text[-len(ids) :] == ids:  # special tokens, which decoding leaves out, are found so
            del text[-len(ids) :]
            return True
    return bool(until) and any(word in tokenizer.decode(text) for word in until)


def _cut(text: str, until: Sequence[str]) -> str:
    return text[: min([len(text), *(text.index(word) for word in until if word in text)])]


def _left_padded(
    model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tokens, positions and document ids, [B, S], with the prompts' ends aligned.

    The padding is a document of its own, so that nothing attends to it; without padding there are
    no document ids.
    """
    rows = [list(prompt) or [tokenizer.eos_id] for prompt in prompts]
    width = max(map(len, rows))
    padding = [width - len(row) for row in rows]
    device = next(model.parameters()).device
    tokens = torch.tensor(
        [[tokenizer.eos_id] * pad + row for pad, row in zip(padding, rows, strict=True)],
        device=device,
    )
    positions = torch.arange(width, device=device) - tokens.new_tensor(padding).unsqueeze(1)
    document_ids = (positions >= 0).int() if any(padding) else None
    return tokens, positions.clamp(min=0), document_ids


def _generators(prompts: Sequence[str], seed: int) -> list[torch.Generator]:
    """Return a generator a prompt; equal prompts get different ones."""
    seen: Counter[str] = Counter()
    generators = []
    for prompt in prompts:
        key = f"{seed}:{seen[prompt]}:{prompt}"
        seen[prompt] += 1
        digest = xxhash.xxh3_64_intdigest(key.encode())
        generators.append(torch.Generator().manual_seed(digest >> 1))
    return generators


def sampling_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return what is drawn from, [B, V], in fp32."""
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    if 0 < top_k < logits.shape[1]:
        lowest = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    largest = logits.amax(-1, keepdim=True)
    smallest = torch.finfo(logits.dtype).tiny  # less would be rounded to 0
    probabilities = ((logits - largest) / max(temperature, smallest)).softmax(-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        dropped = before >= top_p
        dropped[:, 0] = False  # the likeliest stays, whatever top_p is
        ordered = ordered.masked_fill(dropped, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(1, order, ordered)
    return probabilities
