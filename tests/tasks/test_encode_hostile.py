"""Records of any content become arrays or faults, and nothing else."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.same_cases  # noqa: F401 - loads the profile
from tests.tasks.encoders import train
from trainer.engine.tasks.encode_answers import (
    encode_preference,
    encode_question,
    truncate_preference,
    truncate_question,
)
from trainer.engine.tasks.encode_texts import (
    encode_classification,
    encode_tokens,
    truncate_text,
    truncate_tokens,
)
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

TOKENIZERS = {"bytes": ByteTokenizer(), "byte level": train("byte level"), "words": train("words")}
LABELS = ["a", "b", "3"]
# Halves of surrogate pairs are faults before records are encoded.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -1, 0, 2])
PLAIN = st.none() | st.booleans() | NUMBERS | TEXTS | st.sampled_from(LABELS)
ANY = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
FIELDS = {
    "text": TEXTS | ANY,
    "label": ANY,
    "tokens": st.lists(TEXTS, max_size=4) | ANY,
    "labels": st.lists(st.sampled_from([*LABELS, 0, 1]), max_size=4) | ANY,
    "question": TEXTS | ANY,
    "context": TEXTS | ANY,
    "answers": st.fixed_dictionaries({"text": TEXTS | ANY, "answer_start": NUMBERS | ANY}) | ANY,
    "prompt": TEXTS | ANY,
    "chosen": TEXTS | ANY,
    "rejected": TEXTS | ANY,
}
ENCODERS = {
    "single": (lambda v, t: encode_classification(v, t, LABELS), truncate_text),
    "multi": (lambda v, t: encode_classification(v, t, LABELS, "multi"), truncate_text),
    "regression": (
        lambda v, t: encode_classification(v, t, (), "regression", 2),
        truncate_text,
    ),
    "tokens": (lambda v, t: encode_tokens(v, t, LABELS), truncate_tokens),
    "question": (encode_question, truncate_question),
    "preference": (encode_preference, truncate_preference),
}


@pytest.mark.parametrize("task", ENCODERS)
@given(values=st.fixed_dictionaries({}, optional=FIELDS), length=st.integers(1, 20), data=st.data())
def test_any_record_is_encoded_or_a_fault(task, values, length, data) -> None:
    tokenizer = TOKENIZERS[data.draw(st.sampled_from([*TOKENIZERS]))]
    encode, truncate = ENCODERS[task]
    with suppress(ValueError):  # what a fault is made of
        arrays = encode(values, tokenizer)
        require_arrays(task, arrays, tokenizer)
        if "tokens" not in arrays or len(arrays["tokens"]) > length:
            cut = truncate(arrays, length)
            require_arrays(task, cut, tokenizer)
            assert max(len(array) for name, array in cut.items() if name in TEXT) <= length


TEXT = ("tokens", "prompt", "chosen", "rejected")


def require_arrays(task, sample, tokenizer):
    for array in sample.values():
        assert array.ndim <= 1
        assert array.dtype in (np.int32, np.int64, np.float32, np.uint8)
    if "tokens" in sample:
        assert sample["tokens"][-1] == tokenizer.eos_id
    if task == "tokens":
        assert len(sample["labels"]) == len(sample["tokens"])
