"""`trainer plan`: what it prints, what it refuses, and the plans that it finds."""

import json
from math import prod
from pathlib import Path

import pytest

from tests.commands import run_in_process
from tests.report.test_chromium import visit
from trainer.engine.estimate.groups import ring_bytes
from trainer.engine.estimate.plan import plan_pipeline
from trainer.engine.estimate.search import search, variants
from trainer.engine.estimate.step_sizes import StepSizes
from trainer.engine.parallel.mesh import Degrees
from trainer.engine.parallel.tables import Pipelining
from trainer.engine.recipe.checks.checks import check
from trainer.engine.recipe.load import load_recipe
from trainer.engine.recipe.schema import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = """
[run]
steps = 20
[model]
n_layers = 2
vocab_size = 320
[data]
seq_len = 64
global_batch = 4
micro_batch = 1
[parallel]
pipeline = 2
shard = -1
tensor = 2
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def command(capsys):
    """Run a command line in this process; return exit code, output and errors."""

    def command(*arguments):
        return run_in_process(capsys, *arguments)

    return command


def test_a_plan_counts_both_answers_of_a_pair_and_ragged_rows_in_full(command):
    pairs = RECIPES / "reward_debug.toml"
    code, out, err = command("plan", pairs, "--json", "--set", "data.packing=ragged")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert plan["needs"][0]["model_flops"] == plan["formula_flops"]
    assert plan["row_lengths"] == "rows are ragged: each is counted as 96 tokens, an upper bound"


def test_a_plan_says_who_holds_computes_and_sends_what(command, recipe, tmp_path):
    page = tmp_path / "page.html"
    options = ("--world", 8, "--gpus-per-node", 4, "--html", page, "--json")
    code, out, err = command("plan", recipe, "--set", "run.name=a.b", *options)
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert plan["coordinates"]["6"] == {
        "pipeline": 1, "replicate": 0, "shard": 1, "context": 0, "tensor": 0, "expert": 0,
        "expert_tensor": 0,
    }  # fmt: skip
    links = {" x ".join(group["axes"]): group["link"] for group in plan["groups"]}
    assert links["tensor"] == links["shard"] == "inside nodes"
    assert links["pipeline"] == links["pipeline x shard x tensor"] == "across nodes"
    counted = sum(needs["model_flops"] for needs in plan["needs"]) * 4
    assert counted == plan["formula_flops"], "operations counted, and the formula"
    stored = {each["name"]: each for each in plan["placements"]}
    assert stored["layers.0-1.attention.q.weight"]["local_shape"] == [16, 64]
    assert stored["layers.0-1.mlp.down.weight"]["placed"]["place"] == {"shard": 0, "tensor": 1}
    for needs in plan["needs"]:
        # AdamW keeps two numbers a weight, and a step count for each tensor.
        assert 0 <= needs["optimizer_bytes"] - 2 * needs["weight_bytes"] < 200
    sent = {
        flow["kind"]: flow for flow in plan["needs"][0]["flows"] if flow["axes"] == ["pipeline"]
    }
    # Two micro batches of half a sequence (its tensor rank's), 64 wide, in bf16.
    assert sent["send to next"]["message_bytes"] == 2 * 32 * 64 * 2
    assert sent["send to next"]["link"] == "across nodes"
    assert plan["pipeline"]["bubble_fraction"] > 0
    text = page.read_text("utf-8")
    assert "<script" not in text
    assert visit(page, tmp_path / "profile", "--dump-dom").count("<svg") == 6


def test_a_plan_is_printed_in_tables(command, recipe):
    code, out, err = command("plan", recipe, "--set", "parallel.pipeline=1", "--world", 2)
    assert (code, err) == (0, "")
    assert "Mesh: 2 ranks = tensor 2; 8 ranks a node" in out
    assert 'style "vocabulary"' in out
    assert "Pipeline" not in out
    rows = [line.split() for line in out.splitlines()]
    assert [row[1:6] for row in rows if row[1:3] == ["tensor", "all-gather"]] == [
        ["tensor", "all-gather", "2", "inside", "nodes"]
    ]


def test_what_cannot_be_planned_is_refused(command, recipe):
    code, _, err = command("plan", recipe, "--world", 7)
    assert code == 2
    assert f"{recipe}:" in err or "parallel" in err
    assert "world size (7)" in err
    code, _, err = command("plan", recipe, "--search", "--gpu", "h20", "--world", 4)
    assert code == 2
    assert "h20: not known" in err
    assert "h200" in err
    code, _, err = command("plan", recipe, "--gpu", "h200", "--cpu", "--world", 4)
    assert code == 2
    assert "--gpu with --cpu" in err


def test_a_ring_sends_what_its_steps_do():
    for ranks in (2, 3, 8):
        piece = 6
        steps = [piece] * (ranks - 1)
        assert ring_bytes("all-gather", piece, ranks) == sum(steps)
        assert ring_bytes("reduce-scatter", piece * ranks, ranks) == sum(steps)
        assert ring_bytes("all-reduce", piece * ranks, ranks) == 2 * sum(steps)
        assert ring_bytes("send to next", piece, ranks) == piece
    assert ring_bytes("all-reduce", 4, 3) == 6, "rounded up"


def test_the_fastest_plan_comes_first_with_its_simulated_peak(recipe, monkeypatch):
    monkeypatch.setattr("trainer.engine.estimate.search.SIMULATED", 1)
    loaded = load_recipe(recipe, []).recipe
    found = search(loaded, 2, "h200", 2**37, 8)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert {prod(vars(each.degrees).values()) for each in found} == {2}
    assert [each.simulated_bytes is None for each in found[:2]] == [False, True]
    assert found[0].simulated_bytes > 0


def test_all_plans_that_validation_accepts_are_searched(recipe):
    loaded = load_recipe(recipe, []).recipe
    loaded = loaded.model_copy(update={"data": loaded.data.model_copy(update={"seq_len": 4096})})
    found = list(variants(loaded, 4, 8))
    assert all(not list(check(one, 4)) for one, _ in found)
    degrees = {degrees for _, degrees in found}
    assert Degrees(pipeline=4) not in degrees, "two blocks make no four stages"
    assert {Degrees(shard=4), Degrees(pipeline=2, tensor=2), Degrees(context=4)} <= degrees


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_plans_of_models_with_experts_are_searched(family):
    loaded = load_recipe(RECIPES / f"{family}_debug.toml", []).recipe
    sizes = StepSizes.of(loaded)
    assert sizes.saved > 0
    assert Degrees(tensor=4) in {degrees for _, degrees in variants(loaded, 4, 8)}


def test_a_search_says_when_nothing_fits(recipe):
    loaded = load_recipe(recipe, []).recipe
    with pytest.raises(Exception, match="no plan of 4 ranks fits h100: the least takes"):
        search(loaded, 4, "h100", 1000, 8)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_last_stage_shows_its_blocks_of_further_predictions(depth):
    model = {"name": "deepseek_v3", "n_layers": 4, "mtp_depth": depth}
    config = Recipe.model_validate({"run": {"steps": 1}, "model": model}).model.with_vocab(258)
    stages = plan_pipeline(Pipelining(layers_per_stage=[2, 2]), 2, config, 2).stages
    assert [stage.blocks for stage in stages] == [(0, 1), (2, 3 + depth)]


@pytest.mark.parametrize("depth", [0, 2])
def test_formulas_count_all_weights_of_further_predictions_once(depth):
    model = {"name": "deepseek_v3", "n_layers": 4, "mtp_depth": depth}
    sizes = StepSizes.of(Recipe.model_validate({"run": {"steps": 1}, "model": model}))
    expected = sum(map(prod, sizes.config.parameter_shapes().values()))
    held = sizes.held(4 + depth, Degrees(1, 1, 1, 1, 1))
    assert sum(held) == pytest.approx(expected, rel=1e-4)
