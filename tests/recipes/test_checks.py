"""What only the whole recipe shows: one fault a case, at its key."""

import pytest

RUN = "[run]\nsteps = 100\n"

FAULTS = [
    # text, world, key, part of the message
    ("[data]\nseq_len = 8", None, "run.steps", "is missing: how long to train"),
    ("[run]\nsteps = 1\nepochs = 2.5", None, "run.epochs", "steps (1) and epochs (2.5)"),
    (RUN + 'name = "../up"', None, "run.name", '"../up" cannot name'),
    (RUN + 'name = ".hidden"', None, "run.name", "cannot name"),
    (RUN + 'resume = "atuo"', None, "run.resume", 'expected "auto", "never" or'),
    (RUN + "[data]\nseq_len = 9000", None, "data.seq_len", "model.max_seq_len (8192)"),
    (RUN + "[schedule]\nwarmup_steps = 101", None, "schedule.warmup_steps", "run.steps (100)"),
    (
        RUN + "[checkpoint]\ninterval = 10\nkeep_every = 25",
        None,
        "checkpoint.keep_every",
        "checkpoint.interval (10)",
    ),
    (
        RUN + "[checkpoint]\ninterval_epochs = 1\nkeep_every = 100",
        None,
        "checkpoint.keep_every",
        "interval_epochs",
    ),
    (
        RUN + '[schedule]\nname = "plateau"\n[evaluate]\ninterval = 0',
        None, "evaluate.interval", 'the schedule "plateau" follows evaluate.metric, which is not',
    ),
    (
        RUN + '[schedule]\nname = "plateau"\n[evaluate]\nmetric = "piqa/acc"\n'
        'direction = "max"\n[evaluate.harness]\ntasks = ["piqa"]\ninterval = 0',
        None, "evaluate.harness.interval", "not measured during training",
    ),
    (
        RUN + '[[data.sources]]\nname = "python"\nsplit = "validation"',
        None, "data.sources", "no source has",
    ),
    (
        RUN + '[optimizer]\nname = "sgd"\n[[optimizer.groups]]\nmatch = "*"\neps = 0.1',
        None, "optimizer.groups.0.eps", '"sgd" has no eps',
    ),
    (
        RUN + '[[optimizer.groups]]\nmatch = "re:(["',
        None, "optimizer.groups.0.match", "is no regular expression",
    ),
    (
        RUN + '[[optimizer.groups]]\nmatch = "re:a{5000}"',
        None, "optimizer.groups.0.match", "is no regular expression",
    ),
    (RUN + "[parallel]\nshard = 0", None, "parallel.shard", "got 0"),
    (RUN + "[parallel]\nreplicate = -1", None, "parallel.shard", "both -1"),
    (RUN + "[parallel]\nexpert = 2", None, "parallel.expert", "has no experts that ranks"),
    (
        RUN + "[parallel]\ntensor = 3\n[model]\nn_heads = 8\nn_kv_heads = 8",
        None, "parallel.tensor", "3 ranks cannot share model.n_kv_heads = 8",
    ),
    (
        RUN + '[parallel.fsdp]\nstrategy = "hybrid_shard"',
        None, "parallel.fsdp.strategy", "parallel.replicate, which is 1",
    ),
    (RUN + "[parallel]\nshard = 2", 4, "parallel", "degrees (2) is not the world size (4)"),
    (RUN + "[parallel]\nreplicate = 3", 4, "parallel", "degrees (3) does not divide"),
    (
        RUN + "[parallel]\nreplicate = 3\nshard = 1",
        None, "data.global_batch", "(16) does not divide over 3 data ranks",
    ),
    (RUN, 3, "data.global_batch", "(16) does not divide over 3 data ranks"),
    (
        RUN + "[data]\nmicro_batch = 3",
        2, "data.micro_batch", "8 sequences a rank (global_batch 16 over 2)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "world", "key", "message"), FAULTS)
def test_tables_that_do_not_fit_each_other_are_refused(problems, text, world, key, message):
    found = problems(text, world=world)
    assert any(each.key == key and message in each.message for each in found), found
    assert all(each.line for each in found)


@pytest.mark.parametrize(
    ("text", "world"),
    [
        ("", None),
        ("", 4),
        ("[parallel]\nreplicate = 2\nshard = 2", 4),
        ('[parallel]\nreplicate = 2\n[parallel.fsdp]\nstrategy = "hybrid_shard"', 8),
        ("[parallel]\nreplicate = -1\nshard = 1\nexpert = 1", 16),
        ("[data]\nmicro_batch = 100", 2),
        ("[schedule]\nwarmup_steps = 100", None),
        ('[[optimizer.groups]]\nmatch = "re:layers\\\\.\\\\d+"\nbetas = [0.1, 0.2]', None),
    ],
)
def test_what_fits_is_accepted(load, text, world):
    assert load(RUN + text, world=world).recipe.run.steps == 100


@pytest.mark.parametrize(
    ("stem", "name"),
    [("recipe", "recipe"), ("my run, v2", "my-run-v2"), ("...", "run"), ("größe", "größe")],
)
def test_a_run_is_named_by_its_file(write, stem, name):
    from trainer.engine.recipe.load import load_recipe

    assert load_recipe(write(f"{stem}.toml", "[run]\nsteps = 1\n")).recipe.run.name == name
