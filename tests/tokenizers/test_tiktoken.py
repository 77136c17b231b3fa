"""Vocabularies in tiktoken's format, against tiktoken and transformers."""

import base64
import random
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe
from transformers import AutoTokenizer

from trainer.engine.core.errors import DataError, RecipeError
from trainer.engine.tokenizers import tiktoken_file
from trainer.engine.tokenizers.configs import TiktokenTokenizer
from trainer.engine.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from trainer.engine.tokenizers.patterns import PATTERNS, SPECIAL_TOKENS
from trainer.engine.tokenizers.tiktoken_file import build_model_file, read_ranks

TEXTS = [
    "", "def f(self):\n    return None", "naïve 東京 🎉", "  \t\r\n x", "<|endoftext|> in <|pad|>",
    "self" * 100,
]  # fmt: skip


def write(path: Path, ranks: Mapping[bytes, int]) -> Path:
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    path.write_bytes(b"".join(lines))
    return path


def letters() -> dict[bytes, int]:
    return {bytes([byte]): byte for byte in range(256)}


def merged(text: str, count: int) -> dict[bytes, int]:
    """Ranks that byte pair encoding learns, by the definition."""
    ranks = letters()
    words = [[bytes([byte]) for byte in word.encode()] for word in text.split(" ")]
    for _ in range(count):
        pairs = [pair for word in words for pair in pairwise(word)]
        left, right = max(set(pairs), key=lambda pair: (pairs.count(pair), pair))
        ranks[left + right] = len(ranks)
        for word in words:
            for index in range(len(word) - 2, -1, -1):
                if word[index : index + 2] == [left, right]:
                    word[index : index + 2] = [left + right]
    return ranks


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = Path(base64.__file__).read_text()
    ranks = merged(text[:4000], 150)
    return write(tmp_path_factory.mktemp("tiktoken") / "small.tiktoken", ranks)


def build(file: Path, **keys: Any) -> HuggingFaceTokenizer:
    keys = {"special_tokens": ["<|endoftext|>", "<|pad|>"], **keys}
    built = TiktokenTokenizer(path=str(file), **keys).build()
    assert isinstance(built, HuggingFaceTokenizer)
    return built


@pytest.mark.parametrize("pattern", [*PATTERNS, r"\w+|\W+"])
def test_ids_are_those_of_tiktoken(file: Path, pattern: str) -> None:
    tokenizer = build(file, pattern=pattern)
    theirs = tiktoken.Encoding(
        "theirs",
        pat_str=PATTERNS.get(pattern, pattern),
        mergeable_ranks=load_tiktoken_bpe(str(file)),
        special_tokens={"<|endoftext|>": 406, "<|pad|>": 407},
    )
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert ids == theirs.encode(text, allowed_special="all")
        assert tokenizer.decode(ids) == text.replace("<|endoftext|>", "").replace("<|pad|>", "")
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (406, 408)


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_vocabularies_that_no_training_makes_have_tiktokens_ids_too(
    tmp_path_factory: pytest.TempPathFactory, numbers: random.Random
) -> None:
    ranks = letters()
    for _ in range(numbers.randint(1, 12)):
        token = bytes(numbers.choices(b"ab", k=numbers.randint(2, 5)))
        ranks.setdefault(token, len(ranks) + numbers.randint(0, 1) * 1000)
    ranks = {token: rank for token, rank in ranks.items() if list(ranks.values()).count(rank) == 1}
    special = {"<|endoftext|>": 5000}
    folder = tmp_path_factory.mktemp("random")
    tokenizer = build(write(folder / "ranks", ranks), special_tokens=special)
    theirs = tiktoken.Encoding(
        "theirs", pat_str=PATTERNS["cl100k"], mergeable_ranks=ranks, special_tokens=special
    )
    texts = ["".join(numbers.choices("ab ", k=30)) + "<|endoftext|>" for _ in range(10)]
    expected = [theirs.encode(text, allowed_special="all") for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected
    assert "tiktoken" in tokenizer.enable_fast_encoding()
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected


def test_what_it_saves_gives_the_same_ids_in_transformers(file: Path, tmp_path: Path) -> None:
    tokenizer = build(file)
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    auto = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert auto(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert (auto.eos_token_id, len(auto)) == (406, 408)
    again = HuggingFaceTokenizer(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint


def test_special_tokens_may_leave_a_gap(file: Path) -> None:
    tokenizer = build(file, special_tokens={"<|endoftext|>": 500, "<|pad|>": 410})
    assert tokenizer.encode("<|pad|><|endoftext|>").tolist() == [410, 500]
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (500, 501)
    other = build(file, eos_token="<|pad|>")
    assert other.eos_id == 407
    assert other.fingerprint != build(file).fingerprint


def test_a_published_vocabulary_brings_its_special_tokens(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SPECIAL_TOKENS["llama3"][1]["<|eot_id|>"] == 128009
    assert sorted(SPECIAL_TOKENS["llama3"][1].values()) == list(range(128000, 128256))
    for size, special in SPECIAL_TOKENS.values():
        assert min(special.values()) >= size
    monkeypatch.setitem(tiktoken_file.SPECIAL_TOKENS, "gpt2", (406, {"<|endoftext|>": 406}))
    assert build(file, pattern="gpt2", special_tokens=[]).eos_id == 406


def damaged(*lines: bytes) -> bytes:
    rows = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in letters().items()]
    return b"\n".join([*rows, *lines])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no token for 256 of the 256 bytes"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), ":1: expected base64, a space and a rank"),
        (b"YQ==", ":1: expected base64"),
        (b"YQ== 1 2", ":1: expected base64"),
        (b"YQ== -1", ":1: expected base64"),
        (b"YQ== 1e3", ":1: expected base64"),
        (b"Y!== 1", ":1: not base64"),
        (b"YQ= 1", ":1: not base64"),
        (b"== 1", ":1: .*(not base64|a token of 0 bytes)"),
        (b"YQ== 99999999999999999999", ":1: expected base64"),
        (b"YQ== 999999999", ":1: rank 999999999; 16777215 is the largest"),
        (damaged(b"YQ== 300"), r":257: b'a' is there twice"),
        (damaged(b"YWE= 7"), ":257: rank 7 is there twice: the first time in line 8"),
        (damaged(base64.b64encode(b"x" * 1025) + b" 256"), ":257: a token of 1025 bytes"),
        (damaged(b"A" * 10_000_000 + b" 256"), ":257: a token of more than 1024 bytes"),
        (damaged()[20:], "1: expected base64|no token for"),
    ],
)
def test_a_damaged_file_is_told_with_its_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.tiktoken").write_bytes(content)
    with pytest.raises(DataError, match=rf"bad.tiktoken.*({message})"):
        build(tmp_path / "bad.tiktoken")


def test_files_that_are_too_large_are_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="No such file"):
        build(tmp_path / "absent")
    monkeypatch.setattr(tiktoken_file, "MAX_TOKENS", 300)
    with pytest.raises(DataError, match=":301: more than 300 tokens"):
        build(file)
    monkeypatch.setattr(tiktoken_file, "MAX_FILE_BYTES", 1000)
    with pytest.raises(DataError, match="larger than"):
        build(file)


def test_a_file_whose_rules_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    runs = [bytes([letter]) * length for letter in b"abc" for length in range(2, 1025)]
    ranks = letters() | {run: 256 + number for number, run in enumerate(runs)}
    with pytest.raises(DataError, match=r"large.tiktoken: too many of its tokens are made of"):
        build(write(tmp_path / "large.tiktoken", ranks))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pattern": "cl100"}, "no pattern is named 'cl100'.*cl100k"),
        ({"pattern": "(oh"}, "not a regular expression"),
        ({"special_tokens": []}, "406 tokens.*follow 100256 others.*name them"),
        ({"special_tokens": [], "pattern": r"\w+|\W+"}, "name them"),
        ({"special_tokens": {"<|endoftext|>": 3}}, "two tokens have id 3"),
        ({"special_tokens": {"<|endoftext|>": 500, "<|pad|>": 500}}, "an id is given twice"),
        ({"special_tokens": ["<|endoftext|>", "a"]}, "'a' is in .* already"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    file: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as error:
        build(file, **keys)
    assert re.search(message, error.value.render(), re.DOTALL)


def test_which_token_ends_a_document_must_be_known(file: Path) -> None:
    with pytest.raises(DataError, match="which token ends a document"):
        build(file, special_tokens=["<|fin|>"])
    assert build(file, special_tokens=["<|fin|>"], eos_token="<|fin|>").eos_id == 406
    with pytest.raises(DataError, match="no token is named"):
        build(file, eos_token="<|fin|>")


def test_every_way_of_making_a_token_has_a_rule(file: Path) -> None:
    ranks = read_ranks(file)
    rules = build_model_file(file, ranks, "x", {})["model"]["merges"]
    ways = sum(
        token[:cut] in ranks and token[cut:] in ranks
        for token in ranks
        for cut in range(1, len(token))
    )
    assert len(rules) == ways >= len(ranks) - 256
