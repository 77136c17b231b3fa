"""Training, export and merging agree with Hugging Face's PEFT on the same weights."""

import json

import peft
import pytest
import torch
import torch.nn.functional as F

from tests.model_zoo.peers import our_model, their_model
from trainer.engine.conversion.peft import save_adapter
from trainer.engine.core.errors import CheckpointError, RecipeError
from trainer.engine.lora.adapter_weights import merge_adapters, merged_weights
from trainer.engine.lora.apply import add_adapters, without_adapters
from trainer.engine.lora.tables import LoRA
from trainer.kernels.choose import choose

LOSS = choose({}, "cpu", 16).linear_cross_entropy
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "default": ({}, ALL, {}),
    "attention's q and v": ({"targets": ["*.attention.[qv].weight"]}, ["q_proj", "v_proj"], {}),
    "one layer": (
        {"targets": ["re:^layers\\.1\\.mlp\\.(up|down)"]},
        ["model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"],
        {},
    ),
    "scaled for large ranks": ({"rslora": True}, ALL, {}),
    "tied, another alpha": ({"alpha": 5.0}, ALL, {"tie_embeddings": True}),
}
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1),
}


def pair(table, their_targets, sizes):
    """Return our model with adapters and PEFT's, with equal weights; B is not zero."""
    ours = our_model(**sizes)
    theirs = their_model(ours)
    table = LoRA(**{"rank": 3, "alpha": 6.0} | table)
    add_adapters(ours, ours.config.layout, table)
    settings = peft.LoraConfig(
        r=table.rank,
        lora_alpha=table.alpha,
        use_rslora=table.rslora,
        target_modules=their_targets,
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(theirs, settings)
    generator = torch.Generator().manual_seed(4)
    known = dict(adapted.named_parameters())
    with torch.no_grad():
        for name, value in adapters(ours).items():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
            known[their_name(ours, name)].copy_(value)
    trained = [name for name, value in known.items() if value.requires_grad]
    assert sorted(trained) == sorted(their_name(ours, name) for name in adapters(ours))
    return ours, adapted


def adapters(model):
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def their_name(model, name):
    path, _, leaf = name.rpartition(".")
    theirs = model.config.layout.to_hf(f"{path}.weight").removesuffix(".weight")
    return f"base_model.model.{theirs}.{'lora_A' if leaf == 'lora_a' else 'lora_B'}.default.weight"


def tokens(seed):
    return torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(seed))


def logits(model, x):
    with torch.no_grad():
        found = model(x)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_gradients_and_weights_are_pefts_over_several_steps(targets, optimizer):
    ours, theirs = pair(*TARGETS[targets])
    their_weights = dict(theirs.named_parameters())
    frozen = {name: w.clone() for name, w in ours.named_parameters() if not w.requires_grad}
    steppers = [
        OPTIMIZERS[optimizer]([w for w in model.parameters() if w.requires_grad])
        for model in (ours, theirs)
    ]
    for step in range(5):
        x = tokens(step)
        loss = ours(x[:, :-1], labels=x[:, 1:], loss=LOSS) / 32
        their_loss = F.cross_entropy(theirs(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten())
        assert loss.item() == pytest.approx(their_loss.item(), abs=1e-5)
        loss.backward()
        their_loss.backward()
        for name, value in adapters(ours).items():
            theirs_here = their_weights[their_name(ours, name)]
            torch.testing.assert_close(value.grad, theirs_here.grad, atol=1e-5, rtol=1e-5)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        for name, value in adapters(ours).items():
            theirs_here = their_weights[their_name(ours, name)]
            torch.testing.assert_close(value, theirs_here, atol=1e-5, rtol=1e-5)
    for name, value in ours.named_parameters():
        if name in frozen:
            assert value.grad is None
            assert torch.equal(value, frozen[name])


@pytest.mark.parametrize("targets", TARGETS)
def test_peft_loads_a_saved_adapter_and_gives_our_logits(targets, tmp_path):
    changes, their_targets, sizes = TARGETS[targets]
    ours, _ = pair(changes, their_targets, sizes)
    table = LoRA(**{"rank": 3, "alpha": 6.0} | changes)
    base = their_model(our_model(**sizes))
    x = tokens(9)
    before = logits(base, x)
    save_adapter(tmp_path / "adapter", ours, ours.config, table, base="some/model")
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["target_modules"] == sorted(their_targets)
    assert settings["base_model_name_or_path"] == "some/model"
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded, x), logits(ours, x), atol=1e-5, rtol=1e-5)
    assert (logits(ours, x) - before).abs().max() > 1e-3
    merged = loaded.merge_and_unload().state_dict()
    weights = merged_weights(ours)
    assert weights.keys() == dict(our_model(**sizes).named_parameters()).keys()
    for name, value in weights.items():
        theirs = merged[ours.config.layout.to_hf(name)]
        torch.testing.assert_close(value, theirs, atol=1e-6, rtol=1e-6)


def test_merging_in_place_leaves_a_plain_model_with_the_same_logits():
    ours, _ = pair({}, ALL, {})
    x = tokens(9)
    expected = logits(ours, x)
    merge_adapters(ours)
    torch.testing.assert_close(logits(ours, x), expected, atol=1e-5, rtol=1e-5)
    assert ours.state_dict().keys() == our_model().state_dict().keys()


def test_without_adapters_a_model_computes_as_pefts_with_them_disabled():
    ours, theirs = pair({}, ALL, {})
    x = tokens(9)
    adapted = logits(ours, x)
    with without_adapters(ours), theirs.disable_adapter():
        torch.testing.assert_close(logits(ours, x), logits(theirs, x), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(logits(ours, x), adapted)
    torch.testing.assert_close(logits(ours, x), adapted, atol=0, rtol=0)


def test_an_adapter_is_not_written_over_anything(tmp_path):
    ours, _ = pair({}, ALL, {})
    (tmp_path / "taken").mkdir()
    with pytest.raises(RecipeError, match="taken exists: not replaced"):
        save_adapter(tmp_path / "taken", ours, ours.config, LoRA(rank=3))
    with pytest.raises(CheckpointError, match="no adapters"):
        save_adapter(tmp_path / "new", our_model(), ours.config, LoRA(rank=3))
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
