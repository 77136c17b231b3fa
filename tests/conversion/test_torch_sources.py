"""State dictionaries as others save them: wrapped, tied, with what old versions left in them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conversion.models import hf_folder, same_bits, tensors_of
from tests.conversion.run import convert, refused
from tests.formats.hf_folders import config_of

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("tied") / "hf", config_of(tie_embeddings=True))


def own_names(state: State) -> State:
    layout = config_of().layout
    return {layout.from_hf(name) or "": tensor for name, tensor in state.items()}


FORMS: dict[str, Callable[[State], State]] = {
    "as transformers' files": lambda s: s,
    "with both ends": lambda s: s | {HEAD: s[EMBED]},
    "compiled": lambda s: {f"_orig_mod.{name}": tensor for name, tensor in s.items()},
    "old": lambda s: s | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    "inside a module": lambda s: {f"module.model.{name}": tensor for name, tensor in s.items()},
    "our names": own_names,
    "our names inside a module": lambda s: {f"model.{n}": t for n, t in own_names(s).items()},
}


@pytest.mark.parametrize("recipe", [False, True])
@pytest.mark.parametrize("form", list(FORMS))
def test_a_state_dict_of_a_tied_model_is_read(
    tied: Path, tmp_path: Path, form: str, recipe: bool
) -> None:
    source, words = tmp_path / "model.pt", []
    torch.save(FORMS[form](tensors_of(tied)), source)
    if recipe:
        sizes = config_of(tie_embeddings=True).model_dump(exclude_defaults=True)
        table = "\n".join(f"{key} = {str(value).lower()}" for key, value in sizes.items())
        (tmp_path / "model.toml").write_text(f"run.steps = 1\n[model]\n{table}\n")
        words = ["--recipe", tmp_path / "model.toml"]
    else:
        shutil.copy(tied / "config.json", tmp_path)
    assert convert("torch2dcp", source, tmp_path / "dcp", *words) == 0
    assert convert("dcp2hf", tmp_path / "dcp", tmp_path / "hf") == 0
    assert same_bits(tensors_of(tied), tensors_of(tmp_path / "hf"))


REFUSED: dict[str, tuple[Callable[[State], State], str]] = {
    "two ends": (lambda s: s | {HEAD: s[EMBED] + 1}, f"{HEAD} is there and differs from {EMBED}"),
    "a head of another type": (lambda s: s | {HEAD: s[EMBED].int()}, "is there and differs from"),
    "quantized": (lambda s: s | {EMBED: s[EMBED].char()}, f"{EMBED} is stored as torch.int8"),
    "quantized, our names": (
        lambda s: {name: tensor.char() for name, tensor in own_names(s).items()},
        "holds more than plain weights:\n  embed.weight is torch.int8",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_weights_of_another_model_are_refused(
    tied: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = REFUSED[case]
    shutil.copy(tied / "config.json", tmp_path)
    torch.save(change(tensors_of(tied)), tmp_path / "model.pt")
    assert message in refused(capsys, 5, "torch2dcp", tmp_path / "model.pt", tmp_path / "dcp")
