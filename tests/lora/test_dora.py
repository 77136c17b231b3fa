"""DoRA and dropout compute what Hugging Face's PEFT does."""

import json

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.lora.test_peft import ALL, adapters, logits, tokens
from tests.model_zoo.peers import our_model, their_model
from trainer.engine.conversion.peft import save_adapter
from trainer.engine.core.errors import CheckpointError
from trainer.engine.lora.adapter_weights import merge_adapters, merged_weights, start_magnitudes
from trainer.engine.lora.apply import add_adapters, without_adapters
from trainer.engine.lora.peft_folder import load_adapter
from trainer.engine.lora.tables import LoRA
from trainer.kernels.choose import choose
from trainer.model_zoo.layers.dense import AdaptedLinear, Linear
from trainer.model_zoo.layers.dropout import drop

LOSS = choose({}, "cpu", 16).linear_cross_entropy
TABLES = {
    "dora": {"dora": True},
    "dora, scaled for large ranks": {"dora": True, "rslora": True},
    "dropout": {"dropout": 0.4},
    "dora with dropout": {"dora": True, "dropout": 0.4},
}


class SameDropout(nn.Module):
    """Drops what one of our layers drops."""

    def __init__(self, layer):
        super().__init__()
        self.layers = [layer]

    def forward(self, x):
        return self.layers[0].drop_input(x)


def pair(changes):
    """Return our model and PEFT's in float64, with equal weights, and the table."""
    table = LoRA(**{"rank": 3, "alpha": 6.0} | changes)
    ours = our_model().double()
    ours.compute_dtype = torch.float64
    theirs = their_model(ours).double()
    add_adapters(ours, ours.config.layout, table)
    ours.double()
    settings = peft.LoraConfig(
        r=table.rank,
        lora_alpha=table.alpha,
        lora_dropout=table.dropout,
        use_dora=table.dora,
        use_rslora=table.rslora,
        target_modules=ALL,
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(theirs, settings, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(4)
    known = dict(adapted.named_parameters())
    with torch.no_grad():
        for name, value in adapters(ours).items():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(noise.abs() * 0.3 if name.endswith("magnitude") else noise * 0.1)
            known[their_name(ours, name)].copy_(value)
    trained = [name for name, value in known.items() if value.requires_grad]
    assert sorted(trained) == sorted(their_name(ours, name) for name in adapters(ours))
    modules = dict(adapted.named_modules())
    for path, layer in ours.named_modules():
        if isinstance(layer, AdaptedLinear) and table.dropout:
            theirs_here = modules[their_name(ours, f"{path}.lora_a").partition(".lora_")[0]]
            theirs_here.lora_dropout["default"] = SameDropout(layer)
    return ours, adapted, table


def their_name(model, name):
    path, _, leaf = name.rpartition(".")
    words = {"lora_a": "lora_A", "lora_b": "lora_B", "lora_magnitude": "lora_magnitude_vector"}
    theirs = model.config.layout.to_hf(f"{path}.weight").removesuffix(".weight")
    return f"base_model.model.{theirs}.{words[leaf]}.default.weight"


@pytest.mark.parametrize("changes", TABLES.values(), ids=TABLES)
def test_losses_and_gradients_in_training_are_pefts(changes):
    ours, theirs, table = pair(changes)
    x = tokens(0)
    keys = torch.arange(32).view(2, 16) * 977
    ours.train()
    theirs.train()
    given = {"dropout_keys": keys} if table.dropout else {}
    loss = ours(x[:, :-1], labels=x[:, 1:], loss=LOSS, **given)
    loss.backward()
    found = theirs(x[:, :-1]).logits  # rounded to fp32 in norms and rotations
    their_loss = F.cross_entropy(found.flatten(0, 1), x[:, 1:].flatten(), reduction="sum")
    their_loss.backward()
    assert loss.item() == pytest.approx(their_loss.item(), abs=1e-5)
    known = dict(theirs.named_parameters())
    for name, value in adapters(ours).items():
        expected = known[their_name(ours, name)].grad
        assert expected.abs().max() > 0
        torch.testing.assert_close(value.grad, expected, atol=1e-5, rtol=1e-4)
    if table.dropout:
        again = ours(x[:, :-1], labels=x[:, 1:], loss=LOSS, dropout_keys=keys + 1)
        assert abs(again.item() - loss.item()) > 1e-3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("changes", TABLES.values(), ids=TABLES)
def test_a_layer_and_its_gradients_are_pefts_to_rounding(changes, bias):
    table = LoRA(**{"rank": 3, "alpha": 6.0} | changes)
    base = Linear(10, 7, bias=bias).double()
    ours = base.with_adapter(
        "weight", 3, table.scale(), dropout=table.dropout, dora=table.dora
    ).double()
    ours.dropout_keys = torch.arange(8).view(2, 4) * 977
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, use_dora=table.dora, use_rslora=table.rslora, target_modules=["0"]
    )
    theirs = nn.Sequential(nn.Linear(10, 7, bias=bias)).double()
    with torch.no_grad():
        for name, value in ours.named_parameters():
            value.copy_(torch.randn(value.shape, dtype=torch.float64))
            if name in ("weight", "bias"):
                theirs[0].get_parameter(name).copy_(value)
    adapted = peft.get_peft_model(theirs, settings, autocast_adapter_dtype=False)
    (layer,) = (each for each in adapted.modules() if isinstance(each, peft.tuners.lora.Linear))
    if table.dropout:
        layer.lora_dropout["default"] = SameDropout(ours)
    names = {"lora_a": "lora_A.default.weight", "lora_b": "lora_B.default.weight"}
    if table.dora:
        names["lora_magnitude"] = "lora_magnitude_vector.default.weight"
    with torch.no_grad():
        for name, their_leaf in names.items():
            layer.get_parameter(their_leaf).copy_(ours.get_parameter(name))
    x, weight = torch.randn(2, 2, 4, 10, dtype=torch.float64)[0], torch.randn(2, 4, 7).double()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, given in zip((ours, adapted), inputs, strict=True):
        (model(given) * weight).sum().backward()
    near = {"atol": 1e-12, "rtol": 1e-12}
    torch.testing.assert_close(ours(x), adapted(x), **near)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **near)
    for name, their_leaf in names.items():
        expected = layer.get_parameter(their_leaf).grad
        torch.testing.assert_close(ours.get_parameter(name).grad, expected, **near)


@pytest.mark.parametrize("changes", TABLES.values(), ids=TABLES)
def test_peft_loads_what_is_saved_and_what_it_saves_is_loaded(changes, tmp_path):
    ours, theirs, table = pair(changes)
    for model in (ours, theirs):
        model.eval()
    x = tokens(1)
    expected = logits(theirs, x)
    torch.testing.assert_close(logits(ours, x), expected, atol=1e-5, rtol=1e-4)
    save_adapter(tmp_path / "ours", ours, ours.config, table)
    settings = json.loads((tmp_path / "ours/adapter_config.json").read_text())
    assert (settings["use_dora"], settings["lora_dropout"]) == (table.dora, table.dropout)
    base = their_model(our_model()).double()
    loaded = peft.PeftModel.from_pretrained(
        base, tmp_path / "ours", autocast_adapter_dtype=False
    ).eval()
    torch.testing.assert_close(logits(loaded, x), expected, atol=1e-5, rtol=1e-4)
    merged = loaded.merge_and_unload().state_dict()
    for name, value in merged_weights(ours).items():
        their_weight = merged[ours.config.layout.to_hf(name)]
        torch.testing.assert_close(value, their_weight, atol=1e-5, rtol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    other = our_model().double()
    other.compute_dtype = torch.float64
    add_adapters(other, other.config.layout, table)
    other.double().eval()
    load_adapter(tmp_path / "theirs", other, other.config, table)
    torch.testing.assert_close(logits(other, x), expected, atol=1e-5, rtol=1e-4)
    merge_adapters(other)
    torch.testing.assert_close(logits(other, x), expected, atol=1e-5, rtol=1e-4)
    assert other.state_dict().keys() == our_model().state_dict().keys()
    plain = LoRA(rank=3, alpha=6.0, rslora=table.rslora, dora=not table.dora)
    mismatch = our_model()
    add_adapters(mismatch, mismatch.config.layout, plain)
    with pytest.raises(CheckpointError, match=r"lora\.dora is (true|false), adapter_config"):
        load_adapter(tmp_path / "theirs", mismatch, mismatch.config, plain)


def test_magnitudes_start_as_norms_and_a_model_without_adapters_is_as_it_was():
    ours, x = our_model().eval(), tokens(2)
    before = logits(ours, x)
    add_adapters(ours, ours.config.layout, LoRA(rank=2, dora=True))
    with torch.no_grad():
        for name, value in adapters(ours).items():
            value.normal_() if name.endswith("lora_a") else value.zero_()
    start_magnitudes(ours)
    down = ours.layers[1].mlp.down
    torch.testing.assert_close(down.lora_magnitude, down.weight.norm(dim=1))
    torch.testing.assert_close(logits(ours, x), before, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        down.lora_magnitude.mul_(2)
    start_magnitudes(ours)  # what is known stays
    torch.testing.assert_close(down.lora_magnitude, 2 * down.weight.norm(dim=1))
    assert (logits(ours, x) - before).abs().max() > 1e-3
    with without_adapters(ours):
        torch.testing.assert_close(logits(ours, x), before, atol=0, rtol=0)


def test_columns_of_ranks_are_dropped_as_those_of_one():
    x, keys = torch.ones(2, 8, 24), torch.arange(16).view(2, 8) * 12345
    whole = drop(x, 0.3, keys)
    parts = [drop(x[..., :12], 0.3, keys), drop(x[..., 12:], 0.3, keys, first_column=12)]
    assert torch.equal(torch.cat(parts, -1), whole)
    assert (whole == 0).float().mean().item() == pytest.approx(0.3, abs=0.07)
