"""A state that does not fit is refused with all its find_mismatches, before a tensor is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.manifest import SaveInfo
from trainer.engine.checkpoint.reader import load_state
from trainer.engine.core.errors import CheckpointError, ExitCode

from .states import open_store


def saved_state() -> dict[str, Tensor]:
    return {
        "model.layers.0.up.weight": torch.ones(4, 2),
        "model.layers.0.down.weight": torch.ones(3, 3),
        "optimizer.layers.0.up.weight.exp_avg": torch.ones(4, 2),
        "rng.0.torch": torch.ones(8),
        "rng.1.torch": torch.full((8,), 2.0),
    }


def load_into(folder: Path, state: dict[str, Tensor]) -> None:
    open_store(folder).save(saved_state(), SaveInfo(step=1))
    found = find_checkpoint(folder)
    load_state(found.path, found.manifest, state, None)


def refusal(folder: Path, state: dict[str, Tensor]) -> str:
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(CheckpointError) as raised:
        load_into(folder, state)
    assert raised.value.exit_code == ExitCode.CHECKPOINT
    assert all(torch.equal(before[name], tensor) for name, tensor in state.items()), "touched"
    return raised.value.render()


def blank() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in saved_state().items()}


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    state = blank() | {"model.layers.0.up.weight": torch.zeros(4, 2, dtype=torch.bfloat16)}
    message = refusal(tmp_path, state)
    assert "model.layers.0.up.weight is float32 [4, 2] there and bfloat16 [4, 2] here" in message


def test_a_transposed_matrix_is_refused(tmp_path: Path) -> None:
    state = blank() | {"model.layers.0.up.weight": torch.zeros(2, 4)}
    assert "is float32 [4, 2] there and float32 [2, 4] here" in refusal(tmp_path, state)


def test_a_square_matrix_under_another_name_is_refused_with_the_nearest_name(
    tmp_path: Path,
) -> None:
    state = blank()
    state["model.layers.0.down_t.weight"] = state.pop("model.layers.0.down.weight")
    message = refusal(tmp_path, state)
    assert (
        "model.layers.0.down_t.weight is not in the checkpoint; "
        'did you mean "model.layers.0.down.weight"?'
    ) in message
    assert "model.layers.0.down.weight is in the checkpoint but not here" in message


def test_all_misfits_are_listed_at_once(tmp_path: Path) -> None:
    state = blank() | {"model.layers.0.up.weight": torch.zeros(2, 4), "model.new": torch.zeros(1)}
    del state["optimizer.layers.0.up.weight.exp_avg"]
    state["optimizer.other.exp_avg"] = torch.zeros(1)
    message = refusal(tmp_path, state)
    for part in ("[2, 4] here", "model.new is not", "exp_avg is in the", "other.exp_avg is not"):
        assert part in message


def test_very_many_misfits_are_counted(tmp_path: Path) -> None:
    state = blank() | {f"model.extra.{i}": torch.zeros(1) for i in range(5000)}
    assert "and 4980 more" in refusal(tmp_path, state)


def test_weights_alone_can_be_taken_from_a_full_checkpoint(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in blank().items() if name.startswith("model.")}
    load_into(tmp_path, state)
    assert all(tensor.unique().tolist() == [1] for tensor in state.values())


def test_each_rank_asks_for_its_own_random_state_only(tmp_path: Path) -> None:
    state = blank()
    del state["rng.0.torch"]
    load_into(tmp_path, state)
    assert state["rng.1.torch"].unique().tolist() == [2]


def test_a_random_state_that_was_not_saved_is_a_misfit(tmp_path: Path) -> None:
    state = blank() | {"rng.2.torch": torch.zeros(8)}
    assert "rng.2.torch is not in the checkpoint" in refusal(tmp_path, state)


def test_weights_only_are_refused_where_a_run_would_go_on(tmp_path: Path) -> None:
    weights = {"model.a": torch.ones(2)}
    open_store(tmp_path).save(weights, SaveInfo(step=1, contents="weights"))
    found = find_checkpoint(tmp_path)
    state = {"model.a": torch.zeros(2), "optimizer.a.exp_avg": torch.zeros(2)}
    with pytest.raises(CheckpointError, match="holds weights only") as raised:
        load_state(found.path, found.manifest, state, None)
    assert "run.init_from" in raised.value.hint
