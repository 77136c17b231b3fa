"""Each task's recipe trains on one and on two ranks with equal losses, and resumes bit for bit."""

import json
import shutil
from pathlib import Path

import pytest

import trainer
from tests.cases import quick
from tests.commands import run_trainer
from trainer.engine.recipe.layers import read_layers
from trainer.engine.recipe.write import toml_value

RECIPES = Path(trainer.__file__).parent.resolve() / "recipes"
NAMES = [
    "distillation_debug",
    "language_modeling_debug",
    "masked_language_modeling_debug",
    "preference_debug",
    "question_answering_debug",
    "reward_debug",
    "sequence_classification_debug",
    "supervised_debug",
    "token_classification_debug",
]
SHORT = [
    "run.steps=6",
    "metrics.interval=1",
    "evaluate.interval=3",
    "evaluate.steps=2",
    "checkpoint.interval=3",
    "checkpoint.keep=9",
    "schedule.warmup_steps=2",
    'precision.compute="fp32"',
]


def run(folder, name, ranks, *settings, recipes=RECIPES):
    """Train a recipe, and return the rows of metrics.jsonl by kind and step."""
    words = [f"--set={setting}" for setting in (*SHORT, *settings)]
    done = run_trainer("run", recipes / f"{name}.toml", *words, folder=folder, ranks=ranks)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "runs").glob(f"**/{name}/metrics.jsonl")
    rows = map(json.loads, path.read_text().splitlines())
    return {(row["kind"], row["step"]): row for row in rows}


def teach(folder):
    """Train the teacher, and return the setting that names it."""
    # The first comment of the student's recipe names that of the teacher.
    run(folder, "llama3_debug", 1, "run.name=llama3_debug", "data.seq_len=64")
    (folder / "runs" / "llama3_debug").rename(folder / "teacher")
    return ["task.teacher=teacher"]


def numbers(rows, *keys):
    return {place: [row.get(key) for key in keys] for place, row in rows.items()}


def train_alike(folder, name, *settings, recipes=RECIPES, metrics=()):
    """Train on one rank, again from half of the steps, and on two ranks; return the first rows."""
    keys = ("loss", "total_loss", "grad_norm", *metrics)
    alone = run(folder, name, 1, *settings, recipes=recipes)
    (run_folder,) = (folder / "runs").glob(f"**/{name}")
    shutil.rmtree(run_folder / "checkpoints" / "step-00000006")  # as if killed after step 3
    again = run(folder, name, 1, *settings, recipes=recipes)
    assert numbers(again, *keys) == numbers(alone, *keys)
    shutil.rmtree(folder / "runs")
    for place, row in run(folder, name, 2, *settings, recipes=recipes).items():
        for key in keys:
            if key in row:
                assert row[key] == pytest.approx(alone[place][key], rel=1e-4), (place, key)
    return alone


@pytest.mark.parametrize("name", quick(NAMES, "reward_debug"))
def test_a_recipe_trains_on_one_and_two_ranks_alike_and_resumes(name, tmp_path):
    settings = teach(tmp_path) if name == "distillation_debug" else []
    alone = train_alike(tmp_path, name, *settings)
    assert [step for kind, step in alone if kind == "train"] == [1, 2, 3, 4, 5, 6]
    assert all(row["samples"] % step == 0 for (kind, step), row in alone.items() if kind == "train")


EVALUATIONS = [("eval", 3), ("eval", 6)]
PROBLEMS = {
    "multi": ('labels = ["food", "sport", "weather"]', "bce", "f1_score"),
    "regression": ("targets = 2", "huber", "mean_absolute_error"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("problem", PROBLEMS)
def test_texts_of_several_classes_and_of_numbers_train_alike(problem, tmp_path):
    topics = [json.loads(line) for line in (RECIPES / "data/topics.jsonl").open()]
    names = ["food", "sport", "weather"]
    for number, row in enumerate(topics):
        if problem == "multi":
            row["label"] = sorted({row["label"], names[number % 3]})[: number % 4]
        else:
            row["label"] = [len(row["text"]) / 10, None if number % 5 == 0 else number % 7]
    (tmp_path / "topics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in topics))
    keys, loss, metric = PROBLEMS[problem]
    recipe = f"""
        extends = ["{RECIPES}/base/llama3.toml"]
        [task]
        name = "sequence_classification"
        problem = "{problem}"
        {keys}
        [loss]
        name = "{loss}"
        [model]
        flavor = "debug"
        [data]
        seq_len = 96
        global_batch = 16
        micro_batch = 4
        validation_fraction = 0.2
        [[data.sources]]
        name = "jsonl"
        path = "topics.jsonl"
        [optimizer]
        lr = 1e-3
        [[evaluate.metrics]]
        name = "{metric}"
    """
    (tmp_path / f"{problem}.toml").write_text(recipe)
    alone = train_alike(tmp_path, problem, recipes=tmp_path, metrics=[metric])
    assert sorted(alone) == sorted([*(("train", step) for step in range(1, 7)), *EVALUATIONS])
    assert all(metric in alone[place] for place in EVALUATIONS)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    [
        "distillation_debug",
        "masked_language_modeling_debug",
        "preference_debug",
        "supervised_debug",
    ],
)
def test_training_splits_in_turn_work_with_every_task(name, tmp_path):
    settings = teach(tmp_path) if name == "distillation_debug" else []
    values = read_layers(RECIPES / f"{name}.toml").values["data"]
    sources = values["sources"]
    for source in sources:
        source |= {"path": str(RECIPES / source["path"])} if "path" in source else {}
    splits = [
        {"name": "a", "steps": 2, "sources": sources},
        {"name": "b", "steps": 1, "seq_len": values.get("seq_len", 256) + 32, "sources": sources},
        {"name": "c", "global_batch": 8, "micro_batch": 2, "steps": 1, "sources": sources},
    ]
    changes = f'extends = ["{RECIPES / name}.toml"]\n[data]\nsources = []\nworkers = 1\n'
    (tmp_path / f"{name}.toml").write_text(f"{changes}splits = {toml_value(splits)}\n")
    alone = run(tmp_path, name, 1, *settings, recipes=tmp_path)
    train = [row for (kind, _), row in alone.items() if kind == "train"]
    assert [row["split"] for row in train] == ["a", "a", "b", "c", "a", "a"]
    (folder,) = (tmp_path / "runs").glob(f"**/{name}")
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    keys = ("loss", "total_loss", "grad_norm", "split", "samples")
    again = run(tmp_path, name, 1, *settings, recipes=tmp_path)
    assert numbers(again, *keys) == numbers(alone, *keys)
    shutil.rmtree(tmp_path / "runs")
    for place, row in run(tmp_path, name, 2, *settings, recipes=tmp_path).items():
        for key in (key for key in keys[:3] if key in row):
            assert row[key] == pytest.approx(alone[place][key], rel=1e-4), (place, key)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_its_task_first_and_divides_over_eight_ranks(name):
    path = RECIPES / f"{name}.toml"
    tables = [line for line in path.read_text().splitlines() if line[:1] == "["]
    assert tables[0] == "[task]"
    # Not loaded: what a plugin registers would stay in this process.
    values = read_layers(path).values
    assert next(iter(values["task"])) == "name"
    assert values["data"]["global_batch"] % 8 == 0
    assert values["run"]["steps"]
