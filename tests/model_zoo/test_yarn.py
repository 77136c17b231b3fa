"""YaRN against transformers' formula and the paper's."""

import math

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainer.model_zoo.layers.rope_scaling import YarnScaling
from trainer.model_zoo.layers.rotary import frequencies, rotation, yarn


def found_by(scaling, width, theta):
    return yarn(frequencies(width, theta), theta, **scaling.blend)


@pytest.mark.parametrize(
    ("scaling", "width", "theta", "family"),
    [
        (YarnScaling(mscale=1.0, mscale_all_dim=1.0), 64, 1e4, DeepseekV3Config),
        (YarnScaling(mscale=0.707, mscale_all_dim=1.3), 64, 1e4, DeepseekV3Config),
        (YarnScaling(mscale_all_dim=0.5), 16, 1e4, DeepseekV3Config),
        (YarnScaling(factor=32.0, truncate=False), 64, 150000.0, GptOssConfig),
        (YarnScaling(factor=4.0, original_max_seq_len=16), 8, 100.0, DeepseekV3Config),
        (YarnScaling(factor=2.0, original_max_seq_len=7), 4, 1e4, DeepseekV3Config),
    ],
)
def test_frequencies_and_scale_are_those_of_transformers(scaling, width, theta, family):
    rope = {"rope_theta": theta, **scaling.hf_config()}
    config = family(rope_parameters=rope, max_position_embeddings=4096)
    config.head_dim = width
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    torch.testing.assert_close(found_by(scaling, width, theta), expected, rtol=1e-6, atol=0)
    assert scaling.rotation_scale == pytest.approx(factor, rel=1e-12)


def test_fast_frequencies_stay_slow_ones_are_stretched():
    scaling = YarnScaling(factor=8.0, original_max_seq_len=1024)
    plain = frequencies(64, 1e4)
    ratios = plain / found_by(scaling, 64, 1e4)
    turns = 1024 * plain / (2 * math.pi)
    assert (ratios[turns > 64] == 1).all()
    assert ratios[turns < 0.5].tolist() == pytest.approx([8.0] * int((turns < 0.5).sum()))
    assert (ratios.diff() >= 0).all()


def test_sharpening_is_that_of_the_paper_and_is_in_the_rotation():
    scaling = YarnScaling(factor=16.0)
    expected = 0.1 * math.log(16.0) + 1
    assert scaling.rotation_scale == pytest.approx(expected)
    cos, sin = rotation(torch.arange(5), frequencies(8, 1e4), scaling.rotation_scale)
    lengths = (cos.square() + sin.square()).sqrt()
    torch.testing.assert_close(lengths, torch.full_like(lengths, expected))
    assert scaling.query_scale == 1.0
    assert YarnScaling(factor=0.5).rotation_scale == 1.0


def test_borders_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"beta_fast \(1.0\) must be above beta_slow \(2.0\)"):
        YarnScaling(beta_fast=1.0, beta_slow=2.0)
