"""DeepSeek-V3 and V2 against transformers', and against their own definitions."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_layers import MtpModel

from tests.model_zoo.peers import (
    VOCAB,
    as_theirs,
    assert_cache_changes_nothing,
    assert_equal,
    built,
    documents,
    flops_of,
    in_their_words,
    some_labels,
    tokens,
    twin,
)
from trainer.engine.tasks.language_modeling.next_token import TokenLossRecord
from trainer.kernels.cross_entropy.reference import linear_cross_entropy
from trainer.model_zoo.deepseek_v3.config import DeepSeekV3Config

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 48, "vocab_size": VOCAB}
LATENTS = {
    "kv_lora_rank": 10,
    "nope_head_dim": 12,
    "rope_head_dim": 8,
    "value_head_dim": 14,
}
YARN = {"factor": 8.0, "original_max_seq_len": 16, "mscale": 0.7, "mscale_all_dim": 1.1}
GROUPS = {"num_experts": 12, "experts_per_token": 3, "groups": 4, "groups_per_token": 2}
V2 = {"score": "softmax", "balance_bias": False, "group_score": "max", "normalize": False}
VARIANTS = {
    "all dense": {"n_dense_layers": 2},
    "tied": {"tie_embeddings": True},
    "no dense, narrow queries, yarn": {
        "n_dense_layers": 0,
        "q_lora_rank": 9,
        "rope_scaling": YARN,
    },
    "groups": {"moe": {**GROUPS, "num_shared": 2, "scale": 2.5}},
    "not normalised": {"moe": {"num_shared": 1, "normalize": False}},
    "v2": {"q_lora_rank": 9, "moe": {**V2, "num_shared": 1}},
    "v2, groups, yarn": {
        "rope_scaling": YARN,
        "moe": {**V2, **GROUPS, "num_shared": 2, "scale": 16.0},
    },
}


def our_model(attention="auto", **changes):
    """Return a model whose weights and balance biases are large enough to matter."""
    moe = {"score": "sigmoid", "balance_bias": True, "num_shared": 1} | changes.pop("moe", {})
    config = SIZES | LATENTS | {"init_std": 0.2, "moe": moe} | changes
    model = built(DeepSeekV3Config.model_validate(config), attention)
    for name, bias in model.named_buffers():
        if name.endswith("router.bias"):
            bias.normal_(std=0.3, generator=torch.Generator().manual_seed(4))
    return model


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_those_of_transformers(variant, attention):
    ours = our_model(attention=attention, **VARIANTS[variant])
    assert_equal(ours, twin(ours), tokens())


def mtp_names(name, count):
    """Return the name in transformers' module of predictions of a name in checkpoints."""
    block = name.removeprefix(f"model.layers.{count}.")
    own = {"shared_head.norm.weight": "post_norm.weight"}
    inside = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    return f"mtp_block.{block}" if block.startswith(inside) else own.get(block, block)


def their_predictions(ours, theirs):
    """Return transformers' module of predictions farther ahead, with our weights."""
    module, config = MtpModel(theirs, ours.config.mtp_depth).eval(), ours.config
    weights = in_their_words(config, ours.state_dict())
    for depth, layer in enumerate(module.layers):
        number = config.n_layers + depth
        start = f"model.layers.{number}."
        layer.load_state_dict(
            {mtp_names(n, number): w for n, w in weights.items() if n.startswith(start)}
        )
    return module


def test_predictions_farther_ahead_train_as_in_the_paper():
    """Hidden states are transformers'; the loss is equations 24 and 25, row by row."""
    changes = {"mtp_depth": 2, "mtp_weight": 0.5, "q_lora_rank": 9, "rope_scaling": YARN}
    ours = our_model(**changes)
    theirs = twin(ours)
    module = their_predictions(ours, theirs)
    x = tokens()
    labels = some_labels(x)
    record = TokenLossRecord(linear_cross_entropy)
    loss = ours(x, labels=labels, loss=record)

    logits = theirs(x).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    hidden = theirs.model(x).last_hidden_state
    farther = []
    for depth in (1, 2):
        length = x.shape[1] - depth
        positions = torch.arange(depth, x.shape[1]).unsqueeze(0)
        hidden = module.forward_layer(
            depth - 1, hidden[:, :length], positions, None, input_ids=x[:, depth:]
        )
        found = theirs.lm_head(hidden).flatten(0, 1)
        farther.append(F.cross_entropy(found, labels[:, depth:].flatten(), reduction="sum"))
    total = expected + 0.5 / 2 * sum(farther)
    wanted = torch.stack([total, expected]).detach()  # the task's loss is the next token's alone
    torch.testing.assert_close(record.sums(loss), wanted, rtol=1e-5, atol=0)
    loss.backward()
    total.backward()

    config = ours.config
    mine = {n: as_theirs(config, n, p.grad) for n, p in ours.named_parameters()}
    for depth, layer in enumerate(module.layers):
        number = config.n_layers + depth
        names = {mtp_names(theirs, number): ours for ours, theirs in _names_of(ours, number)}
        for name, parameter in layer.named_parameters():
            wanted = parameter.grad
            assert (mine[names[name]] - wanted).norm() <= 1e-5 * wanted.norm(), name
    for name, parameter in theirs.named_parameters():
        wanted, found = parameter.grad, mine[config.layout.from_hf(name)]
        assert (found - wanted).norm() <= 1e-5 * wanted.norm(), name


def _names_of(ours, number):
    start = f"layers.{number}."
    names = [name for name, _ in ours.named_parameters() if name.startswith(start)]
    return [(name, ours.config.layout.to_hf(name)) for name in names]


def test_predictions_farther_ahead_stop_at_documents_and_are_of_training_alone():
    model = our_model(mtp_depth=2)
    lengths = [5, 1, 2, 12]
    row = tokens(1, sum(lengths))
    positions, ids = documents(lengths)
    labels = torch.cat(
        [F.pad(part[:, 1:], (0, 1), value=-100) for part in row.split(lengths, 1)], 1
    )
    options = {"loss": linear_cross_entropy}
    model(row, labels=labels, positions=positions, document_ids=ids, **options).backward()
    together = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for part, wanted in zip(row.split(lengths, 1), labels.split(lengths, 1), strict=True):
        model(part, labels=wanted, **options).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, rtol=1e-4, atol=1e-4)
    model.zero_grad(set_to_none=True)
    model.eval()(row, labels=labels, **options).backward()
    idle = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert idle == {name for name, _ in model.named_parameters() if name[7:9] in ("2.", "3.")}


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("pieces", [[1] * 16, [7, 1, 4, 4], [16]])
def test_decoding_with_a_cache_equals_the_full_pass(pieces, attention):
    model = our_model(attention=attention, rope_scaling=YARN, mtp_depth=1).eval()
    assert_cache_changes_nothing(model, pieces, tokens(3, 16))


# Of the safetensors files of deepseek-ai/DeepSeek-V2-Lite and -V2 on the Hugging Face hub; of V3
# its README's 671 billion, without the block that predicts farther ahead.
PARAMETERS = {"16b": 15_706_484_224, "236b": 235_741_434_880, "671b": 671_026_404_352}
ACTIVE = {"16b": 2.4e9, "236b": 21e9, "671b": 37e9}
"""of each token, from the model cards"""


@pytest.mark.parametrize("flavor", PARAMETERS)
def test_flavors_have_the_published_number_of_parameters(flavor):
    config = DeepSeekV3Config(flavor=flavor, mtp_depth=0)
    assert sum(map(math.prod, config.parameter_shapes().values())) == PARAMETERS[flavor]
    multiplied = config.flops_per_token(0) / 6 + config.dim * config.vocab  # embedding's rows too
    assert multiplied == pytest.approx(ACTIVE[flavor], rel=0.13)


def test_a_table_of_a_flavor_keeps_what_is_not_overridden():
    config = DeepSeekV3Config(flavor="671b", moe={"aux_weight": 0.5}, rope_scaling={"factor": 8.0})
    assert (config.moe.num_experts, config.moe.aux_weight) == (256, 0.5)
    assert (config.rope_scaling.mscale_all_dim, config.rope_scaling.factor) == (1.0, 8.0)


@pytest.mark.parametrize("changes", [{"mtp_depth": 2}, {"n_dense_layers": 2}, {"q_lora_rank": 9}])
def test_flops_per_token_equal_those_counted(changes):
    model, length = our_model("matmul", **changes), 64
    x = tokens(2, length)
    config = model.config
    scores = 6 * sum(config.attention_multiplications(n, length) for n in range(config.num_blocks))
    assert flops_of(model, x) == config.flops_per_token(length) + scores
