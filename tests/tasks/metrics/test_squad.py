"""Exact match and F1 of answers are those of torchmetrics over all texts."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torchmetrics.functional.text import squad

import trainer
from tests.distributed import run_ranks
from tests.train.plans import assembled
from trainer.engine.core.errors import RecipeError
from trainer.engine.data.tables import Data
from trainer.engine.recipe.load import load_recipe
from trainer.engine.tasks.classification.batch import make_collation
from trainer.engine.tasks.encode_answers import decode_answer_texts, encode_question
from trainer.engine.tasks.metrics.metric_set import MetricSet
from trainer.engine.tasks.metrics.tables import Outputs, metrics
from trainer.engine.tasks.tables import TaskSettings, losses, tasks
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.train.evaluate import validate
from trainer.kernels.choose import choose

CPU = torch.device("cpu")
ANSWERS = Outputs("answer")
SHARES = [3, 1]
GUESSES = ["the red Barn", "", "in a house", "a tall tree near it"]
RIGHT = [["Red barn!", "barn"], [""], ["hut", "the small house"], [""]]


def measure(shares):
    rank = int(os.environ.get("RANK", 0))
    rows = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    collected = MetricSet([metrics["squad"]()], ANSWERS, CPU)
    for guess, right in zip(GUESSES[rows], RIGHT[rows], strict=True):
        collected.update([guess], [right])
    return collected.compute()


def by_torchmetrics(guesses, right):
    pairs = list(enumerate(zip(guesses, right, strict=True)))
    numbers = squad(
        [{"id": str(n), "prediction_text": guess} for n, (guess, _) in pairs],
        [{"id": str(n), "answers": {"text": texts}} for n, (_, texts) in pairs],
    )
    return {f"squad/{name}": pytest.approx(x.item(), rel=1e-6) for name, x in numbers.items()}


def test_texts_have_the_numbers_of_torchmetrics():
    found = measure([len(GUESSES)])
    assert found == by_torchmetrics(GUESSES, RIGHT)
    # By hand: "red barn" and no answer match; "in house" and "small house" share a word of two.
    assert found["squad/exact_match"] == 50.0
    assert found["squad/f1"] == pytest.approx(100 * (1 + 1 + 0.5 + 0) / 4)


@pytest.mark.matrix
def test_ranks_with_unequal_numbers_of_answers_have_the_same_numbers():
    for found in run_ranks(2, measure, SHARES):
        assert found == by_torchmetrics(GUESSES, RIGHT)


RECORDS = [
    {
        "question": "Where?",
        "context": "Ada lives in Köln now.",
        "answers": [
            {"text": "Köln", "answer_start": 13},
            {"text": "in Köln", "answer_start": 10},
        ],
    },
    {"question": "Who?", "context": "Nobody knows.", "answers": {"text": [], "answer_start": []}},
    {
        "question": "What?",
        "context": "It is a long tale.",
        "answers": {"text": ["tale", "tale"], "answer_start": [13, 13]},
    },
]


def build_task(tokenizer):
    table = tasks["question_answering"](max_answer_tokens=20)
    settings = TaskSettings(
        losses["cross_entropy"](), choose({}, "cpu", 12), Data(), None, tokenizer
    )
    return table.build(settings)


def batch_of(tokenizer, ragged):
    samples = [
        {name: np.asarray(x) for name, x in encode_question(record, tokenizer).items()}
        for record in RECORDS
    ]
    collation = make_collation("question_answering", tokenizer.eos_id, ragged=ragged)
    arrays = collation.collate(samples, 40)
    columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return collation.batch_class.from_columns(columns | {"is_valid": torch.tensor([1, 1, 1]) > 0})


@pytest.mark.parametrize("ragged", [False, True])
def test_a_batch_has_the_texts_of_its_answers(ragged):
    tokenizer = ByteTokenizer()
    task, batch = build_task(tokenizer), batch_of(tokenizer, ragged)
    spans = {0: "lives in Köln", 2: "tale."}
    logits = torch.zeros(3, 40, 2)
    for row, text in spans.items():
        record = RECORDS[row]
        whole = f"{record['question']}\n{record['context']}"
        first = len(whole[: whole.index(text)].encode())
        logits[row, first, 0] = logits[row, first + len(text.encode()) - 1, 1] = 50
    end = batch.lengths[1] - 1
    logits[1, end] = 50
    if ragged:
        rows = zip(logits, batch.lengths.tolist(), strict=True)
        logits = torch.cat([x[:length] for x, length in rows])[None]
    record = task.record(batch)
    record(logits)
    texts, right = record.predictions()
    assert texts == ["lives in Köln", "", "tale."]
    assert right == [["Köln", "in Köln"], [""], ["tale"]]
    collected = MetricSet([metrics["squad"]()], ANSWERS, CPU)
    collected.update(texts, right)
    assert collected.compute() == by_torchmetrics(texts, right)


def test_samples_that_fill_up_a_batch_and_outputs_that_are_nan():
    tokenizer = ByteTokenizer()
    task, batch = build_task(tokenizer), batch_of(tokenizer, False)
    batch.is_valid[1] = False
    record = task.record(batch)
    logits = torch.zeros(3, 40, 2)
    logits[2, 5, 1] = math.nan
    record(logits)
    texts, right = record.predictions()
    assert [len(texts), texts[1], right[1]] == [2, None, ["tale"]]
    collected = MetricSet([metrics["squad"]()], ANSWERS, CPU)
    collected.update(texts, right)
    assert math.isnan(collected.compute()["squad"])


def test_answers_that_are_no_texts_are_named():
    record = {**RECORDS[0], "answers": {"text": ["Köln", 3], "answer_start": [13, 1]}}
    with pytest.raises(ValueError, match='"answers" has a number, expected a text'):
        encode_question(record, ByteTokenizer())
    assert decode_answer_texts(b"") == [""]


METRIC = "[[evaluate.metrics]]\nname = 'squad'\n"


def load(tmp_path, text, task="question_answering"):
    path = tmp_path / "r.toml"
    path.write_text(
        f"[run]\nsteps = 1\n[task]\nname = '{task}'\n[[data.sources]]\nname = 'jsonl'\n"
        f"path = 'x.jsonl'\n{text}"
    )
    return load_recipe(path, []).recipe


def test_a_run_follows_one_of_both_numbers(tmp_path):
    recipe = load(tmp_path, f"{METRIC}[evaluate]\nmetric = 'squad/f1'\n")
    assert recipe.evaluate.is_maximized
    assert recipe.evaluate.number_key == "squad/f1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{METRIC}[evaluate]\nmetric = 'squad'", 'name one, such as "squad/f1"'),
        (f"{METRIC}[evaluate]\nmetric = 'squad/f2'", 'did you mean "squad/f1"'),
        ("[[evaluate.metrics]]\nname = 'accuracy'", '"accuracy" is no metric of answer outputs'),
    ],
)
def test_what_answers_have_no_number_for_is_named(text, message, tmp_path):
    with pytest.raises(RecipeError) as error:
        load(tmp_path, text)
    assert message in error.value.render()


RECIPE = Path(trainer.__file__).parent.resolve() / "recipes" / "question_answering_debug.toml"
SETTINGS = [
    "evaluate.steps=0",
    "evaluate.metrics=[{name='squad'}]",
    'precision.compute="fp32"',
    "data.validation_fraction=0.3",
    "data.micro_batch=4",
]


def numbers(plans, folder):
    """Return the numbers of a model with its initial weights under several plans."""
    found = []
    for plan in plans:
        settings = [*SETTINGS, f'data.cache_dir="{folder}"', *plan]
        recipe = load_recipe(RECIPE, settings, world=int(os.environ["WORLD_SIZE"])).recipe
        found.append(validate(assembled(recipe)))
    return found


@pytest.mark.matrix
def test_validations_have_the_same_answers_under_any_plan(tmp_path):
    ragged = ['data.packing="ragged"']
    plain, flat = run_ranks(1, numbers, [[], ragged], tmp_path, timeout=200)[0]
    assert plain["squad/f1"] > 1
    assert flat == pytest.approx(plain, rel=1e-3)
    plans = [[], ragged, ["parallel.tensor=2"]]
    plans.append(["parallel.pipeline=2", "parallel.pipelining.micro_batches=2"])
    for found in run_ranks(2, numbers, plans, tmp_path, timeout=200):
        for values in found:
            assert values == pytest.approx(plain, rel=1e-3)
