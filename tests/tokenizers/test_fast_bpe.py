"""Encoding with tiktoken: only where it is verified to give the ids of the tokenizers library."""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers

from trainer.engine.corpus.train_tokenizer import train_tokenizer
from trainer.engine.sources.python_library import PythonSource
from trainer.engine.tokenizers import fast_bpe, hf_tokenizer
from trainer.engine.tokenizers.fast_bpe import FastBPE, NotEquivalent
from trainer.engine.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from trainer.engine.tokenizers.tokenizer_files import TokenizerFiles

SPECIAL = ["<|endoftext|>", "<|im", "<|im_start|>", "xyzzy"]
SNIPPETS = [
    *SPECIAL, "<|im_", "xyz", "def f(self):", "  ", " \n", "\r\n\r\n", "\t\t", "it's IT'S 'LL",
    "'\u017f", "12345", "\uff11\uff12", "\u200b", "\ufeff", "\u00a0", "\u2028", "\x00",
    "東京都", "한국어", "🎉", "👩\u200d👧", "e\u0301", "ǅ", "ß", "\U0010ffff",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=8)), max_size=12).map(
    "".join
)


def trained(folder: Path, pattern: str) -> HuggingFaceTokenizer:
    sources, out = [PythonSource(max_bytes=100_000)], folder / pattern
    train_tokenizer(sources, out, vocab_size=700, special_tokens=SPECIAL, pattern=pattern)
    return HuggingFaceTokenizer(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fast")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HuggingFaceTokenizer:
    return trained(folder, "llama3")


def ids_of_library(tokenizer: HuggingFaceTokenizer, text: str) -> list[int]:
    native = Tokenizer.from_str(tokenizer.files.content.decode())
    return list(native.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def fast(tokenizer: HuggingFaceTokenizer) -> FastBPE:
    return FastBPE(tokenizer._tokenizer)


@pytest.fixture(scope="module", params=["gpt2", "cl100k", "qwen2", "o200k"])
def pair(request: pytest.FixtureRequest, folder: Path) -> tuple[Tokenizer, FastBPE]:
    native = Tokenizer.from_file(str(trained(folder, request.param).files.place))
    return native, FastBPE(native)


@given(TEXTS)
def test_it_gives_the_ids_of_the_library(pair: tuple[Tokenizer, FastBPE], text: str) -> None:
    native, fast = pair
    ids = fast.encode(text)
    if ids is None:
        assert max(text) > chr(fast_bpe.LAST_CHECKED)
    else:
        assert ids.tolist() == native.encode(text, add_special_tokens=False).ids


def test_it_gives_the_ids_of_the_library_for_a_corpus(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text for text in PythonSource(max_bytes=400_000).documents() if isinstance(text, str)]
    slow = tokenizer.encode_batch(texts)
    bulk = HuggingFaceTokenizer(tokenizer.files, tokenizer.eos_token)
    assert bulk.enable_fast_encoding() == "tiktoken, verified to give the same ids"
    for threads in ("true", "false"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
        for ours, theirs in zip(bulk.encode_batch(texts), slow, strict=True):
            assert np.array_equal(ours, theirs)
    assert bulk.fingerprint == tokenizer.fingerprint


def test_text_that_it_cannot_take_is_left_to_the_library(
    tokenizer: HuggingFaceTokenizer, fast: FastBPE
) -> None:
    texts = ["a\U000e0041b", " " * 1_200_000 + "x", "plain"]
    assert [fast.encode(text) is None for text in texts] == [True, True, False]
    bulk = HuggingFaceTokenizer(tokenizer.files, tokenizer.eos_token)
    bulk.enable_fast_encoding()
    for ids, text in zip(bulk.encode_batch(texts), texts, strict=True):
        assert ids.tolist() == ids_of_library(tokenizer, text)


def random_model(numbers: random.Random) -> dict[str, Any]:
    """A vocabulary over two letters that no training would come by, and some of its rules."""
    names = fast_bpe.byte_characters()
    for _ in range(numbers.randint(1, 14)):
        token = "".join(numbers.choices("ab", k=numbers.randint(2, 5)))
        names += [token] * (token not in names)
    pairs = [
        [token[:cut], token[cut:]]
        for token in names[256:]
        for cut in range(1, len(token))
        if token[:cut] in names and token[cut:] in names
    ]
    kept = [pair for pair in pairs if numbers.random() < 0.7]
    vocabulary = {name: number for number, name in enumerate(names)}
    whole = numbers.random() < 0.5
    return {"type": "BPE", "vocab": vocabulary, "merges": kept, "ignore_merges": whole}


def test_of_vocabularies_at_random_those_that_differ_are_refused(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    base = json.loads(tokenizer.files.content) | {"added_tokens": []}
    refused = differ = 0
    for seed in range(60):
        numbers = random.Random(seed)
        native = Tokenizer.from_str(json.dumps(base | {"model": random_model(numbers)}))
        texts = ["".join(numbers.choices("ab", k=numbers.randint(1, 30))) for _ in range(25)]
        expected = [native.encode(text, add_special_tokens=False).ids for text in texts]
        try:
            found = [FastBPE(native).encode(text) for text in texts]
        except NotEquivalent:
            refused += 1
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fast_bpe, "_check_reachable", lambda *_: None)
                try:
                    bold = FastBPE(native)
                except NotEquivalent:
                    continue
            differ += any(
                bold.encode(text).tolist() != ids for text, ids in zip(texts, expected, strict=True)
            )
            continue
        assert [ids.tolist() for ids in found if ids is not None] == expected
    assert 5 < refused < 55
    assert differ > 2


@pytest.fixture(scope="module")
def description(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    return dict(json.loads(tokenizer.files.content))


def changed(description: dict[str, Any], change: Callable[[Any], None]) -> Tokenizer:
    copy = json.loads(json.dumps(description))
    change(copy)
    return Tokenizer.from_str(json.dumps(copy))


def model(**settings: Any) -> Callable[[Any], None]:
    return lambda whole: whole["model"].update(settings)


def swap_rules(whole: Any) -> None:
    rules = whole["model"]["merges"]
    for first in rules:
        longer = next((each for each in rules if "".join(first) in each), None)
        if longer:
            rules.remove(first)
            rules.append(first)
            return


def flag(**flags: bool) -> Callable[[Any], None]:
    return lambda whole: whole["added_tokens"][0].update(flags)


def other_pattern(whole: Any) -> None:
    whole["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\w+|\W+"}, "behavior": "Isolated",
             "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False},
        ],
    }  # fmt: skip


def space_in_front(whole: Any) -> None:
    whole["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (model(dropout=0.1), "has dropout"),
        (model(end_of_word_suffix="x", vocab={"x": 0}, merges=[]), "has end_of_word_suffix"),
        (model(byte_fallback=True), "has byte_fallback"),
        (model(vocab={"a": 0}, merges=[]), "lacks"),
        (swap_rules, "do not make"),
        (flag(lstrip=True), "takes the space"),
        (flag(single_word=True), "takes the space"),
        (lambda whole: whole.update(normalizer={"type": "Lowercase"}), "has a normalizer"),
        (other_pattern, "none of those that were compared"),
        (space_in_front, "not cut into bytes alone"),
        (lambda whole: whole.update(pre_tokenizer=None), "not cut into bytes alone"),
    ],
)
def test_whatever_else_a_tokenizer_does_is_left_to_the_library(
    description: dict[str, Any], change: Callable[[Any], None], reason: str
) -> None:
    with pytest.raises(NotEquivalent, match=reason):
        FastBPE(changed(description, change))


def test_added_tokens_are_found_as_the_library_finds_them(description: dict[str, Any]) -> None:
    native = changed(description, lambda whole: None)
    native.add_tokens(["<|im_start", "rt|>x", "self", "yz"])
    native.add_special_tokens(["zy", "<|im_start|>x"])
    fast = FastBPE(native)
    numbers = random.Random(0)
    pieces = ["<|im_start", "|>", "x", "yz", "zy", "self", " ", "rt|>x", "<|im", "_", "xyzzy"]
    for _ in range(300):
        text = "".join(numbers.choices(pieces, k=numbers.randint(0, 8)))
        ids = fast.encode(text)
        assert ids is not None
        assert ids.tolist() == native.encode(text, add_special_tokens=False).ids, text


def test_composed_accents_keep_ascii_text_fast(description: dict[str, Any]) -> None:
    native = changed(description, lambda whole: whole.update(normalizer={"type": "NFC"}))
    fast = FastBPE(native)
    ids = fast.encode("plain text")
    assert ids is not None
    assert ids.tolist() == native.encode("plain text", add_special_tokens=False).ids
    assert fast.encode("e\u0301") is None


def test_other_letters_in_one_library_are_noticed(
    description: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    match = fast_bpe._match
    monkeypatch.setattr(fast_bpe, "_match", lambda *arguments: match(*arguments).replace("東", ""))
    fast_bpe._check_engines.cache_clear()
    with pytest.raises(NotEquivalent, match="do not find the same characters"):
        FastBPE(changed(description, lambda whole: None))
    fast_bpe._check_engines.cache_clear()


def test_the_choice_is_made_once_much_text_has_come_and_is_told(
    tokenizer: HuggingFaceTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hf_tokenizer, "FAST_FROM_CHARACTERS", 10)
    caplog.set_level(logging.INFO)
    bulk = HuggingFaceTokenizer(tokenizer.files, tokenizer.eos_token)
    bulk.encode("12345678")
    assert bulk.encoder == ""
    bulk.encode("12345678")
    assert "tiktoken" in bulk.encoder
    assert "encoding with tiktoken" in caplog.text
    content = json.loads(tokenizer.files.content)
    content["normalizer"] = {"type": "Lowercase"}
    files = TokenizerFiles("it", json.dumps(content).encode())
    slow = HuggingFaceTokenizer(files, tokenizer.eos_token)
    assert slow.enable_fast_encoding() == "tokenizers (it has a normalizer)"
    assert slow.encode("A b").tolist() == ids_of_library(slow, "A b")


def test_without_tiktoken_the_library_is_taken(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    fast_bpe._check_engines.cache_clear()
    bulk = HuggingFaceTokenizer(tokenizer.files, tokenizer.eos_token)
    assert "tiktoken is not installed" in bulk.enable_fast_encoding()
    assert bulk.encode("some text").tolist() == ids_of_library(tokenizer, "some text")


@pytest.mark.matrix
@pytest.mark.slow
def test_both_engines_have_the_same_classes_over_all_of_unicode() -> None:
    characters = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    ranks = {bytes([byte]): byte for byte in range(256)}
    classes = [*fast_bpe.CLASSES, *fast_bpe.CASED, fast_bpe.ANY_CASE_LETTERS, r"[\r\n]", r"[\r\n/]"]
    for pattern in [*classes, r"[^\s\p{L}\p{N}]", r"[^\r\n\p{L}\p{N}]"]:
        encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        found = encoding.decode_bytes(encoding.encode(characters)).decode()
        left = normalizers.Replace(Regex(pattern), "").normalize_str(characters)
        assert {*found}.isdisjoint(left), pattern
        assert len(found) + len(left) == len(characters), pattern
