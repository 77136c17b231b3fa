"""Tokenizers against the libraries they stand for."""

import json
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.engine.core.errors import DataError
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from trainer.engine.tokenizers.tokenizer import MaskedDocument
from trainer.engine.tokenizers.tokenizer_files import byte_characters

TEXTS = [
    "",
    "a",
    "def f(x):\n    return x\n",
    "naïve café 東京 🎉",
    " " * 50,
    "<|endoftext|> inside",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE, as `tokenizer.json`."""
    folder = tmp_path_factory.mktemp("tokenizer")
    native = Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    native.train_from_iterator(TEXTS * 20, trainer)
    native.save(str(folder / "tokenizer.json"))
    return folder


def copy_of(folder: Path, target: Path, **files: object) -> Path:
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content))
    return target


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    text = text.encode(errors="replace").decode()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids.tolist(), tokenizer.eos_id]) == text


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    assert ByteTokenizer().decode([0xFF, ord("a"), 256]) == "\ufffda"


def test_hf_ids_are_those_of_the_libraries(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    native = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == native.encode(text, add_special_tokens=False).ids
        assert ids.tolist() == fast(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text).tolist() == ids.tolist()
        assert tokenizer.decode(ids.tolist()) == text.replace("<|endoftext|>", "")
    assert tokenizer.vocab_size == len(fast)
    assert tokenizer.eos_id == 1


def naive_mask(marked: MaskedDocument, pieces: list[bytes]) -> list[bool]:
    """What is learned, byte by byte, of tokens whose bytes end to end are the text."""
    bytes_learned = [
        any(start <= index < stop for start, stop in marked.loss_ranges)
        for index, character in enumerate(marked.text)
        for _ in character.encode()
    ]
    assert b"".join(pieces) == marked.text.encode()
    mask, done = [], 0
    for piece in pieces:
        mask.append(all(bytes_learned[done : done + len(piece)]))
        done += len(piece)
    return mask


@st.composite
def marked_texts(draw: st.DrawFn) -> MaskedDocument:
    text = draw(st.text(st.sampled_from("ab é東🎉\n<|endoftext|>"), max_size=20))
    borders = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
    return MaskedDocument(text, tuple(zip(borders[::2], borders[1::2], strict=False)))


def test_the_stand_ins_of_bytes_are_those_of_the_library() -> None:
    assert sorted(byte_characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for byte, character in enumerate(byte_characters()):
        assert decoders.ByteLevel().decode([character]) == bytes([byte]).decode(errors="replace")


@pytest.fixture(scope="module")
def saved_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@given(st.one_of(st.text(), st.sampled_from(TEXTS)))
def test_saved_bytes_give_the_same_ids_in_transformers(saved_bytes: Path, text: str) -> None:
    fast = load_auto(saved_bytes)
    ids = ByteTokenizer().encode(text).tolist()
    assert fast(text, add_special_tokens=False)["input_ids"] == ids
    assert fast.decode(ids) == text
    assert (fast.eos_token_id, len(fast)) == (256, 257)


@lru_cache
def load_auto(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


@given(marked_texts())
def test_bytes_of_learned_characters_are_learned(marked: MaskedDocument) -> None:
    ((ids, learned),) = ByteTokenizer().encode_masked([marked])
    assert ids.tolist() == list(marked.text.encode())
    assert learned.tolist() == naive_mask(marked, [bytes([token]) for token in ids.tolist()])


@given(st.lists(marked_texts(), max_size=3))
def test_hf_tokens_of_learned_characters_are_learned(folder: Path, texts: list) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    native = Tokenizer.from_file(str(folder / "tokenizer.json"))
    byte_of = {text: byte for byte, text in enumerate(byte_characters())}
    plain = tokenizer.encode_batch([marked.text for marked in texts])
    for marked, expected, (ids, learned) in zip(
        texts, plain, tokenizer.encode_masked(texts), strict=True
    ):
        assert ids.tolist() == expected.tolist()
        names = [native.id_to_token(token) for token in ids.tolist()]
        pieces = [
            name.encode() if name == "<|endoftext|>" else bytes(map(byte_of.get, name))
            for name in names
        ]
        assert learned.tolist() == naive_mask(marked, pieces)


def test_a_space_in_front_of_a_range_is_not_trimmed_away(folder: Path, tmp_path: Path) -> None:
    native = Tokenizer.from_file(str(folder / "tokenizer.json"))
    native.post_processor = processors.ByteLevel(trim_offsets=True)
    native.save(str(tmp_path / "tokenizer.json"))
    text = "x return"
    ((ids, learned),) = HuggingFaceTokenizer(tmp_path).encode_masked(
        [MaskedDocument(text, ((2, 8),))]
    )
    assert native.id_to_token(int(ids[1])).startswith("Ġ")
    assert not learned[:2].any()
    assert learned[2:].all()


def test_a_token_that_stands_for_no_character_goes_with_the_next(tmp_path: Path) -> None:
    native = Tokenizer(models.BPE({"<s>": 0, "▁": 1, "a": 2, "b": 3}, []))
    native.normalizer = normalizers.Prepend("▁")
    native.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path, "<s>")
    ((ids, learned),) = tokenizer.encode_masked([MaskedDocument("ab", ((0, 1),))])
    assert (ids.tolist(), learned.tolist()) == ([1, 2, 3], [True, True, False])


def test_hf_padding_and_truncation_in_the_file_are_ignored(folder: Path, tmp_path: Path) -> None:
    native = Tokenizer.from_file(str(folder / "tokenizer.json"))
    native.enable_truncation(3)
    native.enable_padding(length=8)
    native.save(str(tmp_path / "tokenizer.json"))
    expected = HuggingFaceTokenizer(folder).encode_batch(TEXTS)
    found = HuggingFaceTokenizer(tmp_path).encode_batch(TEXTS)
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("token", ["<|pad|>", {"content": "<|pad|>", "lstrip": False}])
def test_the_files_beside_it_say_what_ends_a_document(
    folder: Path, tmp_path: Path, name: str, token: object
) -> None:
    path = copy_of(folder, tmp_path, **{name: {"eos_token": token}})
    assert HuggingFaceTokenizer(path).eos_id == 0
    assert HuggingFaceTokenizer(path / "tokenizer.json", "<|endoftext|>").eos_id == 1


def test_what_it_saves_loads_as_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder, "<|pad|>")
    tokenizer.save(tmp_path)
    again = HuggingFaceTokenizer(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.eos_id == 0
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    auto = AutoTokenizer.from_pretrained(tmp_path)
    assert auto.eos_token == "<|pad|>"
    for text in TEXTS:
        assert auto(text)["input_ids"] == tokenizer.encode(text).tolist()


def test_special_tokens_and_the_chat_template_are_kept(folder: Path, tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|pad|>"}, "chat_template": "{{ bos_token }}!"}
    source, target = tmp_path / "source", tmp_path / "target"
    for each in (source, target):
        each.mkdir()
    copy_of(folder, source, tokenizer_config=config)
    tokenizer = HuggingFaceTokenizer(source)
    assert tokenizer.special_tokens == {"bos_token": "<|pad|>", "eos_token": "<|endoftext|>"}
    tokenizer.save(target)
    again = HuggingFaceTokenizer(target)
    assert (again.special_tokens, again.chat_template) == (
        tokenizer.special_tokens,
        "{{ bos_token }}!",
    )
    auto = AutoTokenizer.from_pretrained(target)
    assert auto.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "<|pad|>!"
    (target / "chat_template.jinja").write_text("file")
    assert HuggingFaceTokenizer(target).chat_template == "file"


@pytest.mark.parametrize(
    ("templates", "expected"),
    [([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
     ([{"name": "tool_use"}], None), (3, None)],
)  # fmt: skip
def test_of_several_chat_templates_the_default_is_taken(
    folder: Path, tmp_path: Path, templates: object, expected: str | None
) -> None:
    copy_of(folder, tmp_path, tokenizer_config={"chat_template": templates})
    assert HuggingFaceTokenizer(tmp_path).chat_template == expected


def test_the_fingerprint_sees_a_changed_merge_and_another_eos(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = {
        HuggingFaceTokenizer(folder).fingerprint,
        HuggingFaceTokenizer(folder, "<|pad|>").fingerprint,
        HuggingFaceTokenizer(tmp_path).fingerprint,
    }
    assert len(found) == 3


def test_an_eos_token_that_is_not_there_is_an_error_with_the_nearest(folder: Path) -> None:
    with pytest.raises(DataError, match="no token is named") as error:
        HuggingFaceTokenizer(folder, "<|endoftxt|>")
    assert "<|endoftext|>" in error.value.hint


def test_no_known_eos_token_asks_for_one(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="which token ends a document") as error:
        HuggingFaceTokenizer(tmp_path)
    assert "tokenizer.eos_token" in error.value.hint


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[" * 10000])
def test_a_malformed_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer.json: not a tokenizer.json"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000])
def test_a_malformed_config_beside_it_is_named(folder: Path, tmp_path: Path, content: str) -> None:
    copy_of(folder, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer_config.json: not a JSON object"):
        HuggingFaceTokenizer(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent/?.*: No such file"):
        HuggingFaceTokenizer(tmp_path / "absent")
