"""Counts of parameters and operations against published and measured ones."""

import pytest
import torch

from tests.model_zoo.peers import FLAVORS, built, flops_of, num_parameters
from trainer.engine.core.registry import models
from trainer.engine.parallel.materialize import without_storage
from trainer.kernels.choose import choose
from trainer.model_zoo.llama3.config import Llama3Config

# Billions, from the model cards of meta-llama/Llama-3.2-1B, -3B and Llama-3.1-8B, -70B, -405B.
PUBLISHED = {"1b": 1.24, "3b": 3.21, "8b": 8.03, "70b": 70.6, "405b": 406.0}
EXACT = {
    "1b": 1_235_814_400,
    "3b": 3_212_749_824,
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
}


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_flavors_have_the_published_number_of_parameters(flavor):
    count = num_parameters(Llama3Config(flavor=flavor))
    assert count == EXACT[flavor]
    assert count / 1e9 == pytest.approx(PUBLISHED[flavor], rel=4e-3)


@pytest.mark.parametrize("family", models)
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"head_dim": 20}])
def test_flops_per_token_equal_those_counted(family, changes):
    # As one piece, matmul attention computes every score; the formula counts the causal half.
    if not changes.keys() <= models[family].model_fields.keys():
        pytest.skip("the family has no such size")
    config, length = models[family].model_validate({"vocab_size": 61, **changes}), 64
    model = built(config, "matmul")
    x = torch.randint(0, 61, (2, length))
    scores = 6 * sum(config.attention_multiplications(n, length) for n in range(config.num_blocks))
    assert flops_of(model, x) == config.flops_per_token(length) + scores


def test_an_open_vocabulary_takes_the_tokenizers_and_a_given_one_stays():
    assert Llama3Config().with_vocab(257).vocab == 320
    assert Llama3Config().with_vocab(64).vocab == 64
    assert Llama3Config(vocab_size=50).with_vocab(257).vocab == 50


@pytest.mark.parametrize(("family", "flavor"), FLAVORS)
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}])
def test_parameter_shapes_are_those_of_the_module(family, flavor, changes):
    config = models[family](flavor=flavor, **changes).with_vocab(300)
    # Every kind of block is among the first eight.
    config = config.model_copy(update={"n_layers": min(config.n_layers, 8)})
    with without_storage():
        model = config.build(choose({}, "cpu", 16))
    found = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    assert list(config.parameter_shapes().items()) == found
