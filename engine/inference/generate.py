"""Generates text with a KV cache, one token at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from ...model_zoo.language_model import KVCache, LanguageModel
from ..core.errors import RecipeError
from ..tokenizers.byte_tokenizer import begin_text
from ..tokenizers.tokenizer import Tokenizer, TokenizerWithStopTokens
from .inputs import require_generation
from .open import OpenedModel

PREFILL_TOKENS = 512
"""prompt tokens of one forward pass: attention memory then grows linearly with the prompt"""


def generate(
    opened: OpenedModel,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    until: Sequence[str] = (),
    truncate: bool = False,
) -> list[str]:
    """Continue each prompt until the end of the document or for `max_new_tokens`.

    Prompts are computed as one batch, but each has its own random generator, so that its text
    depends only on the seed and on the prompt.

    Args:
        opened: the result of `open_model`.
        prompts: texts to continue; an empty one begins a document.
        max_new_tokens: the largest number of tokens to add.
        temperature: the divisor of the logits; 0 takes the likeliest token.
        top_k: sample from this many of the likeliest tokens; 0 is all.
        top_p: sample from the likeliest tokens whose probabilities sum to this
            (nucleus sampling, arXiv:1904.09751).
        seed: the seed of the random generators.
        until: stop strings; a text ends before the first of them.
        truncate: keep the end of a prompt that is longer than the model's context, and leave room
            for new tokens.

    Returns:
        The new text of each prompt.

    Raises:
        RecipeError: the model generates no text; or a prompt is longer than the model's context,
            and `truncate` is False.
    """
    require_generation(opened.recipe.model)
    tokenizer, longest = opened.tokenizer, getattr(opened.recipe.model, "max_seq_len", None)
    rows = [begin_text(tokenizer, tokenizer.encode(prompt)).tolist() for prompt in prompts]
    if longest is not None and (most := max(map(len, rows))) > longest:
        if not truncate:
            raise RecipeError(
                f"a prompt has {most:,} tokens; the model reads {longest:,} (model.max_seq_len)",
                "--truncate keeps its end",
            )
        kept = longest - min(max_new_tokens, longest // 2)
        rows = [row if len(row) <= longest else row[-kept:] for row in rows]
    return continue_rows(
        opened.model,
        tokenizer,
        rows,
        _generators(prompts, seed),
        lambda logits: sampling_probabilities(logits, temperature, top_k, top_p),
        max_new_tokens,
        until,
    )


@torch.no_grad()  # what FSDP gathers in inference mode could not be trained with later
def continue_rows(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    generators: Sequence[torch.Generator],
    probabilities_of: Callable[[Tensor], Tensor],
    max_new_tokens: int,
    until: Sequence[str] = (),
) -> list[str]:
    """Continue prompts that are given as tokens; see `generate`.

    Args:
        model: a model in evaluation mode.
        tokenizer: the tokenizer of the model.
        prompts: the token ids of each prompt; an empty prompt begins a document.
        generators: one random generator for each prompt.
        probabilities_of: maps logits [B, V] to the probabilities to sample from, [B, V].
        max_new_tokens: the largest number of tokens to add.
        until: stop strings; a text ends before the first of them.

    Returns:
        The new text of each prompt.
    """
    tokens, positions, document_ids = _left_padded(model, tokenizer, prompts)
    columns = {"positions": positions}
    if document_ids is not None:
        columns["document_ids"] = document_ids
        columns |= {"padding_mask": document_ids == 0} if model.takes_padding else {}
    cache = KVCache(tokens.shape[1] + max_new_tokens)
    stops = [tokenizer.encode(word).tolist() for word in until]
    ends = (
        tokenizer.stop_token_ids
        if isinstance(tokenizer, TokenizerWithStopTokens)
        else (tokenizer.eos_id,)
    )
    texts: list[list[int]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    for _ in range(max_new_tokens):
        logits = _last_logits(model, tokens, columns, cache)
        # Sampled on the CPU, so that a seed gives the same draws on every device.
        probabilities = probabilities_of(logits[:, -1].cpu())
        chosen = [
            int(torch.multinomial(row, 1, generator=generator))
            for row, generator in zip(probabilities, generators, strict=True)
        ]
        for row, token in enumerate(chosen):
            finished[row] |= token == tokenizer.eos_id
            if not finished[row]:
                texts[row].append(token)
                # Kept, as transformers keeps it: `decode` leaves out stop tokens that are special.
                finished[row] = token in ends or _ends(tokenizer, texts[row], until, stops)
        if all(finished):
            break
        tokens = tokens.new_tensor(chosen).unsqueeze(1)
        columns.pop("padding_mask", None)
        columns = {name: column[:, -1:] for name, column in columns.items()}
        columns["positions"] = columns["positions"] + 1
    return [_cut(tokenizer.decode(text), until) for text in texts]


def _last_logits(
    model: LanguageModel, tokens: Tensor, columns: Mapping[str, Tensor], cache: KVCache
) -> Tensor:
    """Run the model over the tokens in pieces and return the logits of the last piece.

    Args:
        model: a model in evaluation mode.
        tokens: token ids, [B, S].
        columns: the model's other inputs for each token, [B, S] each.
        cache: the keys and values of earlier positions; the new positions are appended.

    Returns:
        Logits [B, P, V] with P the length of the last piece; only the last position is used.
    """
    for start in range(0, tokens.shape[1], PREFILL_TOKENS):
        piece = slice(start, start + PREFILL_TOKENS)
        inputs = {name: column[:, piece] for name, column in columns.items()}
        logits: Tensor = model(tokens[:, piece], cache=cache, **inputs)
    return logits


def _ends(
    tokenizer: Tokenizer, text: list[int], until: Sequence[str], stops: Sequence[list[int]]
) -> bool:
    """Return whether a text has reached a stop string.

    Args:
        tokenizer: the tokenizer of the text.
        text: the new token ids; a stop string's own tokens at the end are removed in place.
        until: the stop strings.
        stops: the token ids of each stop string.
    """
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
    """Return tokens, positions and document ids, [B, S] each, padded at the left.

    The padding is document 0 and the prompt document 1, so that the prompt does not attend to the
    padding. If no row is padded, the document ids are None.
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
    """Return a random generator for each prompt; equal prompts get different seeds."""
    seen: Counter[str] = Counter()
    generators = []
    for prompt in prompts:
        key = f"{seed}:{seen[prompt]}:{prompt}"
        seen[prompt] += 1
        digest = xxhash.xxh3_64_intdigest(key.encode())
        generators.append(torch.Generator().manual_seed(digest >> 1))
    return generators


def sampling_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return the probabilities to sample from, [B, V] like the logits; see `generate`."""
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
