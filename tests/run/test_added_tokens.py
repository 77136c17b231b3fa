"""A run starts from weights of fewer tokens: rows are added where the recipe says how many."""

import os

import pytest
import torch

from tests.cases import quick
from tests.distributed import run_ranks
from tests.run.conftest import RECIPE
from trainer.cli import main as cli
from trainer.engine.assemble.assemble import assemble
from trainer.engine.core.errors import CheckpointError, RecipeError
from trainer.engine.inference.open import open_model
from trainer.engine.launch.environment import World
from trainer.engine.recipe.load import load_recipe

ROWS, GROWN = 260, 276


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def source(tmp_path_factory, request):
    """Return a finished run of 260 tokens with its Hugging Face folder."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "recipe.toml").write_text(RECIPE)
    settings = {
        "run.dir": folder, "model.n_layers": 2, "model.vocab_size": ROWS, "checkpoint.export": "hf",
        "precision.compute": "fp32", "model.tie_embeddings": str(request.param).lower(),
        "optimizer.lr": 0.1,
    }  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        cli.main(
            ["run", str(folder / "recipe.toml"), *(f"--set={k}={v}" for k, v in settings.items())]
        )
    assert stop.value.code == 0
    return folder / "r", request.param


def recipe_for(folder, source, **changes):
    path, is_tied = source
    file = folder / "recipe.toml"
    file.write_text(RECIPE)
    settings = {
        "run.dir": folder, "run.init_from": path, "model.n_layers": 2,
        "model.tie_embeddings": str(is_tied).lower(), "precision.compute": "fp32", **changes,
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return load_recipe(file, overrides, world=int(os.environ.get("WORLD_SIZE", 1))).recipe


def start_rank(folder, source, settings):
    rank = os.environ.get("RANK", "0")
    (folder / rank).mkdir()
    return weights_of(recipe_for(folder / rank, source, **settings))


def weights_of(recipe):
    """Return the whole weights of this rank's stages before the first step, and the notes."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    world = World(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    parts = assemble(recipe, world, torch.device("cpu"))
    weights = {
        name: getattr(weight, "full_tensor", lambda weight=weight: weight)().detach().numpy()
        for name, weight in parts.model.named_parameters()
    }
    return weights, parts.notes


def assert_grown(weights, source):
    """Compare weights with the source's and with the mean of the source's rows."""
    trained = dict(open_model(source, dtype="fp32").model.named_parameters())
    assert weights.keys() == trained.keys()
    for name, weight in weights.items():
        old, new = trained[name].detach(), torch.from_numpy(weight)
        if name in ("embed.weight", "head.proj.weight"):
            assert new.shape == (GROWN, old.shape[1])
            mean = old.double().mean(0).expand(GROWN - ROWS, -1)
            torch.testing.assert_close(new[ROWS:].double(), mean, rtol=1e-6, atol=1e-7)
            new = new[:ROWS]
        assert torch.equal(new, old), name


PLANS = {
    "one": (1, {}),
    "tensor": (2, {"parallel.tensor": 2, "parallel.shard": 1}),
    "shard": (2, {"parallel.shard": 2}),
    "pipeline": (2, {"parallel.pipeline": 2, "parallel.shard": 1}),
    "tensor and shard": (4, {"parallel.tensor": 2, "parallel.shard": 2}),
}


@pytest.mark.parametrize("folder", [".", "hf"])
@pytest.mark.parametrize("plan", quick(PLANS, "one", "pipeline", "tensor and shard"))
def test_rows_added_are_the_mean_of_the_others_under_each_plan(tmp_path, source, folder, plan):
    ranks, plan = PLANS[plan]
    start = source[0] / folder, source[1]
    if "parallel.pipeline" in plan and source[1]:
        pytest.skip("a tied embedding is held by two stages")
    settings = {"model.vocab_size": GROWN, "data.micro_batch": 2, **plan}
    found = run_ranks(ranks, start_rank, tmp_path, start, settings, timeout=120)
    # Each pipeline stage has its own weights.
    assert_grown({name: w for weights, _ in found for name, w in weights.items()}, source[0])
    note = f"rows added for tokens {ROWS} to {GROWN - 1}"
    assert all(any(note in each for each in notes) for _, notes in found)


@pytest.mark.parametrize("folder", [".", "hf"])
def test_rows_are_added_only_where_the_recipe_says_how_many(tmp_path, source, folder):
    start = source[0] / folder, source[1]
    with pytest.raises(CheckpointError) as refused:
        weights_of(recipe_for(tmp_path, start))  # 257 tokens, rounded up to 320 rows
    assert refused.value.hint.startswith(f"set model.vocab_size = {ROWS}; with a larger number")
    weights, _ = weights_of(recipe_for(tmp_path, start, **{"model.vocab_size": ROWS}))
    assert len(weights["embed.weight"]) == ROWS
    with pytest.raises(RecipeError) as small:
        weights_of(recipe_for(tmp_path, start, **{"model.vocab_size": 256}))
    assert "set model.vocab_size = 257" in small.value.problems[0].hint


def test_fewer_rows_than_the_source_has_are_refused(tmp_path, source):
    for folder in (".", "hf"):
        start = source[0] / folder, source[1]
        with pytest.raises(CheckpointError, match="260"):
            weights_of(recipe_for(tmp_path, start, **{"model.vocab_size": 258}))


def test_a_preference_run_grows_its_reference_alike(tmp_path, source):
    settings = {
        "model.vocab_size": GROWN, "task.name": "preference", "data.packing": "none",
        "data.micro_batch": 2,
    }  # fmt: skip
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 200)
    recipe = recipe_for(
        tmp_path, source,
        **settings, **{"data.sources": f'[{{name = "jsonl", path = "{pairs}"}}]'},
    )  # fmt: skip
    _, notes = weights_of(recipe)
    added = [note for note in notes if "rows added" in note]
    assert len(added) == 2
    assert added[1].startswith("frozen model: ")
