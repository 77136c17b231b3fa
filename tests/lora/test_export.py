"""Adapters written for PEFT: complete or absent, and whatever the checkpoint says."""

import pytest
import torch

from tests.checkpoint.states import seal
from tests.distributed import run_ranks
from tests.model_zoo.peers import our_model
from trainer.cli.main import _run
from trainer.engine.checkpoint.manifest import SaveInfo
from trainer.engine.checkpoint.store import CheckpointStore
from trainer.engine.conversion.peft import export_adapter, save_adapter
from trainer.engine.core.errors import EnvironmentFault
from trainer.engine.lora.apply import add_adapters
from trainer.engine.lora.tables import LoRA

Q = "model.layers.0.attention.q"
RECIPE = {"run": {"steps": 1}, "model": {"name": "llama3"}, "lora": {"rank": 4, "alpha": 8.0}}


def saved(folder, **changes):
    """Save a weight with its adapter."""
    state = {f"{Q}.weight": torch.zeros(8, 6), f"{Q}.lora_a": torch.ones(4, 6)}
    state |= {f"{Q}.lora_b": torch.ones(8, 4)} | changes
    store = CheckpointStore(folder, mode="sync", keep=1, group=None)
    store.probe()
    store.save(state, SaveInfo(step=1, recipe=RECIPE))
    return folder / "step-00000001"


def refused(source, target, capsys, code=5):
    assert _run(["convert-ckpt", "dcp2peft", str(source), str(target)]) == code
    said = capsys.readouterr().err
    assert "unexpected" not in said
    assert not target.exists()
    assert not list(target.parent.glob(".*"))
    return said


def test_an_adapter_is_written(tmp_path):
    assert export_adapter(saved(tmp_path / "run"), tmp_path / "new" / "adapter") == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m["recipe"].update(lora=3), "does not fit this version: lora"),
        (lambda m: m["recipe"].update(plugins=[3]), "does not fit this version: plugins"),
        (lambda m: m["recipe"].update(model={"name": "mine"}), "does not fit this version: model"),
        (lambda m: m["tensors"][f"{Q}.lora_a"].update(shape=[2**40, 2**40]), "do not make it up"),
        (lambda m: m["tensors"][f"{Q}.lora_a"].update(dtype="load"), "dtype that is not read"),
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path, change, reason, capsys):
    source = saved(tmp_path / "run")
    seal(source, change)
    assert reason in refused(source, tmp_path / "adapter", capsys)


@pytest.mark.parametrize(
    "changes", [{f"{Q}.lora_a": torch.ones(3, 6)}, {"model.layers.0.mlp.up.lora_b": torch.ones(3)}]
)
def test_adapters_that_do_not_fit_are_refused(tmp_path, changes, capsys):
    source = saved(tmp_path / "run", **changes)
    assert "has adapters that do not fit" in refused(source, tmp_path / "adapter", capsys)


def test_a_folder_that_cannot_be_made_is_said(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "adapter"
    assert f"cannot write to {target.parent}: Not a directory" in refused(
        saved(tmp_path / "run"), target, capsys, code=3
    )


def save_below_a_file(path):
    import torch.distributed as dist

    model = our_model()
    add_adapters(model, model.config.layout, LoRA(rank=2))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    try:
        save_adapter(path, model, model.config, LoRA(rank=2), group=dist.new_group())
    except EnvironmentFault as error:
        return error.message
    return ""


def test_all_ranks_learn_that_the_first_could_not_write(tmp_path):
    (tmp_path / "file").write_text("")
    messages = run_ranks(2, save_below_a_file, tmp_path / "file" / "adapter")
    assert all("cannot write to" in message for message in messages)
