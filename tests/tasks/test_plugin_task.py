"""The task of docs/guide/plugins.md: on every plan that plugins support, resumed, and reported."""

import json
import shutil
from pathlib import Path

import pytest

import trainer
from tests.cases import also
from tests.commands import run_trainer
from tests.docs.blocks import blocks
from tests.report.pages import Page, plot

PAGE = Path(trainer.__file__).parent.resolve() / "docs/guide/plugins.md"
SETTINGS = ["run.steps=20", "metrics.interval=1", "evaluate.interval=10", "checkpoint.interval=10"]
SHARD, HYBRID = ["parallel.shard=2"], ["parallel.shard=2", "parallel.replicate=2"]
COMPILED = ["compile.enabled=true", "compile.backend=aot_eager"]


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the plugin and its recipe."""
    files = {block.words[0]: block.text for block in blocks(PAGE) if block.words}
    assert len(files["waves.py"].splitlines()) < 100
    for name in ("waves.py", "waves.toml"):
        (tmp_path / name).write_text(files[name])
    return tmp_path


def trainer_command(folder, *words, ranks=1):
    done = run_trainer(*words, folder=folder, path=[folder], ranks=ranks)
    assert done.returncode == 0, done.stderr


def train(folder, ranks=1, settings=()):
    words = [f"--set={setting}" for setting in (*SETTINGS, *settings)]
    trainer_command(folder, "run", "waves.toml", *words, ranks=ranks)
    rows = map(json.loads, (folder / "runs/waves/metrics.jsonl").read_text().splitlines())
    keys = ("loss", "grad_norm", "near")
    return {(row["kind"], row["step"]): [row.get(key, 0.0) for key in keys] for row in rows}


def resume(folder, ranks=1, settings=()):
    """Train again from the checkpoint of half of the steps."""
    shutil.rmtree(folder / "runs/waves/checkpoints/step-00000020")
    return train(folder, ranks, settings)


def test_a_whole_task_is_one_file_of_a_plugin(folder):
    alone = train(folder)
    assert len(alone) == 22
    trainer_command(folder, "report", "runs/waves")
    shown = plot(Page((folder / "runs/waves/report.html").read_text()), "Validation near")
    values = [alone["eval", step][2] for step in (10, 20)]
    (series,) = shown["series"]
    assert (series["x"][0], series["y"]) == ([10, 20], pytest.approx(values))
    assert resume(folder) == alone
    shutil.rmtree(folder / "runs")
    two = train(folder, ranks=2)
    for place, numbers in two.items():
        assert numbers == pytest.approx(alone[place], rel=1e-4), place
    assert resume(folder, ranks=2) == two


@pytest.mark.parametrize(
    ("ranks", "settings"),
    also((2, SHARD), (4, HYBRID), (1, COMPILED), (2, COMPILED), (2, SHARD + COMPILED)),
)
def test_its_module_has_the_losses_of_one_process_under_every_plan(ranks, settings, folder):
    # Four data ranks of eight samples are a batch.
    settings = ["data.micro_batch=8", *settings]
    alone = train(folder, settings=settings[:1])
    shutil.rmtree(folder / "runs")
    under_plan = train(folder, ranks, settings)
    assert under_plan.keys() == alone.keys()
    for place, numbers in under_plan.items():
        assert numbers == pytest.approx(alone[place], rel=1e-4), place
    assert resume(folder, ranks, settings) == under_plan
