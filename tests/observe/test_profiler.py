"""`[profile]` says where a step's time goes, and changes nothing else."""

import gzip
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch.profiler import profile, record_function

import trainer
from tests.train.processes import complaints, finish, start
from trainer import assemble, load_recipe, train
from trainer.engine.observe.phases import PhaseTimer
from trainer.engine.observe.profiler import measure_peaks

ROOT = Path(trainer.__file__).parent
RECIPE = """
[run]
steps = 9
[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 64
[data]
seq_len = 64
global_batch = 8
micro_batch = 4
validation_fraction = 0.1
[[data.sources]]
name = "synthetic"
num_documents = 100
[precision]
compute = "fp32"
[evaluate]
interval = 100
[metrics]
interval = 1
[profile]
start = 3
steps = 4
"""
LAYERS, PROJECTIONS, MICRO_BATCHES = 2, 7, 2


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A run of the recipe above, and what it printed."""
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "recipe.toml").write_text(RECIPE)
    settings = {"run.dir": str(folder), "data.cache_dir": str(folder / "cache")}
    printed = io.StringIO()
    with redirect_stdout(printed):
        result = train(load_recipe(folder / "recipe.toml", settings))
    return result, printed.getvalue()


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    settings = {"run.dir": str(tmp_path), "run.name": "run"}
    return lambda **changes: load_recipe(path, settings | changes)


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def summary_of(result, name="summary.json"):
    return json.loads((result.directory / "profiles" / name).read_text())


def trace_of(result, name):
    with gzip.open(result.directory / "profiles" / name) as file:
        return json.load(file)["traceEvents"]


class Ticking:
    """A clock that goes on a little with each look, and by as much as a test says."""

    now = 0.0

    def mark(self):
        self.now += 1e-6
        return self.now

    def slow(self, function, seconds):
        def slowly(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return slowly


def test_time_is_found_in_the_phase_where_it_passes(recipe, monkeypatch):
    clock = Ticking()
    monkeypatch.setattr(PhaseTimer, "_mark", lambda self: clock.mark())
    parts = assemble(recipe())
    step, loader, head = parts.step, parts.loader, parts.step.parallel_model.model.head
    loader.step = clock.slow(loader.step, 0.03)
    head.forward = clock.slow(head.forward, 0.01)
    update = step.weight_update
    update.apply = clock.slow(update.apply, 0.05)
    update.finish = clock.slow(update.finish, 0.02)
    summary = summary_of(train(parts))
    phases = summary["phase_seconds"]
    expected = {"data": 0.03, "forward": 0.01 * MICRO_BATCHES, "optimizer": 0.05, "clip": 0.02}
    assert {name: phases[name] for name in expected} == pytest.approx(expected, rel=0.01)
    assert 0 < phases["backward"] < 1e-4
    assert sum(phases.values()) == pytest.approx(summary["step_seconds"])
    assert abs(phases["other"]) < 1e-4, "all else has a name"
    ordered = [seconds for name, seconds in phases.items() if name != "other"]
    assert ordered == sorted(ordered, reverse=True)


def test_operators_are_those_of_the_model(profiled):
    result, printed = profiled
    summary = summary_of(result)
    assert (summary["first_step"], summary["steps"], summary["rank"]) == (3, 4, 0)
    named = {each["name"]: each for each in summary["operators"]}
    # Each projection and the head: a product forward, two backward.
    assert named["aten::mm"]["calls"] == 3 * (LAYERS * PROJECTIONS + 1) * MICRO_BATCHES
    assert named["aten::mm"]["flops_per_second"] > 1e6
    total = sum(each["seconds"] for each in summary["operators"])
    assert 0 < total <= summary["step_seconds"]
    assert summary["peak_bytes"] == {}
    assert "profile of steps 3 to 6, rank 0" in printed
    assert printed.index("aten::mm") < printed.index("finished: 9 steps")


def test_the_trace_has_each_phase_of_each_step(profiled):
    result, _ = profiled
    events = trace_of(result, "step-3.rank-0.trace.json.gz")
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("forward") == names.count("backward") == 4 * MICRO_BATCHES
    assert names.count("optimizer") == 4
    files = sorted(path.name for path in (result.directory / "profiles").iterdir())
    assert files == ["step-3.rank-0.trace.json.gz", "summary.json"]


def test_memory_peaks_are_those_of_known_tensors():
    before = torch.empty(1000)
    with profile(profile_memory=True) as trace:
        with record_function("one"):
            kept = torch.empty(2000, dtype=torch.uint8)
            gone = torch.empty(50_000, dtype=torch.uint8)
            del gone
        with record_function("two"):
            more = torch.empty(300, dtype=torch.uint8)
    assert measure_peaks(trace, "cpu", {"one", "two"}) == {"one": 52_000, "two": 2300}
    assert (len(before), len(kept), len(more)) == (1000, 2000, 300)


def test_memory_is_recorded_if_asked_for(recipe):
    summary = summary_of(train(recipe(**{"profile.memory": True})))
    peak = summary["peak_bytes"]
    # Forward keeps at least each block's input for backward; clipping needs the gradients alone.
    assert peak["forward"] > LAYERS * 4 * 64 * 32 * 4
    assert peak["forward"] > peak["clip"]


def test_a_profiled_run_has_the_numbers_of_any_other(recipe, profiled):
    plain = train(recipe(**{"profile.steps": 0, "run.name": "plain"}))
    losses = [[row["loss"] for row in result.rows] for result in (profiled[0], plain)]
    assert losses[0] == losses[1]
    assert not (plain.directory / "profiles").exists()


@pytest.mark.matrix
def test_steps_count_from_where_the_attempt_starts(recipe):
    train(recipe(**{"run.steps": 5, "profile.steps": 0, "schedule.name": "constant"}))
    result = train(recipe(**{"run.steps": 9, "schedule.name": "constant"}))
    summary = summary_of(result)
    assert (summary["first_step"], summary["steps"]) == (8, 2), "what there was before the end"


def test_a_run_that_ends_before_says_so(recipe, capsys):
    result = train(recipe(**{"profile.start": 50}))
    assert result.finished
    assert "nothing was profiled" in capsys.readouterr().out


def test_ranks_that_are_not_there_are_warned_about(recipe, capsys):
    assert train(recipe(**{"profile.ranks": [3]})).finished
    assert "profile.ranks names no rank of this run" in capsys.readouterr().out


def test_a_profiler_that_fails_does_not_end_the_run(recipe, capsys, monkeypatch):
    def fail(*args):
        raise RuntimeError("no room")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    result = train(recipe())
    assert result.finished
    shown = capsys.readouterr().out
    assert "the profile is lost: RuntimeError: no room" in shown
    assert "nothing was profiled" not in shown
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("start", [1, 2])
def test_a_profiler_that_cannot_start_does_not_end_the_run(recipe, capsys, start):
    settings = recipe(**{"profile.start": start})
    folder = Path(settings.run.dir) / "run"
    folder.mkdir()
    (folder / "profiles").touch()
    assert train(settings).finished
    assert "the profile is lost: FileExistsError" in capsys.readouterr().out
    assert not torch.autograd._profiler_enabled(), "it would record the rest of the run"


@pytest.mark.matrix
def test_each_rank_asked_for_writes_its_own(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    overrides = [f"run.dir={tmp_path}", "run.name=run", "profile.ranks=[1, 7]"]
    assert finish(start(path, world=2, overrides=overrides)) == [0, 0], complaints(path)
    assert "Profiler" not in complaints(path)
    folder = tmp_path / "run/profiles"
    names = sorted(each.name for each in folder.iterdir())
    assert names == ["step-3.rank-1.trace.json.gz", "summary.json"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rank"] == 1
    names = " ".join(each["name"] for each in summary["operators"])
    assert "reduce_scatter" in names or "allgather" in names


def test_a_run_of_one_process_loads_no_profiler_and_no_compiler(tmp_path):
    """Loading torch's compiler and DTensor takes as long as loading torch."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    script = (
        "import sys; from trainer import load_recipe, train;"
        f"train(load_recipe({str(path)!r}, {{'profile.steps': 0, 'run.steps': 1}}));"
        "slow = {'trainer.engine.observe.profiler', 'torch._dynamo', 'torch.distributed.tensor'};"
        "print(*slow & sys.modules.keys())"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".dev")}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
