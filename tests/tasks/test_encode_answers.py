"""Questions about texts, and pairs of answers, as arrays."""

import re
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.tasks.encoders import save, train
from trainer.engine.data.batch import IGNORED
from trainer.engine.tasks.collate_texts import collate_answers, collate_texts
from trainer.engine.tasks.encode_answers import (
    count_answer_tokens,
    encode_preference,
    encode_question,
    make_preference_encoding,
    make_question_encoding,
    truncate_preference,
    truncate_question,
)
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
EOS = BYTES.eos_id
QUESTION = "Where was Ada Lovelace born?"
CONTEXT = "Ada Lovelace, é 🙂, was born in London."


@pytest.fixture(scope="module", params=["byte level", "words"])
def tokenizer(request):
    return train(request.param)


def ask(answers, tokenizer=BYTES, context=CONTEXT):
    values = {"question": QUESTION, "context": context, "answers": answers}
    return encode_question(values, tokenizer)


@pytest.mark.parametrize("answer", ["London", "Ada Lovelace", "é", "🙂", "born in London", "."])
def test_the_tokens_of_an_answer_are_those_that_hold_its_characters(tokenizer, answer) -> None:
    start = CONTEXT.index(answer)
    arrays = ask({"text": [answer], "answer_start": [start]}, tokenizer)
    text = f"{QUESTION}\n{CONTEXT}"
    first, last = arrays["labels"].tolist()
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert arrays["tokens"].tolist() == [*ids.tolist(), tokenizer.eos_id]
    # No token before or after holds any of it, and together they hold all of it.
    begin, end = len(QUESTION) + 1 + start, len(QUESTION) + 1 + start + len(answer)
    held = [
        index
        for index, (left, right) in enumerate(offsets.tolist())
        if left < end and right > begin
    ]
    assert [*range(first, last + 1)] == held
    assert answer in text[offsets[first][0] : offsets[last][1]]
    assert first >= arrays["context_start"]
    context = offsets[arrays["context_start"] :, 1]
    assert (context > len(QUESTION) + 1).all()


def test_spans_are_those_of_transformers(tmp_path: Path) -> None:
    for kind in ("byte level", "words"):
        ours = train(kind)
        theirs = PreTrainedTokenizerFast.from_pretrained(save(ours, tmp_path / kind))
        encoding = theirs(f"{QUESTION}\n{CONTEXT}", add_special_tokens=False)
        for answer in ("London", "Ada", "é 🙂, was"):
            start = CONTEXT.index(answer)
            first, last = ask({"text": answer, "answer_start": start}, ours)["labels"].tolist()
            begin = len(QUESTION) + 1 + start
            assert first == encoding.char_to_token(begin)
            assert last == encoding.char_to_token(begin + len(answer) - 1)


def test_bytes_of_an_answer_by_hand() -> None:
    arrays = ask({"text": ["é"], "answer_start": [CONTEXT.index("é")]})
    before = len(QUESTION) + 1 + len("Ada Lovelace, ")
    assert arrays["labels"].tolist() == [before, before + 1]
    assert arrays["context_start"] == len(QUESTION) + 1


@pytest.mark.parametrize("answers", [[], {"text": [], "answer_start": []}])
def test_a_question_without_answers_has_the_end_as_its_answer(answers) -> None:
    arrays = ask(answers)
    assert arrays["labels"].tolist() == [len(arrays["tokens"]) - 1] * 2


def test_answers_are_written_in_three_ways() -> None:
    ways = [
        {"text": ["born", "in"], "answer_start": [23, 28]},
        [{"text": "born", "answer_start": 23}],
        {"text": "born", "answer_start": 23},
    ]
    spans = {tuple(ask(answers)["labels"].tolist()) for answers in ways}
    assert len(spans) == 1


WRONG_ANSWERS = {
    "another place": ({"text": "London", "answer_start": 3}, "'London' at character 3, where"),
    "an empty answer": ({"text": "", "answer_start": 3}, "'' at character 3"),
    "past the end": ({"text": "London", "answer_start": 999}, "where the context has ''"),
    "negative": ({"text": ".", "answer_start": -1}, "begin at character -1"),
    "no place": ({"text": ["a"]}, 'no field "answer_start"'),
    "a text": ("London", '"answers" is a string, expected text and answer_start'),
    "a number as text": ({"text": ["a"], "answer_start": ["3"]}, "a string and a string"),
}


@pytest.mark.parametrize("case", WRONG_ANSWERS)
def test_answers_that_are_not_in_the_context_are_faults(case) -> None:
    answers, reason = WRONG_ANSWERS[case]
    with pytest.raises(ValueError, match=re.escape(reason)):
        ask(answers)


def test_a_context_is_cut_and_an_answer_beyond_the_cut_is_none() -> None:
    start = CONTEXT.index("Lovelace")
    sample = ask({"text": "Lovelace", "answer_start": start})
    first, last = sample["labels"].tolist()
    cut = truncate_question(sample, last + 2)
    assert cut["labels"].tolist() == [first, last]
    assert cut["tokens"].tolist() == [*sample["tokens"][: last + 1].tolist(), EOS]
    beyond = truncate_question(sample, last + 1)
    assert beyond["labels"].tolist() == [last, last]
    assert beyond["tokens"][last] == EOS
    assert beyond["context_start"] == sample["context_start"]
    arrays = collate_texts([cut, cut], last + 5, EOS)
    assert arrays["labels"].tolist() == [[first, last]] * 2
    assert arrays["context_start"].tolist() == [len(QUESTION) + 1] * 2


def test_questions_to_predict_have_no_labels() -> None:
    encoding = make_question_encoding(BYTES, is_labelled=False)
    arrays = encoding.encode({"question": "a", "context": "b"})
    assert arrays.keys() == {"tokens", "context_start"}
    assert encoding.fields == ("question", "context")


def test_prompt_and_answers_are_encoded_apart(tokenizer) -> None:
    values = {"prompt": "Where was Ada", "chosen": " born?", "rejected": ""}
    arrays = encode_preference(values, tokenizer)
    eos = tokenizer.eos_id
    assert arrays["prompt"].tolist() == tokenizer.encode("Where was Ada").tolist()
    assert arrays["chosen"].tolist() == [*tokenizer.encode(" born?").tolist(), eos]
    assert arrays["rejected"].tolist() == [eos]
    with pytest.raises(ValueError, match='"chosen" is null, expected a string'):
        encode_preference({"prompt": "a", "chosen": None, "rejected": "b"}, tokenizer)


def test_pairs_are_two_rows_whose_labels_are_the_answers_tokens() -> None:
    samples = [
        encode_preference({"prompt": "ab", "chosen": "cd", "rejected": "e"}, BYTES),
        encode_preference({"chosen": "f", "rejected": "gh"}, BYTES),
    ]
    arrays = collate_answers(samples, 6, EOS)
    a, b, c, d, e, f, g, h = range(97, 105)
    pad, no = EOS, IGNORED
    assert arrays["tokens"].tolist() == [
        [a, b, c, d, EOS, pad],
        [a, b, e, EOS, pad, pad],
        [f, EOS, pad, pad, pad, pad],
        [g, h, EOS, pad, pad, pad],
    ]
    assert arrays["labels"].tolist() == [
        [no, c, d, EOS, no, no],
        [no, e, EOS, no, no, no],
        [EOS, no, no, no, no, no],
        [h, EOS, no, no, no, no],
    ]
    assert arrays["lengths"].tolist() == [5, 4, 2, 3]
    assert (~arrays["padding_mask"]).sum(1).tolist() == [5, 4, 2, 3]


# prompt, chosen, rejected, length -> what is left of each
CUTS = [
    ((8, 2, 3), 10, (7, 2, 3)),
    ((8, 9, 3), 10, (5, 5, 3)),
    ((2, 20, 3), 10, (2, 8, 3)),
    ((0, 20, 3), 10, (0, 10, 3)),
]


@pytest.mark.parametrize(("lengths", "length", "left"), CUTS)
def test_long_pairs_lose_the_beginning_of_the_prompt_first(lengths, length, left) -> None:
    names = ("prompt", "chosen", "rejected")
    sample = {name: np.arange(n) for name, n in zip(names, lengths, strict=True)}
    cut = truncate_preference(sample, length)
    assert tuple(len(cut[name]) for name in names) == left
    assert count_answer_tokens(cut) <= length
    assert cut["prompt"].tolist() == [*range(lengths[0])][lengths[0] - left[0] :]
    assert cut["chosen"].tolist() == [*range(left[1])]


def test_the_encoding_of_pairs_renders_messages_and_counts_whole_rows() -> None:
    encoding = make_preference_encoding(BYTES)
    assert encoding.holds_answers
    sample = encoding.encode({"prompt": "ab", "chosen": "cde", "rejected": "f"})
    assert encoding.length(sample) == 6
