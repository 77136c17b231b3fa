"""Records as columns on disk: what is stored, left out, cut, damaged, and made again."""

import json
from pathlib import Path

import numpy as np
import pytest

from trainer.engine.core.errors import DataError, RecipeError
from trainer.engine.corpus.checksums import require_intact
from trainer.engine.corpus.records.encode_records import (
    RecordEncoding,
    RecordPreparation,
    open_or_encode,
)
from trainer.engine.corpus.records.record_store import RecordStore
from trainer.engine.corpus.records.record_writer import RecordWriter
from trainer.engine.sources import documents, files
from trainer.engine.sources.configs import JsonlSource
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

ROWS = [{"text": "x" * (number % 40), "label": number} for number in range(400)]


def encode(values):
    if not isinstance(values["label"], int):
        raise ValueError('"label" is no number')
    tokens = ByteTokenizer().encode(values["text"]).astype(np.int32)
    return {"tokens": tokens, "label": values["label"]}


ENCODING = RecordEncoding(("text", "label"), encode)


def write_lines(path: Path, rows) -> JsonlSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlSource(path=str(path))


def opened(source, cache: Path, encoding=ENCODING, seq_len=64, **keys) -> RecordStore:
    tokenizer = ByteTokenizer()
    source = source.for_fields(encoding.fields).for_tokenizer(tokenizer)
    job = RecordPreparation(source, tokenizer, encoding, seq_len, **keys)
    return open_or_encode(job, cache)


def rows_of(store: RecordStore) -> list[tuple[int, int]]:
    samples = store.read(np.arange(store.num_rows))
    return [(len(sample["tokens"]), int(sample["label"])) for sample in samples]


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    samples = [
        {
            "tokens": draw.integers(0, 99, draw.integers(0, 5)).astype(np.int32),
            "scores": draw.standard_normal(draw.integers(0, 3)),
            "label": np.asarray(float(number)),
        }
        for number in range(500)
    ]
    with RecordWriter(tmp_path / "store") as writer:
        for sample in samples:
            writer.add(sample)
        writer.finish()
    store = RecordStore.open_folder(tmp_path / "store")
    rows = draw.permutation(500)[:100]
    for row, sample in zip(rows, store.read(rows), strict=True):
        assert sample.keys() == samples[row].keys()
        for name, array in samples[row].items():
            assert sample[name].dtype == array.dtype
            np.testing.assert_array_equal(sample[name], array)
    # The files are what NumPy itself would have written.
    flat = np.concatenate([sample["tokens"] for sample in samples])
    np.testing.assert_array_equal(np.load(tmp_path / "store" / "tokens.npy"), flat)
    np.save(tmp_path / "expected.npy", flat)
    expected = (tmp_path / "expected.npy").read_bytes()
    assert (tmp_path / "store" / "tokens.npy").read_bytes() == expected


def test_parts_in_processes_give_the_bytes_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    alone = opened(source, tmp_path / "alone")
    for module in (files, documents):
        monkeypatch.setattr(module, "PART_BYTES", 2000)
    assert len(source.parts()) > 3
    parts = opened(source, tmp_path / "parts")
    assert rows_of(parts) == rows_of(alone) == [(n % 40, n) for n in range(400)]
    assert parts.manifest == alone.manifest


def test_an_interrupted_encoding_resumes_after_the_parts_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    alone = opened(source, tmp_path / "alone")
    for module in (files, documents):
        monkeypatch.setattr(module, "PART_BYTES", 5000)

    def encode_all_but(refused):
        def encode_some(values):
            if values["label"] in refused:
                raise RuntimeError("killed")
            return encode(values)

        return RecordEncoding(("text", "label"), encode_some)

    with pytest.raises(RuntimeError, match="killed"):
        opened(source, tmp_path / "cache", encode_all_but(range(399, 400)))
    assert not list((tmp_path / "cache").glob("*/records.json"))
    # The first records are not encoded a second time.
    store = opened(source, tmp_path / "cache", encode_all_but(range(50)))
    assert store.manifest == alone.manifest


def test_a_store_is_made_once_and_again_when_something_changed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS[:50])
    calls = []

    def count(values):
        calls.append(values)
        return encode(values)

    encoding = RecordEncoding(("text", "label"), count)
    first = opened(source, tmp_path / "cache", encoding)
    assert len(calls) == 50
    assert opened(source, tmp_path / "cache", encoding).manifest == first.manifest
    assert len(calls) == 50
    for change in ({"seq_len": 65}, {"on_long": "drop"}):
        opened(source, tmp_path / "cache", encoding, **change)
    opened(source, tmp_path / "cache", RecordEncoding(encoding.fields, count, "other"))
    assert len(calls) == 200
    write_lines(tmp_path / "a.jsonl", ROWS[:51])
    assert opened(source, tmp_path / "cache", encoding).num_rows == 51
    (first.folder / "label.npy").write_bytes(b"short")
    write_lines(tmp_path / "a.jsonl", ROWS[:50])
    assert rows_of(opened(source, tmp_path / "cache", encoding)) == [(n % 40, n) for n in range(50)]


FAULTS = {
    "a wrong type": ({"text": "a", "label": "one"}, '"label" is no number'),
    "a missing field": ({"text": "a", "lable": 1}, 'no field "label"; there is: lable, text'),
    "half a surrogate": ({"text": "\ud800", "label": 1}, "half of a surrogate pair"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_record_that_cannot_be_used_stops_with_its_line_or_is_skipped(
    tmp_path: Path, case: str
) -> None:
    row, reason = FAULTS[case]
    source = write_lines(tmp_path / "a.jsonl", [*ROWS[:3], row, *ROWS[4:6]])
    with pytest.raises(DataError) as error:
        opened(source, tmp_path / "cache")
    assert error.value.message.startswith(f"{tmp_path / 'a.jsonl'}:4: ")
    assert reason in error.value.message
    assert not list((tmp_path / "cache").glob("*/records.json"))
    skipping = source.model_copy(update={"on_error": "skip"})
    store = opened(skipping, tmp_path / "cache")
    assert [label for _, label in rows_of(store)] == [0, 1, 2, 4, 5]
    assert store.manifest.skipped == 1
    assert reason in store.manifest.faults[0]


def test_a_record_of_other_columns_than_the_first_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS[:3])

    def encode_two(values):
        names = ("tokens", "extra") if values["label"] == 2 else ("tokens",)
        return {name: np.zeros(1, np.int32) for name in names}

    with pytest.raises(DataError, match=r"a\.jsonl:3: .* what it has: extra"):
        opened(source, tmp_path / "cache", RecordEncoding(("text", "label"), encode_two))


def test_long_records_stop_or_are_cut_or_left_out(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS[:40])
    with pytest.raises(DataError) as error:
        opened(source, tmp_path / "cache", seq_len=30)
    expected = f"{tmp_path / 'a.jsonl'}:32: 31 tokens; data.seq_len is 30"
    assert error.value.message == expected
    assert 'data.on_long = "truncate" or "drop"' in error.value.hint
    cut = opened(source, tmp_path / "cache", seq_len=30, on_long="truncate")
    assert rows_of(cut) == [(min(n, 30), n) for n in range(40)]
    left = opened(source, tmp_path / "cache", seq_len=30, on_long="drop")
    assert rows_of(left) == [(n, n) for n in range(31)]
    assert (cut.manifest.truncated, left.manifest.dropped) == (9, 9)
    short = write_lines(tmp_path / "b.jsonl", [ROWS[5]] * 40)
    with pytest.raises(DataError, match=r"holds no records \(0 skipped, 40 too long\)"):
        opened(short, tmp_path / "cache", seq_len=1, on_long="drop")


def test_a_damaged_store_is_found_by_its_checksums(tmp_path: Path) -> None:
    store = opened(write_lines(tmp_path / "a.jsonl", ROWS), tmp_path / "cache")
    require_intact(store.folder, tmp_path, files=store.manifest.files)
    for name in store.manifest.files:
        file = store.folder / name
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(DataError, match=name):
            require_intact(store.folder, tmp_path, files=store.manifest.files)
        content[-1] ^= 1
        file.write_bytes(content)
    index = store.folder / "records.json"
    index.write_text(index.read_text().replace('"num_records": 400', '"num_records": 401'))
    with pytest.raises(DataError, match="checksum differs"):
        RecordStore.open_folder(store.folder)


def encode_answers(values):
    texts = {name: np.frombuffer(text.encode(), np.uint8) for name, text in values.items()}
    return {name: array.astype(np.int32) for name, array in texts.items()}


ANSWERS = RecordEncoding(("prompt", "chosen", "rejected"), encode_answers, holds_answers=True)
USER = {"role": "user", "content": "Why?"}
YES, NO = ({"role": "assistant", "content": word} for word in ("So.", "No."))
PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
CONVERSATIONS = {
    "prompt apart": {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
    "prompt as text": {"prompt": "Why?", "chosen": [YES], "rejected": [NO]},
    "whole conversations": {"prompt": "Why?", "chosen": [USER, YES], "rejected": [USER, NO]},
    "plain text": {"prompt": PROMPT, "chosen": "So.<|im_end|>\n", "rejected": "No.<|im_end|>\n"},
}


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_messages_are_rendered_with_the_chat_template(tmp_path: Path, case: str) -> None:
    source = write_lines(tmp_path / "a.jsonl", [CONVERSATIONS[case]] * 2)
    source = source.model_copy(update={"template": "chatml"})
    store = opened(source, tmp_path / "cache", ANSWERS, seq_len=256)
    for sample in store.read(np.arange(2)):
        texts = {name: bytes(array.astype(np.uint8)).decode() for name, array in sample.items()}
        answers = {"chosen": "So.<|im_end|>\n", "rejected": "No.<|im_end|>\n"}
        assert texts == {"prompt": PROMPT, **answers}


BAD_CONVERSATIONS = {
    "no prompt": ({"chosen": [YES], "rejected": [NO]}, "there is no prompt"),
    "an unknown role": (
        {"prompt": [{"role": "usr", "content": "a"}], "chosen": [YES], "rejected": [NO]},
        "prompt[0]: unknown role 'usr'; did you mean \"user\"?",
    ),
    "no answer": (
        {"prompt": [USER], "chosen": [YES], "rejected": []},
        "the last message of an answer is not the assistant's",
    ),
    "mixed": ({"prompt": "a", "chosen": [YES], "rejected": "b"}, '"rejected" is a string'),
}


@pytest.mark.parametrize("case", BAD_CONVERSATIONS)
def test_messages_that_make_no_pair_are_faults_of_their_line(tmp_path: Path, case: str) -> None:
    row, reason = BAD_CONVERSATIONS[case]
    source = write_lines(tmp_path / "a.jsonl", [row])
    none = {} if "prompt" in row else {"fields": {"prompt": ""}}
    source = source.model_copy(update={"template": "chatml", **none})
    with pytest.raises(DataError) as error:
        opened(source, tmp_path / "cache", ANSWERS)
    assert error.value.message.startswith(f"{tmp_path / 'a.jsonl'}:1: ")
    assert reason in error.value.message


def test_messages_without_a_template_say_how_to_name_one(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [CONVERSATIONS["prompt apart"]])
    with pytest.raises(RecipeError, match="no chat template") as error:
        opened(source, tmp_path / "cache", ANSWERS)
    assert '"chatml"' in error.value.render()
