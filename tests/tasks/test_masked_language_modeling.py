"""Masked language modelling hides tokens by the number of the sample alone."""

import numpy as np
import pytest

from tests.recipes.test_task_checks import problems
from trainer.engine.core.errors import RecipeError
from trainer.engine.data.batch import IGNORED
from trainer.engine.data.packing import PackedRows
from trainer.engine.tasks.language_modeling.masked import Masking, find_mask_id
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

MASK = 257
MASKING = Masking(rate=0.15, mask_id=MASK, vocab_size=256, seed=3)


def rows_of(count, length=500):
    tokens = np.random.default_rng(0).integers(0, 256, (count, length))
    padding = np.zeros((count, length), dtype=bool)
    padding[:, -50:] = True
    return PackedRows(tokens, np.full_like(tokens, 7), padding_mask=padding)


def test_of_the_tokens_to_be_told_most_are_hidden_some_replaced_and_some_stay():
    rows = rows_of(400)
    masked = MASKING.apply(rows, np.arange(400))
    chosen = masked.labels != IGNORED
    assert not chosen[rows.padding_mask].any()
    np.testing.assert_array_equal(masked.labels[chosen], rows.tokens[chosen])
    np.testing.assert_array_equal(masked.tokens[~chosen], rows.tokens[~chosen])
    assert chosen[:, :-50].mean() == pytest.approx(0.15, abs=0.005)
    shown, own = masked.tokens[chosen], rows.tokens[chosen]
    assert (shown == MASK).mean() == pytest.approx(0.8, abs=0.02)
    assert (shown == own).mean() == pytest.approx(0.1, abs=0.02)  # one in 256 at random
    others = shown[(shown != MASK) & (shown != own)]
    assert others.max() < 256
    assert len(np.unique(others)) > 200


def test_what_is_hidden_does_not_depend_on_the_batch():
    rows = rows_of(8)
    whole = MASKING.apply(rows, np.arange(8, 16))
    for part in (slice(0, 3), slice(3, 8)):
        some = PackedRows(
            rows.tokens[part], rows.labels[part], padding_mask=rows.padding_mask[part]
        )
        alone = MASKING.apply(some, np.arange(8, 16)[part])
        np.testing.assert_array_equal(alone.tokens, whole.tokens[part])
        np.testing.assert_array_equal(alone.labels, whole.labels[part])
    later = MASKING.apply(rows, np.arange(108, 116))
    assert (later.labels != whole.labels).any(1).all(), "another sample hides other positions"


def test_a_mask_token_is_one_token_or_a_number_that_no_token_has():
    tokenizer = ByteTokenizer()
    assert find_mask_id(tokenizer, "") == tokenizer.vocab_size
    assert find_mask_id(tokenizer, "#") == ord("#")
    with pytest.raises(RecipeError, match="is 6 tokens"):
        find_mask_id(tokenizer, "[MASK]")


def test_a_model_that_sees_no_later_position_is_refused(tmp_path):
    found = problems(tmp_path, '[task]\nname = "masked_language_modeling"')
    assert ("model.attention", 'the task "masked_language_modeling" does not support "causal"') in [
        (key, message) for key, message in found
    ]
