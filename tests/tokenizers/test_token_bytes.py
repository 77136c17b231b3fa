"""Bytes of text by token, against the length of texts in UTF-8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from trainer.engine.data.batch import IGNORED, TokenBatch
from trainer.engine.data.tables import Data
from trainer.engine.tasks.language_modeling.config import LanguageModeling
from trainer.engine.tasks.tables import CrossEntropy, TaskSettings
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from trainer.engine.tokenizers.tokenizer_files import TokenizerFiles
from trainer.kernels.choose import choose

TEXTS = [
    "",
    "a",
    "def f(x):\n    return x\n",
    "naïve café 東京 🎉",
    " " * 7,
    "one  two\tthree <|tool|>",
]
SPACE = "\u2581"


def trained(native: Any, trainer: Any) -> HuggingFaceTokenizer:
    native.train_from_iterator(TEXTS * 20, trainer)
    native.add_tokens([AddedToken("<|tool|>", special=False, normalized=False)])
    native.add_special_tokens(["<|endoftext|>"])
    return HuggingFaceTokenizer(TokenizerFiles("tokenizer.json", native.to_str().encode()))


def byte_level() -> HuggingFaceTokenizer:
    native = Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "vocab_size": 300, "show_progress": False}
    return trained(native, trainers.BpeTrainer(**options))


def with_byte_fallback() -> HuggingFaceTokenizer:
    """As Llama 2's: what is no character of the vocabulary becomes bytes."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: number for number, token in enumerate([*pieces, *"abcdefnotwhrx", SPACE])}
    merges = [("o", "n"), ("on", "e"), (SPACE, "t")]
    vocabulary |= {"".join(pair): len(vocabulary) + number for number, pair in enumerate(merges)}
    native = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    native.normalizer = normalizers.Replace(" ", SPACE)
    native.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    native.add_tokens([AddedToken("<|tool|>", special=False, normalized=False)])
    native.add_special_tokens(["<|endoftext|>"])
    return HuggingFaceTokenizer(TokenizerFiles("tokenizer.json", native.to_str().encode()))


@pytest.mark.parametrize("make", [ByteTokenizer, byte_level, with_byte_fallback])
def test_the_tokens_of_a_text_have_its_bytes(make: Any) -> None:
    tokenizer = make()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.token_bytes[ids].sum() == len(text.encode()), text
    assert tokenizer.token_bytes[tokenizer.eos_id] == 0
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size


def test_a_space_before_a_document_counts() -> None:
    native = Tokenizer(models.Unigram())
    native.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    native.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = trained(native, trainers.UnigramTrainer(vocab_size=80, show_progress=False))
    for text in TEXTS[1:4]:
        assert tokenizer.token_bytes is not None
        assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode()) + 1


def test_what_tokens_do_not_tell_is_not_guessed() -> None:
    native = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    native.pre_tokenizer = pre_tokenizers.Whitespace()
    native.decoder = decoders.WordPiece()
    words = trained(native, trainers.WordPieceTrainer(vocab_size=80, show_progress=False))
    assert words.token_bytes is None
    labels = torch.tensor([[65, 256, IGNORED, 66]])
    batch = TokenBatch(labels.clamp(min=0), labels)
    assert task_of(words).evaluation_counts(batch).tolist() == [3, 0]
    assert task_of(object()).evaluation_counts(batch).tolist() == [3, 0]
    assert task_of(ByteTokenizer()).evaluation_counts(batch).tolist() == [3, 2]


def task_of(tokenizer: Any) -> Any:
    """Return next-token prediction with a tokenizer's table of bytes; the loss is not called."""
    settings = TaskSettings(CrossEntropy(), choose({}, "cpu", 8), Data(), None, tokenizer)  # type: ignore[arg-type]
    return LanguageModeling().build(settings)
