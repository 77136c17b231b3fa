"""Encodes with tiktoken where it gives the same ids as a `tokenizer.json`, several times faster.

The equivalence is verified for each tokenizer when it is first needed:

1. The text is cut by one of the patterns in `patterns.py`, and both regular expression engines have
   the same letters, digits and white space, which is compared for each code point up to
   `LAST_CHECKED`. Text with others is left to the tokenizers library.
2. The library merges the pair whose rule comes first; tiktoken merges the pair whose union has the
   lowest rank, and the ranks here follow the order of the rules. They can differ only where
   tiktoken merges x and y to a token t and the library has no rule for that pair. Merges inside t
   do not depend on the text around it, as long as no merge crosses the borders of t. So the
   library, given t alone, would reach [x, y] and stop. Each token is therefore given to the library
   alone, and must come out as one token.
3. Text is split at added tokens as in the library: at the leftmost match, at the longest of several
   there, and first at the tokens that are not normalized.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.extras import install_command
from .patterns import PATTERNS
from .tokenizer import PARALLELISM, Ids
from .tokenizer_files import byte_characters

LAST_CHECKED = 0x3FFFF
CLASSES = (r"\p{L}", r"\p{N}", r"\s")
CASED = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")
ANY_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ANY_CASE_LETTERS = "(?i:[strevmld])"
DIFFER = "the two libraries do not find the same characters by "
PLAIN_FLAGS = ("single_word", "lstrip", "rstrip")


class NotEquivalent(Exception):
    """Raised with the reason why tiktoken may give other ids than the tokenizers library."""


class AddedTokens(NamedTuple):
    """A pattern of added tokens, which split the text before anything else, and their ids."""

    pattern: re.Pattern[str]
    ids: Mapping[str, int]


class FastBPE:
    """A byte-level BPE tokenizer that encodes with tiktoken.

    Args:
        native: the tokenizer of the tokenizers library.

    Raises:
        NotEquivalent: tiktoken may give other ids.
    """

    def __init__(self, native: Any) -> None:
        description = json.loads(native.to_str())  # the file as the library understood it
        pattern = _find_cutter(description)
        _check_engines(pattern)
        added = description["added_tokens"]
        ranks, self._ids = _rank_tokens(description["model"], added)
        self._encoding = _encoding(pattern, ranks)
        self._added = _added_tokens(added, native)
        # Composing accents leaves ASCII as it is.
        self._ascii_only = description.get("normalizer") is not None

    def encode_batch(self, texts: Sequence[str]) -> list[Ids | None]:
        """Return the ids of several texts, encoded on all cores; None where `encode` gives None."""
        threads = _threads()
        if threads < 2 or len(texts) < 2:
            return [self.encode(text) for text in texts]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.encode, texts, chunksize=16))

    def encode(self, text: str) -> Ids | None:
        """Return the ids of a text, or None if they are not verified or tiktoken fails."""
        if not text.isascii() and (self._ascii_only or _code_points(text).max() > LAST_CHECKED):
            return None
        try:
            parts = [self._encode(piece) for piece in _split(text, self._added)]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a run of spaces too long for its stack: an error, or Rust's panic
            return None
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)

    def _encode(self, piece: str | int) -> Ids:
        if isinstance(piece, int):
            return np.array([piece], dtype=np.uint32)
        # `encode_to_numpy` takes 1.6 times as long.
        ranks = np.array(self._encoding.encode_ordinary(piece), dtype=np.uint32)
        return np.asarray(self._ids[ranks])


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def _threads() -> int:
    """Return the number of threads; 1 in worker processes, which are the parallelism."""
    if os.environ.get(PARALLELISM, "").lower() in ("false", "0", "no", "off", "f", "n"):
        return 1
    return len(os.sched_getaffinity(0))


def _split(text: str, added: Sequence[AddedTokens]) -> Iterator[str | int]:
    """Split a text at added tokens; yield their ids and the text between them, in order."""
    if not added:
        if text:
            yield text
        return
    first, *others = added
    done = 0
    for match in first.pattern.finditer(text):
        yield from _split(text[done : match.start()], others)
        yield first.ids[match[0]]
        done = match.end()
    yield from _split(text[done:] if done else text, others)


def _find_cutter(description: Mapping[str, Any]) -> str:
    """Return the regular expression that splits text before merging.

    Raises:
        NotEquivalent: the tokenizer normalizes or splits text in a way that was not verified.
    """
    if description.get("normalizer") not in (None, {"type": "NFC"}):
        raise NotEquivalent("it has a normalizer")
    cutter = description.get("pre_tokenizer") or {}
    steps = cutter.get("pretokenizers") if cutter.get("type") == "Sequence" else [cutter]
    *splits, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        raise NotEquivalent("its text is not cut into bytes alone")
    pattern = None
    if last.get("use_regex", True):
        pattern = None if splits else PATTERNS["gpt2"]
    elif len(splits) == 1 and splits[0].get("type") == "Split":
        (split,) = splits
        if split.get("behavior") == "Isolated" and not split.get("invert"):
            pattern = split["pattern"].get("Regex")
    if pattern not in PATTERNS.values():
        raise NotEquivalent("its pattern is none of those that were compared")
    return str(pattern)


@lru_cache
def _check_engines(pattern: str) -> None:
    """Check that both regex engines match the same characters for each class in the pattern.

    Raises:
        NotEquivalent: the engines differ.
    """
    # All code points but the surrogates, which no UTF-8 text holds.
    codes = np.delete(np.arange(LAST_CHECKED + 1, dtype=np.uint32), np.s_[0xD800:0xE000])
    characters = str(codes.tobytes(), "utf-32-le")
    classes = [*CLASSES, *(CASED if r"\p{Lu}" in pattern else ())]
    if "(?i:" in pattern:
        classes.append(ANY_CASE_LETTERS)
    for one_class in classes:
        both = _match(one_class, characters) + _remove(one_class, characters)
        if not np.array_equal(np.sort(_code_points(both)), codes):
            raise NotEquivalent(DIFFER + one_class)
    if ANY_CASE_LETTERS in classes:
        letters = _match(ANY_CASE_LETTERS, characters)
        endings = [f"'{one}{two}" for one in letters for two in letters]
        for text in (characters, *endings):
            if _match(ANY_CASE, text) + _remove(ANY_CASE, text) != text:
                raise NotEquivalent(DIFFER + ANY_CASE)


def _match(pattern: str, text: str) -> str:
    """Return the concatenated matches of a pattern in tiktoken's regex engine."""
    encoding = _encoding(pattern, {bytes([byte]): byte for byte in range(256)})
    return str(encoding.encode_to_numpy(text).astype(np.uint8).tobytes(), "utf-8")


def _remove(pattern: str, text: str) -> str:
    """Return the text without the matches of a pattern in the tokenizers library's engine."""
    from tokenizers import Regex, normalizers

    return str(normalizers.Replace(Regex(pattern), "").normalize_str(text))


def _encoding(pattern: str, ranks: Mapping[bytes, int]) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise NotEquivalent(f"tiktoken is not installed: {install_command('data')}") from error
    return tiktoken.Encoding(
        "trainer", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={}
    )


def _rank_tokens(
    model: Mapping[str, Any], added: Sequence[Mapping[str, Any]]
) -> tuple[dict[bytes, int], NDArray[np.uint32]]:
    """Rank the tokens in the order of the merges.

    Returns:
        The rank of each token by bytes, and the vocabulary id of each rank, uint32 [tokens].

    Raises:
        NotEquivalent: the model is no byte-level BPE whose merges define one order.
    """
    if model.get("type") != "BPE":
        raise NotEquivalent(f"its model is {model.get('type')}, not BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise NotEquivalent(f"its model has {key}")
    vocabulary, names = model["vocab"], byte_characters()
    rank_of = {name: rank for rank, name in enumerate(names)}
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    newest = ""
    for left, right in merges:
        union = left + right
        if union not in rank_of:
            rank_of[union] = len(rank_of)
        elif union != newest:
            raise NotEquivalent(f"rules for {union!r} stand apart")
        newest = union
    missing = [name for name in rank_of if name not in vocabulary]
    if missing:
        raise NotEquivalent(f"its vocabulary lacks {missing[0]!r}")
    whole_words = bool(model.get("ignore_merges"))
    _check_reachable(vocabulary, merges, list(rank_of)[len(names) :], whole_words)
    if whole_words:
        # With ignore_merges, a token without a rule is used only where it is a whole piece. It gets
        # the highest ranks, and must not be the union of two tokens, which tiktoken would merge.
        alone = sorted(vocabulary.keys() - rank_of.keys() - {token["content"] for token in added})
        for name in alone:
            halves = [(name[:cut], name[cut:]) for cut in range(1, len(name))]
            if any(left in vocabulary and right in vocabulary for left, right in halves):
                raise NotEquivalent(f"no rule makes {name!r}")
        rank_of |= {name: len(rank_of) + index for index, name in enumerate(alone)}
    byte_of = {name: byte for byte, name in enumerate(names)}
    try:
        ranks = {bytes(map(byte_of.__getitem__, name)): rank for name, rank in rank_of.items()}
    except KeyError as error:
        raise NotEquivalent(f"a token holds {error.args[0]!r}, which stands for no byte") from error
    return ranks, np.array([vocabulary[name] for name in rank_of], dtype=np.uint32)


def _check_reachable(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    tokens: Sequence[str],
    whole_words: bool,
) -> None:
    """Check step 2 of the module's docstring.

    A token that splits into three or more pieces is never the union of two, so it is allowed where
    whole words are looked up first.

    Raises:
        NotEquivalent: the merges do not build a token.
    """
    from tokenizers import Tokenizer, models

    alone = Tokenizer(models.BPE(dict(vocabulary), list(merges)))
    for token, encoding in zip(tokens, alone.encode_batch_fast(list(tokens)), strict=True):
        pieces = len(encoding.ids)
        if pieces != 1 and not (whole_words and pieces > 2):
            raise NotEquivalent(f"its rules do not make {token!r} of its bytes")


def _added_tokens(added: Sequence[Mapping[str, Any]], native: Any) -> list[AddedTokens]:
    """Return the added tokens in the order in which the library matches them.

    Raises:
        NotEquivalent: an added token is empty or matches the space around it.
    """
    if any(token.get(flag) for token in added for flag in PLAIN_FLAGS):
        raise NotEquivalent("an added token takes the space around it")
    if any(not token["content"] for token in added):
        raise NotEquivalent("an added token is empty")
    added_tokens = []
    for normalized in (False, True):
        texts = [t["content"] for t in added if bool(t.get("normalized")) == normalized]
        if texts:
            # A regex takes the first alternative that matches, so the longest token comes first.
            pattern = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
            ids = {text: int(native.token_to_id(text)) for text in texts}
            added_tokens.append(AddedTokens(re.compile(pattern), ids))
    return added_tokens
