"""Llama 3 against transformers', and against its own definitions."""

import pytest
import torch

from tests.model_zoo.peers import (
    VARIANTS,
    VOCAB,
    assert_cache_changes_nothing,
    assert_documents_are_as_if_alone,
    assert_equal,
    our_model,
    their_model,
    tokens,
)
from trainer.kernels.cross_entropy.reference import linear_cross_entropy


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_those_of_transformers(variant, attention):
    ours = our_model(attention=attention, **VARIANTS[variant])
    assert_equal(ours, their_model(ours), tokens())


def test_rotary_scaling_matters_where_it_should():
    scaling = {"factor": 8.0, "original_max_seq_len": 64}
    ours = our_model(rope_theta=1000.0, rope_scaling=scaling)
    plain = our_model(rope_theta=1000.0)
    ratios = plain.frequencies / ours.frequencies
    assert ratios[0] == 1.0  # highest frequency: kept
    assert ratios[-1] == pytest.approx(8.0)  # lowest: stretched by the factor
    assert (ratios.diff() >= 0).all()


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
def test_documents_in_a_row_do_not_see_each_other(attention):
    assert_documents_are_as_if_alone(our_model(attention=attention), [5, 1, 17, 10])


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("pieces", [[1] * 12, [7, 1, 4], [12]])
def test_decoding_with_a_cache_equals_the_full_pass(pieces, attention):
    assert_cache_changes_nothing(our_model(attention=attention), pieces, tokens(3, 12))


def test_a_cache_keeps_document_borders():
    ids = torch.tensor([[0] * 4 + [1] * 6, [0] * 7 + [1] * 3]).int()
    assert_cache_changes_nothing(our_model(), [5, 1, 4], tokens(2, 10), document_ids=ids)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_in_bf16_activations_are_bf16_whatever_the_weights_are(weights):
    model = our_model()
    model.compute_dtype = torch.bfloat16
    for parameter in model.parameters():
        parameter.data = parameter.data.to(weights)
    seen = set()
    for module in model.modules():
        if not list(module.children()) and module is not model.embed:
            module.register_forward_hook(lambda m, args, out: seen.add((args[0].dtype, out.dtype)))
    loss = model(tokens(), labels=tokens(), loss=linear_cross_entropy)
    loss.backward()
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    assert loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {weights}
    exact = model.float()
    exact.compute_dtype = torch.float32
    expected = exact(tokens(), labels=tokens(), loss=linear_cross_entropy)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)


def test_tied_embeddings_are_one_parameter_with_both_gradients():
    tied = our_model(tie_embeddings=True)
    assert not [name for name in tied.state_dict() if "proj" in name]
    untied = our_model()
    untied.load_state_dict({**tied.state_dict(), "head.proj.weight": tied.embed.weight.detach()})
    for model in (tied, untied):
        model(tokens(), labels=tokens(), loss=linear_cross_entropy).backward()
    both = untied.embed.weight.grad + untied.head.proj.weight.grad
    torch.testing.assert_close(tied.embed.weight.grad, both)


def test_initial_loss_is_that_of_a_uniform_guess():
    model = our_model(init_std=0.02)
    loss = model(tokens(), labels=tokens(), loss=linear_cross_entropy) / tokens().numel()
    assert loss.item() == pytest.approx(torch.tensor(float(VOCAB)).log().item(), abs=0.1)
