"""Loss and perplexity against transformers, against float64 and against the run's own rows."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conversion.models import hf_folder, loaded_by_transformers
from trainer.engine.core.errors import DataError
from trainer.engine.corpus.configs import TokensSource
from trainer.engine.corpus.store import StoreWriter
from trainer.engine.corpus.tokenise import make_chunk
from trainer.engine.inference.inputs import Dtype
from trainer.engine.inference.measure import measure_source, measure_split, open_splits
from trainer.engine.inference.open import open_model
from trainer.engine.inference.score import windows
from trainer.engine.recipe.schema import Recipe
from trainer.engine.sources.configs import JsonlSource, TextSource
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer, count_text_bytes
from trainer.engine.tokenizers.tokenizer import MaskedDocument

TEXT = "def naïve(x):\n    return [x * i for i in range(10)]  # ü\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def opened(folder):
    return open_model(folder, dtype=Dtype.FP32)


@pytest.fixture(scope="module")
def theirs(folder):
    return loaded_by_transformers(folder).double()


def costs(theirs, tokens):
    """Return the negative log-probability of each token but the first, in float64."""
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")


def tokens_of(opened, text):
    return [opened.tokenizer.eos_id, *opened.tokenizer.encode(text).tolist()]


def measure(opened, source, **options):
    settings = {"seq_len": 64, "stride": 64, "batch_size": 3} | options
    return measure_source(opened, source, name="texts", **settings)


def text_source(tmp_path, *texts):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    return TextSource(path=str(tmp_path))


def test_loss_is_that_of_transformers_and_units_divide_the_same_sum(opened, theirs, tmp_path):
    texts = [TEXT, "x", "import os, sys\n" * 2]
    found = measure(opened, text_source(tmp_path, *texts)).summary()
    expected = torch.cat([costs(theirs, tokens_of(opened, text)) for text in texts])
    counts = {
        "token": len(expected),
        "byte": sum(len(text.encode()) for text in texts),
        "word": sum(len(text.split()) for text in texts),
    }
    total = expected.sum().item()
    for unit, count in counts.items():
        assert found[unit]["count"] == count
        assert found[unit]["loss"] == pytest.approx(total / count, rel=1e-5)
        assert found[unit]["bits"] == pytest.approx(total / count / math.log(2), rel=1e-5)
        assert found[unit]["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    ids = torch.tensor([tokens_of(opened, texts[0])])
    with torch.no_grad():
        own = theirs(ids, labels=ids).loss.item()
    alone = measure(opened, TextSource(path=str(tmp_path / "0.txt")))
    assert alone.per("token")["loss"] == pytest.approx(own, rel=1e-5)
    assert found["texts"] == 3


@pytest.mark.parametrize("stride", [16, 7, 1])
def test_a_long_text_is_scored_in_sliding_windows(opened, theirs, tmp_path, stride):
    text = TEXT * 4
    tokens = tokens_of(opened, text)
    seq_len, total, done = 16, 0.0, 0
    while done < len(tokens) - 1:  # the loop of the definition, one window at a time
        stop = min(seq_len if done == 0 else done + stride, len(tokens) - 1)
        window = tokens[max(0, stop - seq_len) : stop + 1]
        total += costs(theirs, window)[-(stop - done) :].sum().item()
        done = stop
    source = text_source(tmp_path, text)
    found = measure(opened, source, seq_len=seq_len, stride=stride)
    assert found.tokens == len(tokens) - 1
    assert found.nll == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("length", [2, 8, 9, 10, 25])
def test_windows_score_each_token_once_after_as_much_context_as_fits(length, stride):
    tokens, seq_len = np.arange(100, 100 + length), 8
    seen = []
    for number, row in enumerate(windows(tokens, seq_len, stride)):
        scored = row.labels[row.labels >= 0].tolist()
        assert len(scored) <= (stride if number else seq_len)
        assert row.labels.tolist()[-len(scored) :] == scored
        assert row.inputs[0] + len(row.inputs) == scored[-1], "inputs are what comes before"
        assert len(row.inputs) == min(seq_len, scored[-1] - 100)
        seen += scored
    assert seen == tokens[1:].tolist()


def test_whole_windows_are_those_of_the_evaluation_harness():
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for length in (1, 5, 8, 9, 23):
        tokens = list(range(1, length + 1))
        rolling = get_rolling_token_windows(tokens, prefix_token=0, max_seq_len=8, context_len=1)
        expected = [make_disjoint_window(each) for each in rolling]
        found = [
            (list(row.inputs), [int(label) for label in row.labels if label >= 0])
            for row in windows(np.array([0, *tokens]), 8, 8)
        ]
        assert found == [(context + scored[:-1], scored) for context, scored in expected]


def test_batches_and_limits(opened, tmp_path):
    texts = [TEXT[number:] for number in range(9)]
    source = text_source(tmp_path, *texts)
    whole = measure(opened, source)
    for batch_size in (1, 100):
        other = measure(opened, source, batch_size=batch_size)
        assert other.nll == pytest.approx(whole.nll, rel=1e-6)
    part = measure(opened, source, limit=2)
    assert part.texts == 2
    assert part.bytes == sum(len(text.encode()) for text in texts[:2])


def test_only_learned_parts_count(opened, theirs):
    document = MaskedDocument("user: two?\nbot: 2.\n", ((11, 19),))

    class Chats(TextSource):
        def parts(self):
            return [None]

        def read(self, part):
            yield document

    found = measure(opened, Chats(path="unused"))
    ((ids, learned),) = opened.tokenizer.encode_masked([document])
    cost = costs(theirs, [opened.tokenizer.eos_id, *ids.tolist()])
    assert found.tokens == learned.sum()
    assert found.nll == pytest.approx(cost[torch.from_numpy(learned)].sum().item(), rel=1e-5)
    assert (found.bytes, found.words) == (8, 2)


def test_documents_that_cannot_be_read_stop_it_or_are_counted(opened, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"tex": "two"}\n{"text": "three"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        measure(opened, JsonlSource(path=str(file)))
    found = measure(opened, JsonlSource(path=str(file), on_error="skip"))
    assert (found.texts, found.skipped, found.bytes) == (2, 1, 8)
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n', encoding="utf-8")
    with pytest.raises(DataError, match="no text"):
        measure(opened, JsonlSource(path=str(empty)))


def test_bytes_that_are_no_utf8_are_counted_once_each(opened, tmp_path):
    documents = [b"a\xc3", b"\xe2\x82", "\ufffdü".encode(), b"\xff\xfeb"]
    with StoreWriter(tmp_path / "tokens", ByteTokenizer()) as writer:
        ids = [np.frombuffer(document, dtype=np.uint8) for document in documents]
        writer.write(make_chunk(ByteTokenizer(), ids))
        writer.finish()
    source = TokensSource(path=str(tmp_path / "tokens"))
    found = measure(replace(opened, tokenizer=ByteTokenizer()), source)
    assert found.bytes == len(b"".join(documents))


def test_a_foreign_vocabulary_counts_a_torn_character_as_one_byte(opened):
    tokenizer = opened.tokenizer
    whole = tokenizer.encode("\ufffd naïve").tolist()
    assert count_text_bytes(tokenizer, whole, "\ufffd naïve") == len("\ufffd naïve".encode())
    torn = next(
        ids
        for text in ("日", "ü", "😀")
        if "\ufffd" in tokenizer.decode(ids := tokenizer.encode(f"ab{text}").tolist()[:-1])
    )
    assert count_text_bytes(tokenizer, torn, tokenizer.decode(torn)) == 3


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rows_of_the_validation_split_cut_no_word_and_no_character(
    opened, tmp_path, monkeypatch, batch_size
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    texts = ["xänder öffnet größere Türen", "日本語 naïve", "drei Wörter hier"] * 3
    for name in ("train", "validation"):
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = [
        {"name": "jsonl", "path": str(tmp_path / f"{split}.jsonl"), "split": split}
        for split in ("train", "validation")
    ]
    data = {"seq_len": 5, "packing": "concat", "sources": sources}
    recipe = Recipe.model_validate({"data": data})
    of_bytes = replace(opened, step=1, recipe=recipe, tokenizer=ByteTokenizer())
    found = measure_split(of_bytes, open_splits(of_bytes)[0], batch_size=batch_size)
    stream = [token for text in texts for token in (*text.encode(), None)]
    scored = stream[1 : 1 + (len(stream) - 1) // 5 * 5]
    assert found.tokens == len(scored)
    assert found.bytes == len(scored) - scored.count(None)
    documents = bytes(0 if token is None else token for token in scored).split(b"\0")
    assert found.words == sum(len(each.split()) for each in documents)
