"""`from trainer import ...` does what the command line does."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import trainer
from tests.distributed import CONTEXT
from tests.docs.blocks import blocks
from tests.train.processes import finish
from trainer import (
    assemble,
    convert,
    evaluate,
    generate,
    joined_ranks,
    load_recipe,
    open_model,
    train,
)
from trainer.engine.core.errors import DataError, RecipeError, TrainerError
from trainer.engine.launch.child import rank_environment
from trainer.engine.launch.environment import ATTEMPT, STORE
from trainer.engine.observe.metrics import read

ROOT = Path(trainer.__file__).parent
GUIDE = {block.file_name: block.text for block in blocks(ROOT / "docs/guide/library.md")}


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "small.toml"
    path.write_text(GUIDE["small.toml"])
    return path


def run_example(name):
    """Return the variables of one of the guide's modules."""
    found = {"__name__": "__main__"}
    exec(compile(GUIDE[name], name, "exec"), found)
    return found


def train_losses(result, kind="train"):
    return [row["loss"] for row in result.rows if row["kind"] == kind]


def test_the_guides_own_loop_has_the_losses_of_a_run_bit_for_bit(recipe_file):
    assert len(GUIDE["own_loop.py"].splitlines()) < 40
    example = run_example("own_loop.py")
    result = train(load_recipe(recipe_file))
    assert result.finished
    assert example["losses"] == train_losses(result)
    assert example["validation"] == train_losses(result, "eval")
    assert len(example["losses"]) == 20
    trained, own = (
        assemble(load_recipe(recipe_file, {"run.init_from": str(folder)})).model.parameters()
        for folder in (result.directory, Path("runs/own-loop"))
    )
    assert all(map(torch.equal, trained, own))
    shutil.rmtree("runs/own-loop/checkpoints/step-00000020")  # as if killed after step 10
    again = run_example("own_loop.py")
    assert again["losses"] == example["losses"][10:]
    assert again["validation"] == example["validation"][1:]


WHOLE = {"evaluate.interval": 20, "evaluate.steps": 1000}  # all of the validation split


def test_a_trained_model_is_evaluated_sampled_and_converted(recipe_file, capsys):
    result = train(load_recipe(recipe_file, {"run.name": "from-python", **WHOLE}))
    capsys.readouterr()
    example = run_example("use_it.py")
    loss, text = train_losses(result, "eval")[-1], capsys.readouterr().out
    assert evaluate(example["opened"])["token"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert text.startswith(str(evaluate(example["opened"])["byte"]["bits"]))
    again = generate(open_model("from-python-hf"), ["import "], max_new_tokens=8, temperature=0.0)
    assert len(again) == 1
    corpus = recipe_file.with_name("corpus.txt")
    corpus.write_text("def f(x): return x\n" * 9)
    assert evaluate(example["opened"], corpus)["texts"] == 1
    with pytest.raises(RecipeError, match="no conversion is named 'dcp2hff'"):
        convert("dcp2hff", "runs/from-python", "other")


def test_the_guides_other_modules_run(recipe_file, capsys):
    assert run_example("train_it.py")["result"].rows[-1]["kind"] == "eval"
    run_example("join_ranks.py")
    assert "rank 0 of 1 on" in capsys.readouterr().out


def test_overrides_are_a_mapping_a_tree_or_texts(recipe_file):
    texts = ["run.steps=5", "run.name=other", "optimizer.lr=1e-5"]
    expected = load_recipe(recipe_file, texts)
    assert expected.run.steps == 5
    flat = {"run.steps": 5, "run.name": "other", "optimizer.lr": 1e-5}
    nested = {"run": {"steps": 5, "name": "other"}, "optimizer": {"lr": 1e-5}}
    assert load_recipe(recipe_file, flat) == expected
    assert load_recipe(recipe_file, nested) == expected
    odd = {"run.dir": 'a "b"\\ü', "optimizer.betas": [0.5, 0.75], "run.deterministic": True}
    recipe = load_recipe(recipe_file, odd)
    assert recipe.run.dir == 'a "b"\\ü'
    assert recipe.optimizer.betas == (0.5, 0.75)
    assert recipe.run.deterministic is True


def test_what_is_wrong_is_raised_and_nothing_exits(recipe_file):
    with pytest.raises(RecipeError, match="stepz") as caught:
        load_recipe(recipe_file, {"run.stepz": 5, "optimizer.lr": -1.0})
    assert len(caught.value.problems) == 2
    recipe = load_recipe(recipe_file, {"data.sources": [{"name": "text", "path": "nosuch.txt"}]})
    with pytest.raises(DataError, match=r"nosuch\.txt"):
        train(recipe)
    with pytest.raises(AttributeError, match="trane"):
        _ = trainer.trane


def test_training_again_resumes_and_parts_can_be_trained(recipe_file):
    whole = train(load_recipe(recipe_file, {"run.name": "whole"}))
    part = {"run.name": "part", "checkpoint.interval": 8}
    recipe = load_recipe(recipe_file, part)
    stopped = []

    parts = assemble(recipe)
    update = parts.step.update

    def stop_after_ten(lr_factor, is_bad):
        stopped.append(1)
        if len(stopped) == 11:
            raise KeyboardInterrupt
        update(lr_factor, is_bad)

    parts.step.update = stop_after_ten
    with pytest.raises(KeyboardInterrupt):
        train(parts)
    resumed = train(recipe)
    assert train_losses(resumed) == train_losses(whole)


def test_a_thread_can_train(recipe_file):
    results = []
    recipe = load_recipe(recipe_file, {"run.steps": 2})
    thread = threading.Thread(target=lambda: results.append(train(recipe)))
    thread.start()
    thread.join(60)
    assert [result.finished for result in results] == [True]


def test_importing_loads_no_torch_until_it_is_needed(recipe_file):
    script = (
        "import sys, trainer; quick = len([m for m in sys.modules if m.startswith('trainer.')]);"
        "from trainer import assemble, load_recipe, train;"
        f"load_recipe({str(recipe_file)!r});"
        "print(quick, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".dev")}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "False", "False"], done.stderr


def train_as_a_rank(environment, folder):
    """Train on a rank by a loop of its own and by `train`; write the losses of the former."""
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    recipe = load_recipe("small.toml", {"run.name": "two", "run.steps": 6})
    with pytest.raises(TrainerError) as caught:
        assemble(recipe)
    assert "joined_ranks" in caught.value.hint
    losses = []
    with joined_ranks(recipe):
        parts = assemble(recipe)
        batches = parts.loader.steps(0)
        for number in range(6):
            gradients = parts.step.accumulate(next(batches))
            parts.step.update(recipe.schedule.lr_factor(number, 6))
            parts.step.clear()
            losses.append(gradients.loss.item())
        train(recipe)
    Path(f"losses-{environment['RANK']}.json").write_text(json.dumps(losses))


def test_two_ranks_are_joined_once_for_assembling_and_training(recipe_file):
    folder, processes = recipe_file.parent, []
    for rank in range(2):
        environment = rank_environment(os.environ, rank, 2)
        environment |= {STORE: str(folder / "store"), ATTEMPT: "0"}
        processes.append(CONTEXT.Process(target=train_as_a_rank, args=(environment, folder)))
        processes[-1].start()
    assert finish(processes, 120) == [0, 0]
    own = json.loads((folder / "losses-1.json").read_text())
    rows = read(folder / "runs/two/metrics.jsonl")
    assert own == [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(own) == 6


def test_assembling_on_a_rank_that_has_not_joined_says_how(recipe_file, monkeypatch):
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv(STORE, "nowhere")
    monkeypatch.setenv(ATTEMPT, "0")
    with pytest.raises(TrainerError, match="rank 1 of 2 has not joined"):
        assemble(load_recipe(recipe_file))
