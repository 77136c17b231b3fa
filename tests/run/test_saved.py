"""A run directory or a checkpoint in place of a recipe."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.run.conftest import losses
from trainer import assemble, load_recipe, open_saver
from trainer.engine.checkpoint.manifest import read_manifest, write_manifest
from trainer.engine.core.errors import RecipeError
from trainer.engine.recipe.saved import load_recipe_or_run


def test_a_run_directory_resumes_with_its_own_recipe(command, finished, tmp_path):
    assert command("run", "recipe.toml", "--set=run.steps=2", "--set=optimizer.lr=1e-3")[0] == 0
    shutil.move(tmp_path / "runs" / "r", tmp_path / "moved")
    code, shown, errors = command("run", tmp_path / "moved", "--set=run.steps=4")
    assert code == 0, errors
    assert "step-00000002 (step 2)" in shown
    assert re.search(r"model: llama3, [\d,]+ parameters", shown)
    assert f"run directory: {tmp_path / 'moved'}" in shown
    assert not (tmp_path / "runs" / "r").exists()
    assert 'name = "moved"' in (tmp_path / "moved" / "recipe.toml").read_text()
    assert "lr = 0.001" in (tmp_path / "moved" / "recipe.toml").read_text()
    # With the rate of the recipe's file it would give other losses.
    assert command("run", "recipe.toml", "--set=optimizer.lr=1e-3")[0] == 0
    assert losses(tmp_path / "moved") == losses(tmp_path / "runs" / "r") != losses(finished)


def test_a_checkpoint_resumes_from_itself_in_its_run(command, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "copy")
    checkpoint = run / "checkpoints" / "step-00000002"
    few = ("--set=checkpoint.keep=1", "--set=checkpoint.interval=1")
    code, shown, errors = command("run", checkpoint, *few)
    assert code == 0, errors
    assert f"resumed from {checkpoint} (step 2)" in shown
    assert losses(run) == losses(finished)
    # It stays beside the newest, and the same command finds it again.
    kept = sorted(path.name for path in checkpoint.parent.glob("step-*"))
    assert kept == ["step-00000002", "step-00000004"]
    code, shown, errors = command("run", checkpoint, *few)
    assert code == 0, errors
    assert f"{run}/checkpoints/step-00000004 is the last checkpoint" in shown


def test_a_run_that_resumes_from_an_earlier_step_leaves_the_later_checkpoints(
    command, finished, tmp_path
):
    run = shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    folder = run / "checkpoints"
    fault = {**os.environ, "TRAINER_FAULT": "train.step:step3:kill"}
    words = [sys.executable, "-P", "-m", "trainer", "run", str(folder / "step-00000002")]
    killed = subprocess.run(words, env=fault, capture_output=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name[:23] for path in folder.glob("abandoned-*")] == ["abandoned-step-00000004"]
    assert (folder / "latest").resolve().name == "step-00000002"
    # The next start resumes from step 2 again, not from the renamed checkpoint of step 4.
    code, shown, errors = command("run", run)
    assert code == 0, errors
    assert "step-00000002 (step 2)" in shown
    assert losses(run) == losses(finished)


def test_a_run_started_from_a_checkpoint_continues_when_the_same_command_runs_again(
    command, finished, tmp_path
):
    start = finished / "checkpoints" / "step-00000002"
    words = ["recipe.toml", "--set=run.name=next", f"--set=run.resume={start}"]
    words += ["--set=checkpoint.interval=1", "--set=checkpoint.mode=sync"]
    fault = {**os.environ, "TRAINER_FAULT": "train.step:step4:kill"}
    killed = subprocess.run(
        [sys.executable, "-P", "-m", "trainer", "run", *words],
        env=fault,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    code, shown, errors = command("run", *words)
    assert code == 0, errors
    assert f"resumed from {start} before, and continues from step-00000003" in shown + errors
    later = {step: loss for step, loss in losses(finished).items() if step > 2}
    assert losses(tmp_path / "runs" / "next") == later
    # Another recipe starts there again.
    words += ["--set=optimizer.lr=0.5", "--allow-changed=optimizer.lr"]
    code, shown, errors = command("run", *words)
    assert code == 0, errors
    assert f"resumed from {start} (step 2)" in shown
    assert losses(tmp_path / "runs" / "next") != later


def test_a_loop_of_ones_own_resumes_where_the_recipe_says(finished, tmp_path):
    start = finished / "checkpoints" / "step-00000002"
    run = shutil.copytree(finished, tmp_path / "r")

    def open_at(resume):
        changes = {"run.dir": str(tmp_path), "run.resume": resume}
        with open_saver(assemble(load_recipe(run / "recipe.toml", changes))) as (_, position):
            return position.step

    assert open_at("auto") == 4
    with pytest.raises(RecipeError, match="already has checkpoints"):
        open_at("never")
    assert open_at(str(start)) == 2


def test_a_checkpoint_alone_resumes_where_its_recipe_says(command, finished, tmp_path):
    shutil.copytree(finished / "checkpoints" / "step-00000002", tmp_path / "step-00000002")
    code, _, errors = command("run", "step-00000002", f"--set=run.dir={tmp_path / 'other'}")
    assert code == 0, errors
    later = {step: loss for step, loss in losses(finished).items() if step > 2}
    assert losses(tmp_path / "other" / "r") == later


def test_a_folder_that_is_no_run_is_refused(command, tmp_path):
    (tmp_path / "folder").mkdir()
    code, _, errors = command("run", "folder")
    assert (code, "error: folder is no run directory" in errors) == (2, True)


@pytest.mark.parametrize("of_checkpoint", [False, True])
def test_code_that_a_runs_folder_names_is_imported_only_on_the_users_word(
    command, finished, tmp_path, monkeypatch, of_checkpoint
):
    run = shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "foreign_code.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    where = run / "checkpoints" / "step-00000002" if of_checkpoint else run
    if of_checkpoint:
        manifest = read_manifest(where)
        manifest.recipe["plugins"]["modules"] = ["foreign_code"]
        (where / "manifest.json").unlink()
        write_manifest(where, manifest)
    else:
        text = (run / "recipe.toml").read_text()
        assert "modules = []" in text
        (run / "recipe.toml").write_text(text.replace("modules = []", 'modules = ["foreign_code"]'))
    code, _, errors = command("run", where, "--dry-run")
    assert code == 2
    assert 'the run would import "foreign_code", which is code' in errors
    assert "--plugin foreign_code" in errors
    assert not (tmp_path / "ran").exists()
    code, _, errors = command("run", where, "--dry-run", "--plugin", "foreign_code")
    assert (code, (tmp_path / "ran").exists()) == (0, True), errors
    sys.modules.pop("foreign_code")


def test_a_runs_own_recipe_does_not_say_where_code_lies(command, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    text = (run / "recipe.toml").read_text()
    for key in ("cache_dir", "include_path"):
        assert f'{key} = ""' in text
        text = text.replace(f'{key} = ""', f'{key} = "/elsewhere"')
    (run / "recipe.toml").write_text(text)
    own = load_recipe_or_run(run, [], 1, []).recipe
    assert (own.compile.cache_dir, own.evaluate.harness.include_path) == ("", "")
    chosen = load_recipe_or_run(run, ["compile.cache_dir=/mine"], 1, []).recipe
    assert chosen.compile.cache_dir == "/mine"


def test_experiment_and_lineage_are_parts_of_the_path(command, tmp_path):
    names = ("--set=run.experiment=widths", "--set=run.lineage=base", "--set=run.steps=2")
    assert command("run", "recipe.toml", *names)[0] == 0
    run = tmp_path / "runs" / "widths" / "base" / "r"
    assert losses(run).keys() == {1, 2}
    assert command("run", "recipe.toml", "--set=run.steps=2")[0] == 0
    code, shown, _ = command("status", "runs")
    assert (code, shown.count("finished")) == (0, 2)
    # Where it lies now counts, and names that still fit are kept.
    shutil.move(tmp_path / "runs", tmp_path / "archive")
    moved = tmp_path / "archive" / "widths" / "base" / "r"
    table = load_recipe_or_run(moved, [], 1, []).recipe.run
    assert (table.folder, table.experiment, table.lineage) == (moved, "widths", "base")
    renamed = shutil.move(moved, tmp_path / "archive" / "other")
    table = load_recipe_or_run(renamed, [], 1, []).recipe.run
    assert (table.folder, table.experiment) == (renamed, "")


@pytest.mark.parametrize("key", ["experiment", "lineage"])
def test_a_part_of_the_path_is_one_folder(command, key):
    code, _, errors = command("validate", "recipe.toml", f"--set=run.{key}=../up")
    assert code == 2
    assert f'run.{key}: "../up" cannot name the {key}\'s folder' in errors
