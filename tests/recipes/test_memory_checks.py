"""What saves memory and cannot work is refused when the recipe is read, with a way out."""

import pytest

from trainer.engine.parallel.strategies import strategies
from trainer.engine.parallel.tables import FSDP
from trainer.engine.recipe.checks.replaced_words import _KEYS, _STRATEGIES

RUN = "[run]\nsteps = 1\n"
IN_BACKWARD = "[memory]\noptimizer_in_backward = true\n"
KEY = "memory.optimizer_in_backward"
UNCLIPPED = "[optimizer]\nclip_norm = 0.0\n"
ONE = "[data]\nglobal_batch = 8\nmicro_batch = 8\n"

FAULTS = {
    "budget without a compiler": (
        '[memory]\nrecompute = "budget"', 1,
        "memory.recompute", 'it is torch.compile that keeps to a "budget"',
        'set compile.enabled = true, or take "selective"',
    ),
    "budget without a partitioner": (
        '[memory]\nrecompute = "budget"\n[compile]\nenabled = true\nbackend = "eager"', 1,
        "memory.recompute", 'the backend "eager" does not choose what is kept',
        'take compile.backend = "inductor"',
    ),
    "an operation misspelt": (
        '[memory]\nrecompute_keep = ["mm", "atention"]', 1,
        "memory.recompute_keep.1", 'no operations are called "atention"',
        'did you mean "attention"?',
    ),
    "an operation unheard of": (
        '[memory]\nrecompute_keep = ["zzz"]', 1,
        "memory.recompute_keep.0", 'no operations are called "zzz"',
        ("known: mm, bmm, attention, norm, all_gather, reduce_scatter, collectives, half_mm, or as "
        "aten.mm.default"),
    ),
    "clipping": (
        IN_BACKWARD + ONE, 1, KEY,
        "weights change before the norm of all gradients is known, by which they are clipped",
        "set optimizer.clip_norm = 0",
    ),
    "skipping": (
        IN_BACKWARD + ONE + UNCLIPPED + '[resilience]\nnon_finite = "skip"', 1, KEY,
        'a step that has changed weights cannot be skipped (resilience.non_finite = "skip")',
        'take "rollback" or "stop"',
    ),
    "loss scale": (
        IN_BACKWARD + ONE + UNCLIPPED + '[precision]\ncompute = "fp16"', 1, KEY,
        "steps that overflow in fp16 are skipped", 'take precision.compute = "bf16"',
    ),
    "pipeline": (
        IN_BACKWARD + UNCLIPPED + "[data]\nmicro_batch = 1\n[parallel]\npipeline = 2", 2, KEY,
        "a stage holds all gradients before its last backward pass, so that nothing is saved",
        "keep parallel.pipeline = 1",
    ),
    "copies": (
        IN_BACKWARD + ONE + UNCLIPPED + "[parallel]\nreplicate = 2\nshard = 1", 2, KEY,
        "copies (DDP) hold whole gradients until all are reduced", "raise parallel.shard",
    ),
    "copies by name": (
        IN_BACKWARD + ONE + UNCLIPPED + '[parallel.fsdp]\nstrategy = "no_shard"', 2, KEY,
        "copies (DDP) hold whole gradients until all are reduced", 'take "full_shard"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", list(FAULTS))
def test_it_is_refused_with_a_way_out(problems, fault):
    text, world, key, message, hint = FAULTS[fault]
    found = problems(RUN + text, world=world)
    assert [(each.key, each.message, each.hint) for each in found] == [(key, message, hint)]


@pytest.mark.parametrize(
    ("parallel", "world"),
    [
        ("", 1),
        ("shard = 2", 2),
        ("tensor = 2", 2),
        ("context = 2", 2),
        ("tensor = 2\nreplicate = 2\nshard = 1", 4),
        ("shard = 1\n[parallel.fsdp]\noffload = true", 1),
        ('replicate = 2\nshard = 2\n[parallel.fsdp]\nstrategy = "hybrid_shard"', 4),
    ],
)
@pytest.mark.parametrize("batch", [ONE, "[data]\nglobal_batch = 16\nmicro_batch = 2\n"])
def test_where_the_optimizer_can_run_in_the_backward_pass(load, parallel, world, batch):
    load(RUN + IN_BACKWARD + batch + UNCLIPPED + f"[parallel]\n{parallel}", world=world)


FSDP1 = {
    'sharding_strategy = "FULL_SHARD"': 'write strategy = "full_shard"',
    'sharding_strategy = "ShardingStrategy._HYBRID_SHARD_ZERO2"': (
        'write strategy = "hybrid_shard_zero2"'
    ),
    'strategy = "SHARD_GRAD_OP"': 'write strategy = "shard_grad_op"',
    'backward_prefetch = "BACKWARD_POST"': (
        "leave prefetch out: the next block is always gathered early"
    ),
    'prefetch = "BACKWARD_PRE"': (
        "leave prefetch out, or write how many blocks are gathered ahead"
    ),
    "forward_prefetch = true": "write prefetch: how many blocks ahead, in forward and backward",
    "cpu_offload = true": "write offload = true",
    'state_dict_type = "LOCAL_STATE_DICT"': (
        "leave it out: checkpoints hold shards and load under any plan"
    ),
    'state_dict_type = "FULL_STATE_DICT"': (
        "for whole weights see checkpoint.export and trainer convert-ckpt"
    ),
    "limit_all_gathers = true": "leave it out: memory needs no limit where prefetch is small",
    "use_orig_params = true": "leave it out: parameters always keep their names and shapes",
}


@pytest.mark.parametrize("line", list(FSDP1))
def test_what_the_first_fsdp_had_is_answered_with_what_to_use(problems, line):
    (problem,) = problems(f"{RUN}[parallel.fsdp]\n{line}")
    assert problem.key == "parallel.fsdp." + line.split(" ")[0]
    assert problem.hint == f"FSDP1's word: {FSDP1[line]}"


def test_other_mistakes_are_answered_as_anywhere(problems):
    hints = [
        problems(f"{RUN}[parallel.fsdp]\n{line}")[0].hint
        for line in ('strategy = "fullshard"', "ofload = true", 'prefetch = "2"')
    ]
    assert hints == [
        'did you mean "full_shard"?',
        'did you mean "offload"?',
        "remove the quotes",
    ]


def test_no_name_of_ours_is_taken_for_an_old_one():
    assert not {*_KEYS} & {*FSDP.model_fields}
    assert {*_STRATEGIES.values()} == {*strategies}
