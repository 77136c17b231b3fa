"""Every family from its recipe to transformers and back: it learns, goes on, and is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import trainer
from tests.cases import quick
from tests.conversion.models import loaded_by_transformers, same_bits, tensors_of
from tests.conversion.run import convert
from tests.model_zoo.peers import in_their_words
from trainer import load_recipe, train
from trainer.engine.conversion.source_weights import hf_parts
from trainer.engine.core.errors import CheckpointError
from trainer.engine.core.registry import models
from trainer.engine.inference.inputs import Dtype
from trainer.engine.inference.open import open_model
from trainer.kernels.cross_entropy.reference import linear_cross_entropy
from trainer.model_zoo.language_model import LanguageModel
from trainer.model_zoo.layers.moe import moe_layers

RECIPES = Path(trainer.__file__).parent / "recipes"
SMALL = {
    "run": {"steps": 12},
    "model": {"n_layers": 2, "dim": 32, "init_std": 0.1},
    "tokenizer": {"name": "bytes"},
    "data": {
        "seq_len": 32,
        "global_batch": 8,
        "micro_batch": 4,
        "packing": "documents",
        "sources": [{"name": "python", "max_bytes": 100_000}],
    },
    "optimizer": {"lr": 1e-2},
    "schedule": {"name": "constant", "warmup_steps": 0},
    "evaluate": {"interval": 0},
    "checkpoint": {"interval": 100, "mode": "sync"},
    "metrics": {"interval": 1},
    "precision": {"compute": "fp32"},
}
GLOBAL = {"aux_weight": 1e-2, "aux_scope": "global"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama3_debug", {}),
    "qwen3": ("llama3_debug", {"name": "qwen3"}),
    "qwen3 with experts": ("moe_debug", {}),
    "mixtral": ("llama3_debug", {"name": "mixtral"}),
    "mistral": ("llama3_debug", {"name": "mistral", "window": 9}),
    "qwen2": ("llama3_debug", {"name": "qwen2"}),
    "olmo2": ("llama3_debug", {"name": "olmo2"}),
    "phi3": ("llama3_debug", {"name": "phi3", "window": 9, "rotary_fraction": 0.75}),
    "gemma2": ("llama3_debug", {"name": "gemma2", "window": 9, "logit_softcap": 5.0}),
    "gemma3": ("llama3_debug", {"name": "gemma3", "window": 9, "full_every": 2}),
    "deepseek_v3": ("deepseek_v3_debug", {"moe": GLOBAL}),
    "deepseek_v2": (
        "deepseek_v3_debug",
        {
            "mtp_depth": 0,
            "moe": {
                **GLOBAL,
                "score": "softmax",
                "balance_bias": False,
                "normalize": False,
                "group_score": "max",
                "groups": 4,
                "groups_per_token": 2,
            },
        },
    ),
    "gpt_oss": ("gpt_oss_debug", {"moe": GLOBAL}),
    "llama4": ("llama4_debug", {"moe": GLOBAL}),
}


def trained(name: str, changes: dict[str, Any], home: Path) -> tuple[Path, list[float]]:
    """Return the directory of a run that was stopped half way, and its losses."""
    values = SMALL | {"model": {**SMALL["model"], **changes}}
    values["run"] = {"steps": 12, "name": "run", "dir": str(home)}
    path = RECIPES / f"{name}.toml"
    assert train(load_recipe(path, values | {"run": {**values["run"], "steps": 7}})).finished
    result = train(load_recipe(path, values))
    assert [row["step"] for row in result.rows] == list(range(1, 13))
    return result.directory, [row["loss"] for row in result.rows]


def gradients(model: LanguageModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return those of the next token's loss, by Hugging Face's names as transformers has them."""
    for layer in moe_layers(model).values():
        layer.loss_factor.zero_()  # transformers adds none to the loss of logits
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    model(tokens, labels=labels, loss=linear_cross_entropy).backward()
    config = model.config
    named = model.named_parameters()
    found = in_their_words(config, {n: w.grad for n, w in named if w.grad is not None})
    return {name.replace("block_sparse_moe", "mlp"): grad for name, grad in found.items()}


@pytest.mark.parametrize(
    "family", quick(MODELS, *(MODELS.keys() - {"mistral", "qwen2", "olmo2", "gemma2"}))
)
def test_it_learns_goes_on_and_is_the_same_in_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, losses = trained(*MODELS[family], tmp_path)
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5, losses
    assert convert("dcp2hf", run, tmp_path / "hf", "--verify") == 0
    assert convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp", "--verify") == 0
    assert convert("dcp2hf", tmp_path / "dcp", tmp_path / "again") == 0
    assert same_bits(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "again"))

    ours = open_model(run, dtype=Dtype.FP32).model
    theirs = loaded_by_transformers(tmp_path / "hf")
    tokens = torch.randint(256, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = ours(tokens)
        assert torch.equal(open_model(tmp_path / "dcp", dtype=Dtype.FP32).model(tokens), logits)
    expected = theirs(tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    their_loss = F.cross_entropy(
        expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )
    their_loss.backward()
    found = gradients(ours, tokens)
    wanted = {name: weight.grad for name, weight in theirs.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name


@pytest.mark.parametrize(
    ("moe", "said"),
    [
        ({"balance_bias": False}, "moe.balance_bias must be True, not False"),
        ({"num_shared": 0}, "moe.num_shared must be 1, not 0"),
        ({"score": "softmax"}, "moe.normalize must be False, not True"),
        ({"groups": 4, "group_score": "max"}, "moe.group_score must be 'top2', not 'max'"),
    ],
)
def test_a_model_that_is_no_other_library_s_is_not_exported(moe: dict[str, Any], said: str) -> None:
    config = models["deepseek_v3"].model_validate({"vocab_size": 64, "moe": moe})
    with pytest.raises(CheckpointError, match="no Hugging Face model is what") as raised:
        hf_parts(config.parameter_shapes(), config)
    assert said in raised.value.message
    hf_parts(config.parameter_shapes(), models["deepseek_v3"].model_validate({"vocab_size": 64}))
