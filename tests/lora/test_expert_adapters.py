"""Adapters beside experts compute, train and are stored as PEFT's `target_parameters` are."""

from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F

from tests.conversion.models import VARIANTS, transformers_model
from tests.formats.hf_folders import config_of
from tests.model_zoo.peers import built, flops_of
from trainer.engine.checkpoint.tensors import InMemoryTensor
from trainer.engine.conversion.peft import save_adapter
from trainer.engine.conversion.source_weights import merge_tensors
from trainer.engine.core.errors import CheckpointError
from trainer.engine.formats.hf_load import load_huggingface
from trainer.engine.lora.adapter_weights import merge_adapters, merged_weights
from trainer.engine.lora.apply import add_adapters, without_adapters
from trainer.engine.lora.peft_folder import load_adapter, name_in_peft, to_peft
from trainer.engine.lora.sizes import flops_per_token, with_adapters
from trainer.engine.lora.tables import LoRA
from trainer.kernels.choose import choose
from trainer.model_zoo.matrices import is_adapter

LOSS = choose({}, "cpu", 16).linear_cross_entropy
FAMILIES = ["experts", "mixtral", "deepseek_v3", "gpt_oss", "llama4"]
TARGETS = {
    "both": ["*.experts.*"],
    "gate_up": ["*.experts.gate_up"],
    "with attention": ["*.experts.down", "*.attention.o.weight"],
}
CASES = [
    pytest.param(family, targets, marks=() if quick else pytest.mark.matrix)
    for family in FAMILIES
    for targets in TARGETS
    for quick in [(family, targets) in {("mixtral", "both"), ("llama4", "with attention")}]
]


def pair(family, targets, tmp_path):
    """Return our model with random adapters, PEFT's of the same weights, and the table."""
    config = config_of(**VARIANTS[family])
    theirs = transformers_model(config)
    theirs.save_pretrained(tmp_path / "base")
    ours = built(config)
    table = LoRA(rank=3, alpha=6.0, targets=TARGETS[targets])
    add_adapters(ours, config.layout, table)
    load_huggingface(tmp_path / "base", ours, config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in adapters(ours).values():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    save_adapter(tmp_path / "adapter", ours, config, table)
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True)
    return ours, loaded, table


def adapters(model):
    return {name: value for name, value in model.named_parameters() if is_adapter(name)}


def tokens(seed=0):
    return torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(seed))


def logits(model, x):
    with torch.no_grad():
        found = model(x)
    return getattr(found, "logits", found)


@pytest.mark.parametrize(("family", "targets"), CASES)
def test_losses_gradients_and_merged_weights_are_pefts(family, targets, tmp_path):
    ours, theirs, _ = pair(family, targets, tmp_path)
    x, config = tokens(), ours.config
    with without_adapters(ours), theirs.disable_adapter():
        torch.testing.assert_close(logits(ours, x), logits(theirs, x), atol=1e-5, rtol=1e-5)
        base = logits(ours, x)
    torch.testing.assert_close(logits(ours, x), logits(theirs, x), atol=1e-5, rtol=1e-5)
    assert (logits(ours, x) - base).abs().max() > 1e-3
    ours(x[:, :-1], labels=x[:, 1:], loss=LOSS).backward()
    loss = F.cross_entropy(
        theirs(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum"
    )
    loss.backward()
    known = {name: each for name, each in theirs.named_parameters() if each.requires_grad}
    for name, value in adapters(ours).items():
        their_name = name_in_peft(name, config, adapters(ours)).replace(
            ".weight", ".default.weight"
        )
        expected = known.pop(their_name).grad
        found = to_peft(name, value.grad, config.layout)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not known
    expected = logits(ours, x)
    weights = merged_weights(ours)
    merge_adapters(ours)
    torch.testing.assert_close(logits(ours, x), expected, atol=1e-5, rtol=1e-5)
    for name, value in ours.named_parameters():
        assert torch.equal(weights.pop(name), value), name
    assert not weights


@pytest.mark.parametrize(("family", "targets"), CASES)
def test_an_adapter_that_peft_saved_is_loaded(family, targets, tmp_path):
    ours, theirs, table = pair(family, targets, tmp_path)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in theirs.parameters():
            if value.requires_grad:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    theirs.save_pretrained(tmp_path / "other")
    x, before = tokens(), logits(ours, tokens())
    load_adapter(tmp_path / "other", ours, ours.config, table)
    torch.testing.assert_close(logits(ours, x), logits(theirs, x), atol=1e-5, rtol=1e-5)
    assert (logits(ours, x) - before).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_start_as_the_model_was_with_the_names_and_shapes_that_are_told(family):
    config = config_of(**VARIANTS[family])
    plain, ours = built(config), built(config)
    table = LoRA(rank=2, targets=["*.experts.*", "*.attention.*"])
    add_adapters(ours, config.layout, table)
    found = [(name, tuple(value.shape)) for name, value in ours.named_parameters()]
    assert list(with_adapters(config, table).items()) == found
    rules = {name: ours.initial_values(name) for name in adapters(ours)}
    with torch.no_grad():
        for name, value in adapters(ours).items():
            value.zero_() if name.endswith("lora_b") else value.normal_()
            assert (rules[name].std > 0) if name.endswith("lora_a") else rules[name].value == 0
    assert torch.equal(logits(ours, tokens()), logits(plain, tokens()))
    assert {name for name, value in ours.named_parameters() if value.requires_grad} == set(rules)


def test_flops_of_a_step_are_those_of_the_experts_that_a_token_takes():
    config = config_of(**VARIANTS["experts"])

    def told_and_counted(rank):
        model = built(config)
        add_adapters(model, config.layout, LoRA(rank=rank, targets=["layers.1.mlp.experts.*"]))
        model.compute_dtype = torch.float32
        return flops_per_token(model, config, 17), flops_of(model, tokens())

    (told, counted), (told_wide, counted_wide) = told_and_counted(2), told_and_counted(6)
    moe, added = config.moe, 4 * config.moe.experts_per_token
    each = 2 * moe.expert_ffn_dim + config.dim + config.dim + moe.expert_ffn_dim
    assert told_wide - told == pytest.approx(6 * added * each)
    # What the first adapter reads needs no gradient.
    assert counted_wide - counted == pytest.approx(added * (6 * each - 2 * config.dim))


def test_a_checkpoint_is_merged_expert_by_expert():
    config = config_of(**VARIANTS["mixtral"])
    ours = built(config)
    table = LoRA(rank=2, alpha=6.0, targets=["*.experts.*"])
    add_adapters(ours, config.layout, table)
    with torch.no_grad():
        for value in adapters(ours).values():
            value.normal_()
    stored = {name: InMemoryTensor(value.detach()) for name, value in ours.named_parameters()}
    merged = merge_tensors(Path("x"), stored, table)
    expected = merged_weights(ours)
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        whole = torch.cat([tensor.read(0, 2), tensor.read(2, tensor.shape[0])])
        torch.testing.assert_close(whole, expected[name], atol=1e-6, rtol=1e-6)
    down = "layers.0.mlp.experts.down"
    stored[f"{down}_lora_a"] = InMemoryTensor(torch.zeros(4, 2, 24))
    with pytest.raises(CheckpointError, match=r"experts\.down_lora_a.*\(4, 2, 24\)"):
        merge_tensors(Path("x"), stored, table)
