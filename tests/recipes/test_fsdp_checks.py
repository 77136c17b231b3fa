"""What FSDP cannot reshard or ignore is refused when a recipe is read, for any world size."""

import pytest

from tests.recipes.test_plan_checks import EXPERTS, MODEL, RUN, recipe_of

FAULTS = {
    "pieces that do not divide the ranks": (
        "[parallel]\nreplicate = 2\ncontext = 3\nfsdp = { reshard_after_forward = 5 }", 48,
        "parallel.fsdp.reshard_after_forward",
        "5 does not divide the 24 ranks that shard (shard x context)",
        "nearest that works: 4 and 6",
    ),
    "more pieces than ranks": (
        "[parallel.fsdp]\nreshard_after_forward = 16", 8,
        "parallel.fsdp.reshard_after_forward",
        "16 does not divide the 8 ranks that shard (shard x context)", "nearest that works: 8",
    ),
    "one piece": (
        "[parallel.fsdp]\nreshard_after_forward = 1", 8,
        "parallel.fsdp.reshard_after_forward", "one piece is the whole weight",
        'leave it out, and take "shard_grad_op"',
    ),
    "pieces of what stays": (
        '[parallel.fsdp]\nstrategy = "shard_grad_op"\nreshard_after_forward = 2', 8,
        "parallel.fsdp.reshard_after_forward",
        'parallel.fsdp.strategy = "shard_grad_op" does not reshard',
        'leave it out, or take "full_shard" or "hybrid_shard"',
    ),
    "pieces of stages": (
        "[parallel]\npipeline = 2\nfsdp = { reshard_after_forward = 2 }", 8,
        "parallel.fsdp.reshard_after_forward",
        "parallel.pipeline keeps weights gathered, which FSDP2 does not reshard",
        "leave it out, or keep parallel.pipeline = 1",
    ),
    "pieces of split weights": (
        "[parallel]\ntensor = 2\nfsdp = { reshard_after_forward = 2 }", 8,
        "parallel.fsdp.reshard_after_forward",
        "parallel.tensor splits weights as well, which FSDP2 does not reshard",
        "leave it out, or keep parallel.tensor = 1",
    ),
    "pieces of another dim": (
        ("[parallel]\nfsdp = { reshard_after_forward = 2 }\n"
        '[[parallel.rules]]\nmatch = ".*up.weight"\nplace = { shard = 1 }'), 4,
        "parallel.rules.0.place.shard", "FSDP2 reshards weights by dim 0 alone",
        "leave out reshard_after_forward",
    ),
    "ignored that matches nothing": (
        '[parallel]\npipeline = 2\nfsdp = { ignored = ["layers.0.mlp.up.weights"] }', 4,
        "parallel.fsdp.ignored.0", '"layers.0.mlp.up.weights" matches no parameter',
        'did you mean "layers.0.mlp.up.weight"?',
    ),
    "ignored by a broken expression": (
        EXPERTS + '[parallel]\nexpert = 2\nfsdp = { ignored = ["*.norm.weight", "re:*"] }', 2,
        "parallel.fsdp.ignored.1",
        '"*" is no regular expression: no argument for repetition operator: *', "",
    ),
    "broken rule beside experts": (
        EXPERTS + '[parallel]\nexpert = 2\n[[parallel.rules]]\nmatch = "*"\nplace = {}', 2,
        "parallel.rules.0.match",
        '"*" is no regular expression: no argument for repetition operator: *', "",
    ),
    "ignored experts": (
        EXPERTS + '[parallel]\nexpert = 2\nfsdp = { ignored = ["*.router.*", "*.experts.*"] }', 2,
        "parallel.fsdp.ignored.1",
        "layers.0.mlp.experts.gate_up is placed by parallel.expert, and FSDP shards it",
        "match other parameters",
    ),
    "ignored and sharded": (
        ('[parallel]\nfsdp = { ignored = ["*.up.*"] }\n'
        '[[parallel.rules]]\nmatch = ".*up.weight"\nplace = { shard = 1 }'), 4,
        "parallel.fsdp.ignored.0", "parallel.rules.0 shards layers.0.mlp.up.weight",
        "leave shard out of the rule, or the pattern here",
    ),
    "ignored where nothing is sharded": (
        '[parallel]\nfsdp = { ignored = ["*.up.*"], strategy = "no_shard" }', 4,
        "parallel.fsdp.ignored", 'parallel.fsdp.strategy = "no_shard" keeps all weights whole',
        'leave it out, or take "full_shard"',
    ),
    "ignored and offloaded": (
        '[parallel]\nfsdp = { ignored = ["*.up.*"], offload = true }', 4,
        "parallel.fsdp.ignored",
        "parallel.fsdp.offload moves pieces, and these weights would be whole",
        "leave out one of the two",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", list(FAULTS))
def test_it_is_refused_with_a_way_out(problems, fault):
    text, world, key, message, hint = FAULTS[fault]
    found = problems(recipe_of(text), world=world)
    assert (key, message, hint) in [(each.key, each.message, each.hint) for each in found]


@pytest.mark.parametrize("value", ["true", "false"])
def test_the_two_words_that_fsdp2_has_beside_a_number_are_strategies(problems, value):
    (problem,) = problems(f"{RUN}[parallel.fsdp]\nreshard_after_forward = {value}")
    strategy = "full_shard" if value == "true" else "shard_grad_op"
    assert problem.hint == f'write strategy = "{strategy}"'


@pytest.mark.parametrize("world", [None, 1, 4, 8])
def test_what_suits_the_ranks_is_accepted(load, world):
    """On one rank nothing is sharded, and both keys wait for more."""
    fsdp = '[parallel.fsdp]\nreshard_after_forward = 4\nignored = ["*norm*", "re:head"]\n'
    assert load(RUN + MODEL + fsdp, world=world).recipe.parallel.fsdp.reshard_after_forward == 4
