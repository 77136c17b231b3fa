"""A million lines through tokenizers of three kinds: ids of each kind's own library, and back."""

import base64
import json
import random
from itertools import islice
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tokenizers
import torch
from transformers import LlamaTokenizer

from tests.interop.small_model import VOCABULARY, train_once
from trainer.engine.tokenizers.configs import BPETokenizer, HFTokenizer, TiktokenTokenizer
from trainer.engine.tokenizers.patterns import PATTERNS

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]  # the first one trains

LINES, INVENTED = 1_000_000, 20_000
A_BATCH = 50_000
LARGEST_CHARACTER = 0x10FFFF
SURROGATES = range(0xD800, 0xE000)
SPACE = "\u2581"
"""a space in sentencepiece's vocabularies, so that it has no id of its own"""


def read_lines():
    """Return the lines of torch's sources, and lines of characters of all of Unicode."""
    chance = random.Random(7)
    invented = ["".join(draw_characters(chance)) for _ in range(INVENTED)]
    sources = sorted(Path(torch.__file__).parent.rglob("*.py"))
    lines = (line for path in sources for line in path.open(encoding="utf-8", newline=""))
    found = [*invented, *islice(lines, LINES - INVENTED)]
    assert len(found) == LINES
    return found


def draw_characters(chance):
    """Return characters of scripts drawn at random, with ASCII and spaces among them."""
    size = chance.choice((0x80, 0x800, 0x10000, LARGEST_CHARACTER + 1))
    drawn = (chance.choice((32, chance.randrange(128), chance.randrange(size))) for _ in range(40))
    return [chr(number) for number in drawn if number not in (*SURROGATES, ord(SPACE))]


@pytest.fixture(scope="module")
def trained():
    return train_once().tokenizer


def open_tokenizers(folder, _):
    """Return our tokenizer of a tokenizer.json, and the ids by the library "tokenizers"."""
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(lines):
        found = theirs.encode_batch_fast(lines, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    return BPETokenizer(path=str(folder)).build(), encode


def open_tiktoken(folder, new):
    """Return our tokenizer of a file of ranks, and the ids by tiktoken."""
    native = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    alphabet = byte_alphabet()
    special = native.get_added_tokens_decoder()
    words = [native.id_to_token(number) for number in range(VOCABULARY) if number not in special]
    ranks = {bytes(map(alphabet.__getitem__, word)): rank for rank, word in enumerate(words)}
    file = new / "ranks.tiktoken"
    rows = (b"%s %d\n" % (base64.b64encode(word), rank) for word, rank in ranks.items())
    file.write_bytes(b"".join(rows))
    theirs = tiktoken.Encoding(
        "ranks", pat_str=PATTERNS["llama3"], mergeable_ranks=ranks, special_tokens={}
    )
    table = {"path": str(file), "pattern": "llama3", "special_tokens": ["<|endoftext|>"]}
    ours = TiktokenTokenizer.model_validate(table).build()
    return ours, theirs.encode_ordinary_batch


def byte_alphabet():
    """Return the byte that each character of a byte-level vocabulary stands for."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + number): byte for number, byte in enumerate(hidden)
    }


def open_sentencepiece(folder, new):
    """Return our tokenizer of a tokenizer.json made of a model, and the ids by sentencepiece."""
    texts = new / "texts.txt"
    texts.write_text("".join(read_lines()[INVENTED : INVENTED + 100_000]), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(texts),
        model_prefix=str(new / "tokenizer"),
        model_type="bpe",
        vocab_size=4000,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(new / "tokenizer.model"))
    LlamaTokenizer.from_pretrained(new).save_pretrained(new / "hf")
    file = new / "hf/tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    # As in the folders of Llama 2 and Mistral. What transformers 5 writes puts no space before a
    # text that begins with one, which sentencepiece does.
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}, spaces]
    content |= {"normalizer": {"type": "Sequence", "normalizers": normalizers}}
    file.write_text(json.dumps(content | {"pre_tokenizer": None}), encoding="utf-8")
    return HFTokenizer(path=str(new / "hf")).build(), theirs.encode


@pytest.mark.parametrize("opened", [open_tokenizers, open_tiktoken, open_sentencepiece])
def test_a_million_lines_have_the_ids_of_the_library_and_come_back(opened, trained, tmp_path):
    ours, encode = opened(trained, tmp_path)
    lines = read_lines()
    for start in range(0, LINES, A_BATCH):
        some = lines[start : start + A_BATCH]
        for line, found, wanted in zip(some, ours.encode_batch(some), encode(some), strict=True):
            assert found.tolist() == wanted, line
            assert ours.decode(found) == line
