"""What a resumed run may change, and what it must be allowed."""

import json

import pytest

from trainer.engine.core.errors import RecipeError
from trainer.engine.recipe.changes import compare, require_unchanged

BASE = "[run]\nsteps = 100\n"


@pytest.fixture
def dump(load):
    """Return a recipe as a checkpoint's manifest holds it."""
    return lambda *overrides: json.loads(json.dumps(load(BASE, *overrides).recipe.model_dump()))


@pytest.mark.parametrize(
    "override",
    [
        "run.dir=elsewhere", "run.name=other", "run.gc_interval=0", "run.resume=never",
        "run.init_from=weights", "data.workers=3", "data.micro_batch=2", "data.cache_dir=x",
        "parallel.replicate=2", "parallel.fsdp.strategy=no_shard", "compile.enabled=true",
        "kernels.attention=sdpa", "memory.recompute=full", "checkpoint.interval=7",
        "evaluate.steps=3", "metrics.interval=1", "resilience.non_finite=skip",
        "metrics.trackers=[{name='tensorboard'}]",
    ],
)  # fmt: skip
def test_what_cannot_change_the_training_is_free(dump, override):
    assert compare(dump(), dump(override)) == []


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("run.seed=3", ("run.seed", 0, 3)),
        ("run.steps=200", ("run.steps", 100, 200)),
        ("model.dim=128", ("model.dim", 64, 128)),
        ("data.seq_len=64", ("data.seq_len", 256, 64)),
        ("data.global_batch=32", ("data.global_batch", 16, 32)),
        ("data.sources.0.max_bytes=9", ("data.sources.0.max_bytes", 0, 9)),
        ("optimizer.betas=[0.9, 0.99]", ("optimizer.betas", [0.9, 0.95], [0.9, 0.99])),
        ("optimizer.groups=[{match='*'}]", ("optimizer.groups", [], None)),
        ("schedule.name=cosine", ("schedule.name", "wsd", "cosine")),
        ("precision.compute=fp32", ("precision.compute", "auto", "fp32")),
    ],
)
def test_what_changes_the_training_is_listed_until_it_is_allowed(dump, override, change):
    old, new = dump(), dump(override)
    assert change in compare(old, new)
    keys = [key for key, _, _ in compare(old, new)]
    assert compare(old, new, keys) == []
    assert compare(old, new, {change[0].split(".")[0]}) == []
    assert compare(old, new, {"tokenizer"}) == compare(old, new)


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_a_schedule_that_does_not_know_the_end_lets_a_run_grow(dump, schedule):
    name = f"schedule.name={schedule}"
    assert compare(dump(name), dump(name, "run.steps=200")) == []


def test_what_the_score_is_may_not_change_under_a_schedule_that_follows_it(dump):
    plateau = "schedule.name=plateau"
    for override in ("evaluate.interval=7", "evaluate.steps=3", "evaluate.metric=perplexity"):
        key = override.partition("=")[0]
        assert [each for each, *_ in compare(dump(plateau), dump(plateau, override))] == [key]
        assert compare(dump(plateau), dump(plateau, override), ["evaluate"]) == []
    assert compare(dump(plateau), dump(plateau, "evaluate.patience=3")) == []


def test_a_key_that_an_older_checkpoint_lacks_had_its_default(dump):
    old = dump()
    del old["data"]["validation_fraction"], old["tokenizer"]
    assert compare(old, dump()) == []
    assert compare(old, dump("data.validation_fraction=0.5")) == [
        ("data.validation_fraction", 0.01, 0.5)
    ]


def test_a_key_that_is_no_more_is_listed(dump):
    old = dump()
    old["data"]["old_key"] = 3
    assert compare(old, dump()) == [("data.old_key", 3, None)]


def test_the_refusal_lists_old_and_new_and_the_word_that_allows_it(dump):
    with pytest.raises(RecipeError) as caught:
        require_unchanged(dump(), dump("run.seed=3", "data.seq_len=64"))
    assert caught.value.render() == (
        "error: data.seq_len: is 64, and 256 in the checkpoint\n"
        "error: run.seed: is 3, and 0 in the checkpoint\n"
        "error: this recipe differs from the checkpoint's in keys that change training; "
        "to train it as a new run, add --set run.name=recipe-2; "
        "to resume anyway, add --allow-changed data.seq_len,run.seed"
    )


def test_a_misspelled_allowance_is_refused(dump):
    with pytest.raises(RecipeError, match="no recipe has the key") as caught:
        compare(dump(), dump(), ["run.sed"])
    assert caught.value.problems[0].hint == 'did you mean "run.seed"?'


@pytest.mark.parametrize(
    ("override", "is_possible"),
    [
        ("optimizer.lr=0.5", True),
        ("model.max_seq_len=512", True),
        ("model.dim=128", False),
        ("model.n_layers=3", False),
        ("optimizer.name=sgd", False),
        ("lora.rank=4", False),
    ],
)
def test_a_changed_key_offers_a_new_run_first_and_a_resume_only_where_it_can_work(
    dump, override, is_possible, tmp_path
):
    (tmp_path / "run-2").mkdir()
    here = [f"run.dir={tmp_path}", "run.name=run"]
    with pytest.raises(RecipeError) as caught:
        require_unchanged(dump(*here), dump(*here, override, "run.seed=5"), ["run.seed"])
    hint = caught.value.problems[-1].hint
    assert hint.startswith("to train it as a new run, add --set run.name=run-3; ")
    key = override.partition("=")[0]
    if is_possible:
        assert f"--allow-changed run.seed,{key}" in hint
    assert ("--allow-changed" in hint) == is_possible
