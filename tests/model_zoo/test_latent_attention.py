"""Latent attention against transformers' modules, and against itself without a cache."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from trainer.kernels.choose import choose
from trainer.model_zoo.language_model import BlockCache
from trainer.model_zoo.layers.configs import LatentSizes
from trainer.model_zoo.layers.latent_attention import LatentAttention
from trainer.model_zoo.layers.rope_scaling import YarnScaling
from trainer.model_zoo.layers.rotary import frequencies, rotation, yarn

DIM, HEADS, THETA, EPS = 24, 3, 1000.0, 1e-6
SIZES = {"kv_lora_rank": 10, "nope_head_dim": 12, "rope_head_dim": 8, "value_head_dim": 14}
YARN = YarnScaling(factor=8.0, original_max_seq_len=16, mscale=0.7, mscale_all_dim=1.1)
NAMES = {
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "o": "o_proj",
}


def our_layer(attention="matmul", scaling=None, **changes):
    torch.manual_seed(3)
    scale = 1.0 if scaling is None else scaling.query_scale
    kernels = choose({"attention": attention}, "cpu", 64)
    layer = LatentAttention(DIM, HEADS, LatentSizes(**SIZES | changes), scale, EPS, kernels)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.3)
    return layer


def angles(length, scaling=None, positions=None):
    found, scale = frequencies(SIZES["rope_head_dim"], THETA), 1.0
    if scaling is not None:
        found = yarn(found, THETA, **scaling.blend)
        scale = scaling.rotation_scale
    return rotation(torch.arange(length) if positions is None else positions, found, scale)


def their_layer(module, ours, scaling):
    sizes = ours.sizes
    rope = {"rope_type": "default"} if scaling is None else scaling.hf_config()
    config = (DeepseekV3Config if module is v3 else DeepseekV2Config)(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=sizes.q_lora_rank,
        kv_lora_rank=sizes.kv_lora_rank,
        qk_nope_head_dim=sizes.nope_head_dim,
        qk_rope_head_dim=sizes.rope_head_dim,
        v_head_dim=sizes.value_head_dim,
        rope_parameters={"rope_theta": THETA, **rope},
        attn_implementation="eager",
    )
    version = "V3" if module is v3 else "V2"
    layer = getattr(module, f"Deepseek{version}Attention")(config, 0)
    weights = {
        NAMES[n]: p
        for n, p in ((n.split(".")[0], p) for n, p in ours.named_parameters())
        if n in NAMES
    }
    layer.load_state_dict({f"{name}.weight": p.detach() for name, p in weights.items()})
    return layer, getattr(module, f"Deepseek{version}RotaryEmbedding")(config)


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("q_lora_rank", [None, 9])
@pytest.mark.parametrize("scaling", [None, YARN])
@pytest.mark.parametrize("module", [v2, v3])
def test_outputs_and_gradients_equal_those_of_transformers(module, scaling, q_lora_rank, attention):
    ours = our_layer(attention, scaling, q_lora_rank=q_lora_rank)
    theirs, rotary = their_layer(module, ours, scaling)
    x = torch.randn(2, 33, DIM, requires_grad=True)
    causal = torch.full((33, 33), -torch.inf).triu(1).expand(2, 1, 33, 33)
    got = ours(x, *angles(33, scaling))
    normed = ours.norm(x).detach().requires_grad_()
    turned = rotary(normed, torch.arange(33).unsqueeze(0))
    expected, _ = theirs(normed, position_embeddings=turned, attention_mask=causal)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    direction = torch.randn_like(got)
    got.backward(direction)
    expected.backward(direction)
    (through_norm,) = torch.autograd.grad(ours.norm(x), x, normed.grad)
    assert (x.grad - through_norm).norm() < 1e-5 * through_norm.norm()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if name != "norm.weight":
            gradient = gradients[f"{NAMES[name.split('.')[0]]}.weight"].grad
            assert (parameter.grad - gradient).norm() < 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("pieces", [[1] * 16, [7, 1, 8], [12, 2, 1, 1], [16]])
@torch.no_grad()
def test_decoding_with_a_cache_equals_the_full_pass(pieces, attention):
    layer = our_layer(attention, YARN, q_lora_rank=9)  # from the 11th position on, by the latents
    x, cache, found = torch.randn(3, 16, DIM), BlockCache(16), []
    for piece, positions in zip(x.split(pieces, 1), torch.arange(16).split(pieces), strict=True):
        found.append(layer(piece, *angles(0, YARN, positions), None, cache))
    torch.testing.assert_close(torch.cat(found, 1), layer(x, *angles(16, YARN)))


@torch.no_grad()
def test_a_cache_holds_the_latent_and_the_shared_key_alone_and_keeps_borders():
    layer = our_layer()
    x, cache = torch.randn(2, 15, DIM), BlockCache(15)
    ids = torch.tensor([[0] * 4 + [1] * 11, [0] * 13 + [1] * 2])
    seen = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril().unsqueeze(1)
    cos, sin = angles(15)
    parts = [slice(0, 6), slice(6, 7), slice(7, 13), slice(13, 15)]
    found = [layer(x[:, p], cos[p], sin[p], seen[:, :, p, : p.stop], cache) for p in parts]
    torch.testing.assert_close(torch.cat(found, 1), layer(x, cos, sin, seen))
    assert [tuple(each.shape) for each in cache._held] == [(2, 15, 1, 10), (2, 15, 1, 8)]


@pytest.mark.parametrize("q_lora_rank", [None, 9])
def test_the_config_knows_the_parameters(q_lora_rank):
    layer = our_layer(q_lora_rank=q_lora_rank)
    shapes = {f"attention.{n}": tuple(p.shape) for n, p in layer.named_parameters()}
    assert list(layer.sizes.latent_shapes(DIM, HEADS).items()) == list(shapes.items())


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"rope_head_dim \(7\) must be even"):
        LatentSizes(rope_head_dim=7)
    with pytest.raises(ValueError, match=r"value_head_dim \(30\) must be at most .* \(24\)"):
        LatentSizes(value_head_dim=30)
