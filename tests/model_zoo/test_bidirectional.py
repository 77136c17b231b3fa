"""Attention in both directions: against transformers, texts alone, and one process."""

import pytest
import torch
from pydantic import ValidationError

from tests.distributed import run_ranks
from tests.model_zoo.peers import built, documents, in_their_words, tokens
from trainer.engine.core.registry import models
from trainer.engine.data.batch import TokenBatch
from trainer.engine.parallel.axis import LocalParts
from trainer.engine.parallel.materialize import materialize, without_storage
from trainer.engine.parallel.plan import make_plan
from trainer.engine.parallel.tables import Parallel
from trainer.kernels.attention import reference
from trainer.kernels.choose import choose
from trainer.kernels.ragged.lengths import SampleLengths
from trainer.model_zoo.heads import HeadSettings
from trainer.model_zoo.language_model import KVCache

SIZES = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "vocab_size": 61,
    "init_std": 0.2,
    "attention": "bidirectional",
}
FAMILIES = ("llama3", "qwen3", "mixtral", "deepseek_v3")
EXPERTS = {"num_experts": 4, "expert_ffn_dim": 24, "aux_weight": 0.0}


def config_of(family, **changes):
    more = {"moe": EXPERTS} if family == "mixtral" else {}
    return models[family].model_validate({"name": family, **SIZES, **more, **changes})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["matmul", "sdpa"])
def test_attention_equals_softmax_over_all_keys_in_float64(name, masked):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, length, heads, width, generator=generator, dtype=torch.float64)
        for length, heads, width in ((70, 4, 8), (90, 2, 8), (90, 2, 6))
    )
    mask = torch.rand(2, 1, 70, 90, generator=generator) < 0.5 if masked else None
    for x in (q, k, v):
        x.requires_grad_()
    out = choose({"attention": name}, "cpu", 64).in_both_directions().attention(q, k, v, mask)
    wide_k, wide_v = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bshk,blhk->bhsl", q, wide_k) / 8**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    expected = torch.einsum("bhsl,blhw->bshw", scores.softmax(-1), wide_v)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
def test_logits_and_gradients_equal_those_of_transformers_without_causality(attention):
    ours = built(config_of("qwen3").with_head(HeadSettings(outputs=3)), attention)
    settings = ours.config.hf_config()
    assert settings["is_causal"] is False
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(**settings, attn_implementation="eager")
    theirs = AutoModelForSequenceClassification.from_config(config)
    theirs.load_state_dict(in_their_words(ours.config, ours.state_dict()))
    x = tokens(1)
    found, expected = ours(x)[:, -1], theirs.eval()(x).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    wanted = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        grad = wanted[ours.config.layout.to_hf(name)].grad
        assert (weight.grad - grad).norm() < 1e-4 * grad.norm(), name
    assert type(ours.config).from_hf_config(settings).attention == "bidirectional"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_position_depends_on_every_other_of_its_text_and_on_no_filler(family):
    model = built(config_of(family))
    lengths = (8, 5)
    positions, ids = documents(lengths)
    hidden = torch.randn(1, 16, 32, requires_grad=True)
    positions = torch.nn.functional.pad(positions, (0, 3))
    ids = torch.nn.functional.pad(ids, (0, 3), value=1)
    padding = torch.arange(16).unsqueeze(0) >= 13
    out = model(
        None,
        hidden=hidden,
        positions=positions,
        document_ids=ids,
        padding_mask=padding,
        blocks=range(2),
    )
    for position, seen in ((0, range(8)), (7, range(8)), (9, range(8, 13)), (14, range(13, 16))):
        (grad,) = torch.autograd.grad(out[0, position].sum(), hidden, retain_graph=True)
        assert grad[0].abs().sum(-1).nonzero().flatten().tolist() == list(seen)


def test_a_padded_text_is_as_if_alone():
    model = built(config_of("llama3"))
    x = tokens(2, 20)
    padding = torch.arange(20) >= torch.tensor([[20], [11]])
    together = model(x, padding_mask=padding)
    torch.testing.assert_close(together[:1], model(x[:1]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together[1:, :11], model(x[1:, :11]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("counts", [(3, 40, 35, 1, 90), (7,), (9, 9)])
def test_texts_of_a_flat_row_are_as_if_alone(attention, counts):
    model = built(config_of("qwen3"), attention)
    row = tokens(1, sum(counts))
    together = model(row, lengths=SampleLengths(counts))
    apart = torch.cat([model(part) for part in row.split(counts, dim=1)], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    found, wanted = (
        torch.autograd.grad(x.square().sum(), list(model.parameters())) for x in (together, apart)
    )
    for one, two in zip(found, wanted, strict=True):
        assert (one - two).norm() < 1e-5 * two.norm()


def test_scores_are_counted_in_full():
    causal, both = config_of("llama3", attention="causal"), config_of("llama3")
    scores = causal.flops_per_token(64) - causal.flops_per_token(0)
    assert both.flops_per_token(64) - both.flops_per_token(0) == 2 * scores
    # 2 products x 2 operations x forward and two backward, for each of 2 blocks: width x keys.
    assert both.flops_per_token(64) - both.flops_per_token(0) == 2 * 12 * 32 * 64


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt_oss", {}, '"bidirectional" is not for gpt_oss: its windows look back'),
        ("mistral", {"window": 5}, '"bidirectional" is not for mistral: its windows look back'),
        ("llama4", {}, '"bidirectional" is not for llama4: its chunks'),
        ("deepseek_v3", {"mtp_depth": 1}, "mtp_depth predicts later tokens"),
    ],
)
def test_what_looks_back_by_nature_is_refused(family, changes, message):
    with pytest.raises(ValidationError, match=message):
        config_of(family, **changes)


def test_a_cache_is_refused():
    with pytest.raises(AssertionError, match="generates nothing"):
        built(config_of("llama3"))(tokens(1, 4), cache=KVCache(4))


def test_the_mask_of_documents_is_symmetric():
    ids = torch.tensor([[0, 0, 1, 2, 2]])
    mask = reference.document_mask(ids, ids, causal=False)[0, 0]
    assert torch.equal(mask, ids == ids.T)


def gradients(ranks):
    """Return every gradient over a padded batch, of this rank's share of each row."""
    device, kernels, config = torch.device("cpu"), choose({}, "cpu", 32), config_of("mixtral")
    config = config.with_head(HeadSettings(outputs=3))
    padding = torch.arange(32) >= torch.tensor([[32], [21]])
    batch = TokenBatch(tokens(2, 32), tokens(2, 32), padding_mask=padding)
    if ranks > 1:
        rank = torch.distributed.get_rank()
        plan = make_plan(Parallel(context=ranks, shard=1), rank, ranks, device)
        (axis, _) = plan.axes  # the second one is FSDP
        kernels = axis.adapt_kernels(kernels, config)
    with without_storage():
        model = config.build(kernels)
    if ranks > 1:
        axis.split(model, config, LocalParts(), None)
        batch = axis.take(batch)
    materialize(model, device, seed=4)
    out = model(
        batch.tokens,
        positions=batch.positions,
        padding_mask=batch.padding_mask,
        loss=lambda x: (x.square().sum(-1) * (batch.labels % 3)).sum(),
    )
    out.backward()
    for weight in model.parameters():
        if ranks > 1:
            torch.distributed.all_reduce(weight.grad)
    return {name: weight.grad.numpy() for name, weight in model.named_parameters()}


def test_ranks_that_share_sequences_compute_the_gradients_of_one_process():
    found, _ = run_ranks(2, gradients, 2)
    expected = gradients(1)
    for name, grad in expected.items():
        scale = abs(grad).max()
        torch.testing.assert_close(found[name] / scale, grad / scale, rtol=1e-4, atol=1e-5)
