"""Tokenizers of the kinds that differ in which characters a token stands for."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from trainer.engine.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from trainer.engine.tokenizers.tokenizer_files import TokenizerFiles

TEXTS = [
    "Where was Ada Lovelace born? Ada Lovelace was born in London.",
    "Wolfgang lives in Berlin and eats Käsespätzle 🙂 daily.",
    "The tokenizer splits unhappily into pieces, unlike happy words.",
] * 4


def train(kind: str) -> HuggingFaceTokenizer:
    """Return a small BPE: tokens of "byte level" hold the space before a word."""
    native = Tokenizer(models.BPE(unk_token="<unk>" if kind == "words" else None))
    if kind == "words":
        native.pre_tokenizer = pre_tokenizers.Whitespace()
        alphabet = []
    else:
        native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["</s>", "<unk>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    native.train_from_iterator(TEXTS, trainer)
    return HuggingFaceTokenizer(
        TokenizerFiles(kind, native.to_str().encode(), {"eos_token": "</s>"})
    )


def save(tokenizer: HuggingFaceTokenizer, folder: Path) -> Path:
    folder.mkdir()
    tokenizer.save(folder)
    return folder
