"""A format that a model cannot multiply in is refused when the recipe is read, with a way out."""

import pytest

RUN = "[run]\nsteps = 1\n"
SMALL = "[model]\ndim = 64\nn_layers = 2\nn_heads = 2\nn_kv_heads = 2\nffn_dim = 96\n"
MOE = '[model]\nname = "qwen3"\nflavor = "moe_debug"\n'
WIDE = "dim = 128\nn_layers = 1\nmoe = { num_experts = 4, expert_ffn_dim = 128 }\n"
ON = "enabled = true\nemulate = true\n"
FLOAT8, MX = f"[precision.float8]\n{ON}", f"[precision.mx]\n{ON}"
EXPERTS = "layers.0.mlp.experts"

FAULTS = {
    "a pattern misspelt": (
        SMALL + FLOAT8 + 'targets = ["*.mlp.*", "layers.0.mlp.upp.weight"]', 1,
        "precision.float8.targets.1", '"layers.0.mlp.upp.weight" matches nothing',
        'did you mean "layers.0.mlp.up.weight"?',
    ),
    "a pattern of other weights": (
        SMALL + MX + 'exclude = ["head.*"]', 1,
        "precision.mx.exclude.0", '"head.*" matches only what does not multiply in a block',
        "weights are named like layers.0.attention.q.weight and layers.1.mlp.down.weight",
    ),
    "no expression": (
        SMALL + FLOAT8 + 'exclude = ["re:("]', 1,
        "precision.float8.exclude.0",
        '"re:(" is no regular expression: missing ): (', "",
    ),
    "an uneven width": (
        SMALL.replace("96", "72") + FLOAT8, 1,
        "precision.float8.targets",
        "layers.0.mlp.gate.weight is 72 x 64: both must be multiples of 16",
        'give other sizes, or precision.float8.exclude = ["*.mlp.gate.weight"]',
    ),
    "a width that ranks make uneven": (
        SMALL + FLOAT8 + "[parallel]\ntensor = 4", 4,
        "precision.float8.targets",
        "layers.0.mlp.gate.weight is 24 x 64 on each of 4 ranks: both must be multiples of 16",
        'give other sizes, or precision.float8.exclude = ["*.mlp.gate.weight"]',
    ),
    "a width that MX makes uneven": (
        SMALL.replace("96", "80") + MX, 1,
        "precision.mx.targets",
        "layers.0.mlp.gate.weight is 80 x 64: both must be multiples of 32",
        'give other sizes, or precision.mx.exclude = ["*.mlp.gate.weight"]',
    ),
    "narrow experts": (
        MOE + "dim = 128\nmoe = { expert_ffn_dim = 64 }\n" + FLOAT8, 1,
        "precision.float8.targets",
        f"{EXPERTS}.gate_up is 64 x 128: experts in float8 have blocks of 128", None,
    ),
    "experts that ranks make narrow": (
        MOE + WIDE + FLOAT8 + "[parallel]\nexpert_tensor = 2", 2,
        "precision.float8.targets",
        (f"{EXPERTS}.gate_up is 64 x 128 on each of 2 ranks: experts in float8 have blocks of "
        "128"), None,
    ),
    "experts in MX": (
        MOE + WIDE + MX, 1,
        "precision.mx.targets",
        f"the experts' products ({EXPERTS}.gate_up) have no MX format here",
        'set precision.mx.exclude = ["*.experts.*"]; precision.float8 can take them',
    ),
    "half of the experts": (
        MOE + WIDE + FLOAT8 + 'targets = ["*.experts.down"]', 1,
        "precision.float8.targets",
        f"{EXPERTS}.down is taken and {EXPERTS}.gate_up is not: experts multiply in one format",
        f'name both, such as "{EXPERTS}.*", or none',
    ),
    "two formats": (
        SMALL + FLOAT8 + 'exclude = ["*.mlp.*"]\n' + MX, 1,
        "precision.mx.targets",
        "layers.0.attention.k.weight is to multiply in float8 already",
        "exclude it from one of the two",
    ),
    "fp16": (
        SMALL + '[precision]\ncompute = "fp16"\n' + FLOAT8, 1,
        "precision.compute", 'products in float8 are given back in bf16, not "fp16"',
        'take "bf16", or leave it to "auto"',
    ),
    "fp32 in hardware": (
        SMALL + '[precision]\ncompute = "fp32"\n[precision.float8]\nenabled = true\n', 1,
        "precision.compute", 'products in float8 are given back in bf16, not "fp32"',
        'take "bf16", or leave it to "auto"',
    ),
    "rows of an odd length": (
        SMALL + "[data]\nseq_len = 80\n" + MX, 1,
        "data.seq_len", "rows of 80 tokens are no multiple of 32, which precision.mx sums over",
        "give a multiple of 32",
    ),
    "parts of rows of an odd length": (
        SMALL + "[data]\nseq_len = 96\n[precision.float8]\nenabled = true\n"
        "[parallel]\ncontext = 4", 4,
        "data.seq_len",
        ("rows of 24 tokens on each of 4 ranks are no multiple of 16, which precision.float8 sums "
        "over"),
        "give a multiple of 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_work_is_refused_with_what_would(problems, fault):
    text, world, key, message, hint = FAULTS[fault]
    found = [each for each in problems(RUN + text, world=world) if each.key == key]
    assert [each.message for each in found] == [message]
    assert found[0].line, "the place in the file"
    if hint is not None:
        assert found[0].hint == hint


def test_narrow_experts_are_told_both_ways_out(problems):
    text, world, key, _, _ = FAULTS["narrow experts"]
    hints = [each.hint for each in problems(RUN + text, world=world) if each.key == key]
    sizes = "give model.dim and model.moe.expert_ffn_dim that are multiples of 128"
    assert hints == [f'{sizes}, or precision.float8.exclude = ["*.experts.*"]']


@pytest.mark.parametrize(
    ("text", "world"),
    [
        (SMALL + FLOAT8, 1),
        (SMALL + FLOAT8 + "[parallel]\ntensor = 2", 2),
        (SMALL + FLOAT8 + 'targets = ["*.mlp.*"]\n' + MX + 'exclude = ["*.mlp.*"]', 1),
        (MOE + WIDE + FLOAT8, 1),
        (MOE + WIDE + FLOAT8 + 'exclude = ["*.experts.*"]', 1),
        (SMALL.replace("96", "72") + "[precision.float8]\nenabled = false\n", 1),
        (SMALL + "[data]\nseq_len = 24\n" + FLOAT8, 1),
    ],
)
def test_what_works_is_not_refused(load, text, world):
    assert load(RUN + text, world=world)
