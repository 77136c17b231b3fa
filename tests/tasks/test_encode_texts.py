"""Texts and words with labels of classes as arrays."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.tasks.encoders import save, train
from trainer.engine.core.errors import DataError, RecipeError
from trainer.engine.corpus.records.encode_records import RecordPreparation, open_or_encode
from trainer.engine.sources.configs import JsonlSource
from trainer.engine.tasks.collate_texts import collate_texts, collate_tokens
from trainer.engine.tasks.encode_texts import (
    encode_classification,
    encode_tokens,
    find_first_tokens,
    make_classification_encoding,
    make_token_encoding,
)
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

LABELS = ["negative", "neutral", "positive"]
BYTES = ByteTokenizer()
EOS = BYTES.eos_id


@pytest.fixture(scope="module", params=["byte level", "words"])
def tokenizer(request):
    return train(request.param)


def classify(label, **keys):
    values = {"text": "ab", "label": label}
    return encode_classification(values, BYTES, LABELS, **keys)


def test_a_text_has_its_tokens_an_end_and_the_number_of_its_class(tokenizer) -> None:
    values = {"text": "unhappily 🙂", "label": "positive"}
    arrays = encode_classification(values, tokenizer, LABELS)
    expected = [*tokenizer.encode("unhappily 🙂").tolist(), tokenizer.eos_id]
    assert arrays["tokens"].tolist() == expected
    assert arrays["labels"] == 2
    assert arrays["labels"].dtype == np.int64
    assert encode_classification({"text": ""}, BYTES, LABELS)["tokens"].tolist() == [EOS]


@pytest.mark.parametrize(
    ("label", "number"), [("neutral", 1), (0, 0), (2, 2), (1.0, 1), (True, 1), (False, 0)]
)
def test_a_class_is_named_or_numbered(label, number) -> None:
    assert classify(label)["labels"] == number


def test_a_name_wins_over_a_number() -> None:
    stars = ["1", "2", "3", "4", "5"]
    for label in (5, "5", 5.0):
        assert encode_classification({"text": "", "label": label}, BYTES, stars)["labels"] == 4


WRONG_LABELS = {
    "positiv": "'positiv', which is none of task.labels; did you mean \"positive\"?",
    "xyz": "they are negative, neutral, positive",
    3: '"label" is 3; classes are numbered from 0 to 2',
    -1: "classes are numbered from 0 to 2",
    1.5: "expected the name of a class",
    None: '"label" is null, expected the name of a class',
}


@pytest.mark.parametrize("label", WRONG_LABELS)
def test_a_label_that_is_no_class_is_a_fault_with_the_nearest(label) -> None:
    with pytest.raises(ValueError, match=re.escape(WRONG_LABELS[label])):
        classify(label)


def test_several_classes_are_zeros_and_ones() -> None:
    labels = classify(["positive", 0], problem="multi")["labels"]
    assert labels.tolist() == [1, 0, 1]
    assert labels.dtype == np.float32
    assert classify([], problem="multi")["labels"].tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match='"label" is a string, expected an array'):
        classify("positive", problem="multi")


def test_numbers_of_a_regression_may_be_missing() -> None:
    assert classify(2, problem="regression")["labels"].tolist() == [2.0]
    two = classify([0.5, None], problem="regression", targets=2)["labels"]
    np.testing.assert_array_equal(two, np.array([0.5, np.nan], np.float32))
    with pytest.raises(ValueError, match='"label" has 2 numbers, expected 1'):
        classify([1, 2], problem="regression")
    for wrong in ("1", True, float("inf")):
        with pytest.raises(ValueError, match="expected a finite number"):
            classify(wrong, problem="regression")


# words -> the first token of each and all others ignored, by hand: tokens are bytes
WORDS = [
    (["Ada", "was"], [0, 4]),
    (["é", "x"], [0, 3]),  # two bytes and a space before x
    (["a", "", "b"], [0, -1, 3]),
    (["New York", "is"], [0, 9]),
    ([], []),
    ([""], [-1]),
]


@pytest.mark.parametrize(("words", "expected"), WORDS)
def test_the_first_byte_of_each_word_is_found(words, expected) -> None:
    _, offsets = BYTES.encode_with_offsets(" ".join(words))
    assert find_first_tokens(words, offsets).tolist() == expected


def test_the_first_token_of_each_word_has_the_label_and_no_other(tokenizer) -> None:
    words = ["Wolfgang", "lives", "in", "unhappily", "Käsespätzle", "🙂"]
    labels = ["positive", "neutral", "neutral", "negative", "positive", "neutral"]
    arrays = encode_tokens({"tokens": words, "labels": labels}, tokenizer, LABELS)
    ids, offsets = tokenizer.encode_with_offsets(" ".join(words))
    assert ids.tolist() == tokenizer.encode(" ".join(words)).tolist()
    assert arrays["tokens"].tolist() == [*ids.tolist(), tokenizer.eos_id]
    labelled = np.flatnonzero(arrays["labels"] != -100)
    assert arrays["labels"][labelled].tolist() == [2, 1, 1, 0, 2, 1]
    text = " ".join(words)
    for token, word in zip(labelled, words, strict=True):
        start, stop = offsets[token]
        assert word.startswith(text[start:stop].strip())
        assert start == 0 or " " in text[start - 1 : start + 1]


def test_labels_are_where_transformers_puts_them(tmp_path: Path) -> None:
    """Of a tokenizer without spaces in tokens, which cuts words as it cuts the text."""
    ours = train("words")
    theirs = PreTrainedTokenizerFast.from_pretrained(save(ours, tmp_path / "words"))
    words = ["Wolfgang", "unhappily", "lives", "in", "Käsespätzle", "today."]
    classes = [0, 1, 2, 0, 1, 2]
    encoding = theirs(words, is_split_into_words=True, add_special_tokens=False)
    expected, previous = [], None
    for word in encoding.word_ids():
        expected.append(classes[word] if word != previous else -100)
        previous = word
    arrays = encode_tokens({"tokens": words, "labels": classes}, ours, LABELS)
    assert arrays["tokens"].tolist() == [*encoding["input_ids"], ours.eos_id]
    assert arrays["labels"].tolist() == [*expected, -100]
    assert expected.count(-100) >= 3


def test_words_to_predict_are_marked_without_labels() -> None:
    arrays = encode_tokens({"tokens": ["ab", "c"]}, BYTES, LABELS)
    assert arrays["labels"].tolist() == [0, -100, -100, 0, -100]


WRONG_WORDS = {
    "lengths": (
        {"tokens": ["a", "b"], "labels": [1]},
        '"labels" has 1 entries, and "tokens" has 2',
    ),
    "a text": ({"tokens": "a b", "labels": [1]}, '"tokens" is a string, expected an array'),
    "numbers": ({"tokens": [1], "labels": [1]}, '"tokens" has a number, expected words'),
    "a class": ({"tokens": ["a"], "labels": ["netural"]}, 'did you mean "neutral"?'),
}


@pytest.mark.parametrize("case", WRONG_WORDS)
def test_words_that_do_not_fit_are_faults(case) -> None:
    values, reason = WRONG_WORDS[case]
    with pytest.raises(ValueError, match=re.escape(reason)):
        encode_tokens(values, BYTES, LABELS)


def test_a_word_without_a_token_of_its_own_is_a_fault() -> None:
    offsets = np.array([[0, 1], [1, 5]])  # the second token holds the end of one word and the next
    with pytest.raises(ValueError, match="'de' has no token of its own"):
        find_first_tokens(["ab", "de"], np.array([[0, 5]]))
    assert find_first_tokens(["a", "bcd"], offsets).tolist() == [0, 1]


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Plain:
        eos_id = 0

        def encode(self, text):
            return np.zeros(1)

    with pytest.raises(RecipeError, match="Plain does not tell which characters"):
        make_token_encoding(Plain(), LABELS)


def opened(tmp_path: Path, rows, encoding, seq_len, **keys):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = JsonlSource(path=str(file)).for_fields(encoding.fields)
    job = RecordPreparation(source, BYTES, encoding, seq_len, **keys)
    store = open_or_encode(job, tmp_path / "cache")
    return store.read(np.arange(store.num_rows))


def test_long_texts_keep_their_end_and_become_batches(tmp_path: Path) -> None:
    rows = [{"text": "abcdef", "label": "neutral"}, {"text": "x", "label": 0}]
    encoding = make_classification_encoding(BYTES, LABELS)
    samples = opened(tmp_path, rows, encoding, 4, on_long="truncate")
    arrays = collate_texts(samples, 5, EOS)
    assert arrays["tokens"].tolist() == [[97, 98, 99, EOS, EOS], [120, EOS, EOS, EOS, EOS]]
    assert arrays["lengths"].tolist() == [4, 2]
    assert arrays["padding_mask"].sum(1).tolist() == [1, 3]
    assert arrays["labels"].tolist() == [1, 0]
    with pytest.raises(DataError, match=r"a\.jsonl:1: 7 tokens; data\.seq_len is 4"):
        opened(tmp_path, rows, encoding, 4)


def test_long_words_are_cut_with_their_labels(tmp_path: Path) -> None:
    rows = [{"tokens": ["ab", "c"], "labels": [1, 2]}, {"tokens": ["d"], "labels": [0]}]
    encoding = make_token_encoding(BYTES, LABELS)
    samples = opened(tmp_path, rows, encoding, 4, on_long="truncate")
    arrays = collate_tokens(samples, 4, EOS)
    assert arrays["tokens"].tolist() == [[97, 98, 32, EOS], [100, EOS, EOS, EOS]]
    assert arrays["labels"].tolist() == [[1, -100, -100, -100], [0, -100, -100, -100]]


def test_several_classes_are_stored_whatever_the_length_of_the_text(tmp_path: Path) -> None:
    rows = [{"text": "ab", "label": ["neutral"]}, {"text": "abcdef", "label": []}]
    encoding = make_classification_encoding(BYTES, LABELS, "multi")
    samples = opened(tmp_path, rows, encoding, 3, on_long="truncate")
    arrays = collate_texts(samples, 3, EOS)
    assert arrays["labels"].tolist() == [[0, 1, 0], [0, 0, 0]]
    unlabelled = make_classification_encoding(BYTES, LABELS, "multi", is_labelled=False)
    assert "labels" not in opened(tmp_path, rows, unlabelled, 8)[0]
