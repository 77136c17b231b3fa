"""Tasks of lm-evaluation-harness during training: what they measure, and what they leave alone."""

import json
import os
import sys

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

from tests.cases import also
from tests.train.processes import finish, rows, start, write_recipe
from tests.train.test_stops import stop_at
from trainer import load_recipe, open_model, train
from trainer.cli.main import main
from trainer.engine.core.errors import ExitCode, RecipeError
from trainer.engine.core.extras import install_command
from trainer.engine.recipe.load import load_overrides
from trainer.engine.report.page import write_page

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ROWS = [
    {"question": "ab" * (number % 5) + " is", "choices": ["it", str(number), "lost"], "answer": 1}
    for number in range(12)
]
SOURCE = """dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
TASKS = {
    "choose": """task: choose
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
""",
    "read": """task: read
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list:
  - metric: bits_per_byte
""",
    "write": """task: write
output_type: generate_until
doc_to_target: "{{question}}"
generation_kwargs:
  do_sample: true
  temperature: 1.0
  max_gen_toks: 3
metric_list:
  - metric: exact_match
""",
}


PLAIN = ["precision.compute=fp32", "schedule.warmup_steps=0"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a task of each kind."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text + SOURCE.format(data=data))
    return folder


def settings_of(tasks, *names):
    return [
        f"evaluate.harness.tasks={json.dumps(names)}",
        f"evaluate.harness.include_path={tasks}",
        *PLAIN,
    ]


@torch.no_grad()
def log_probability(model, context, continuation):
    ids = torch.tensor([[*context.encode(), *continuation.encode()]])
    log_probs = model(ids[:, :-1]).log_softmax(-1)
    each = log_probs[0].gather(1, ids[0, 1:].unsqueeze(1))
    return float(each[-len(continuation.encode()) :].sum())


def share_of_right_choices(model):
    right = 0
    for row in ROWS:
        scores = [
            log_probability(model, row["question"], f" {choice}") for choice in row["choices"]
        ]
        right += scores.index(max(scores)) == row["answer"]
    return right / len(ROWS)


def test_tasks_measure_the_average_and_leave_training_alone(tmp_path, tasks):
    settings = ["evaluate.interval=2", "ema.decay=0.5", "checkpoint.keep_best=true"]
    follow = ['evaluate.metric="choose/acc"', "evaluate.direction=max"]
    finished = {}
    for name, more in {
        "with": [*settings_of(tasks, *TASKS), *follow, "evaluate.harness.interval=3"],
        "without": PLAIN,
    }.items():
        recipe = write_recipe(tmp_path / name, steps=4)
        finished[name] = train(load_recipe(recipe, [*settings, *more]))
    expected, found = finished["without"].rows, finished["with"].rows

    def losses(table):
        return [(row["loss"], row.get("grad_norm")) for row in table if "loss" in row]

    assert losses(found) == losses(expected)
    scores = [row for row in found if row.get("split") == "tasks"]
    assert [row["step"] for row in scores] == [3, 4]
    folder = finished["with"].directory
    average = open_model(folder, weights="ema").model
    assert scores[-1]["choose/acc"] == pytest.approx(share_of_right_choices(average))
    assert {"read/bits_per_byte", "write/exact_match"} <= scores[-1].keys()
    best = json.loads((folder / "results.json").read_text())["best"]
    assert best["choose/acc"] == max(row["choose/acc"] for row in scores)
    assert best["step"] == max(
        row["step"] for row in scores if row["choose/acc"] == best["choose/acc"]
    )
    page = write_page([folder])
    assert "eval: choose/acc" in page
    assert "eval: read/bits_per_byte" in page


def command(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def test_what_tasks_lack_is_told_before_anything_is_trained(tmp_path, tasks, monkeypatch, capfd):
    recipe = write_recipe(tmp_path / "run", steps=4)
    settings = [f"--set={text}" for text in settings_of(tasks, "choose")]
    wrong = ['--set=evaluate.metric="choose/ac"', "--set=evaluate.direction=max"]
    assert command("run", recipe, *settings, *wrong) == ExitCode.RECIPE
    assert 'no task has the score choose/ac; did you mean "choose/acc"?' in capfd.readouterr().err
    long = f"--set=data.seq_len={len(' it') - 1}"
    assert command("run", recipe, *settings, long) == ExitCode.RECIPE
    assert "a continuation of 3 tokens; rows have 2" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert command("validate", recipe, *settings) == 0
    assert command("run", recipe, *settings) == ExitCode.ENVIRONMENT
    assert install_command("eval") in capfd.readouterr().err
    assert not (tmp_path / "run" / "run" / "recipe.toml").exists()


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["parallel.pipeline=2"], "stages of a pipeline take batches of one size"),
        (['task.name="sequence_classification"', 'task.labels=["a","b"]'], "has a head for"),
        (['evaluate.metric="choose/acc"'], "whether a higher choose/acc is better"),
        (['evaluate.splits=[{name="tasks",sources=[{name="python"}]}]'], 'named "tasks" already'),
    ],
)
def test_tasks_that_cannot_run_are_refused(settings, part):
    with pytest.raises(RecipeError) as caught:
        load_overrides(["run.steps=1", 'evaluate.harness.tasks=["choose"]', *settings])
    assert part in "\n".join(problem.message for problem in caught.value.problems)


PLANS = {
    "shard": (2, [], TASKS),
    "replicate": (2, ["parallel.replicate=2", "parallel.shard=1"], TASKS),
    "context, tensor": (4, ["parallel.context=2", "parallel.tensor=2"], ["choose", "read"]),
}


@pytest.mark.matrix
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_have_the_scores_of_one_process(tmp_path, tasks, plan):
    world, settings, names = PLANS[plan]
    found = []
    for ranks, more in ((1, []), (world, settings)):
        recipe = write_recipe(tmp_path / str(ranks), steps=3)
        common = [*settings_of(tasks, *names), "evaluate.interval=2", 'optimizer.name="sgd"']
        assert finish(start(recipe, ranks, overrides=[*common, *more])) == [0] * ranks
        scores = [row for row in rows(tmp_path / str(ranks), "eval") if row["split"] == "tasks"]
        assert [row.pop("step") for row in scores] == [2, 3]
        found.append([{key: row[key] for key in row if "/" in key} for row in scores])
    one, several = found
    assert len(one[0]) == len(names)
    assert several == [pytest.approx(row, rel=1e-6) for row in one]


@pytest.mark.matrix
def test_texts_are_not_generated_where_ranks_share_a_vocabulary(tmp_path, tasks):
    recipe = write_recipe(tmp_path / "run", steps=3)
    settings = [*settings_of(tasks, "write"), "parallel.tensor=2"]
    assert finish(start(recipe, 2, overrides=settings)) == [2, 2]
    errors = (tmp_path / "run" / "stderr.txt").read_text()
    assert "the task write generates text, which tensor and context ranks cannot" in errors


@pytest.mark.parametrize("world", also(1, 2))
def test_tasks_are_given_up_and_done_when_the_run_resumes(tmp_path, tasks, world):
    settings = [*settings_of(tasks, "choose"), "evaluate.interval=2", "checkpoint.interval=2"]
    recipe = write_recipe(tmp_path / "whole", steps=4)
    assert finish(start(recipe, world, overrides=settings)) == [0] * world
    recipe = write_recipe(tmp_path / "run", steps=4)
    assert stop_at(recipe, "train.tasks:x2:sleep2", world, world, settings) == [75] * world
    assert [row["split"] for row in rows(tmp_path / "run", "eval")] == ["validation"]
    assert finish(start(recipe, world, attempt=1, overrides=settings)) == [0] * world
    for kind, keys in {"train": ["loss"], "eval": ["split", "choose/acc"]}.items():
        one, two = (
            [[row.get(key) for key in keys] for row in rows(tmp_path / name, kind)]
            for name in ("whole", "run")
        )
        assert one == two
