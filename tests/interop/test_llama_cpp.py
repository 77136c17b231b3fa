"""llama.cpp computes the logits of every family that is written as a GGUF file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversion.models import hf_folder, loaded_by_transformers
from tests.conversion.run import convert
from tests.formats.hf_folders import config_of
from tests.interop.llama_cpp import LlamaCpp

pytestmark = pytest.mark.matrix

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 64}
SIZES = {"dim": 64, "ffn_dim": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": SIZES,
    "llama3, scaled": {
        **SIZES,
        "rope_scaling": {"factor": 8.0, "original_max_seq_len": 32},
    },
    "mistral": {**SIZES, "name": "mistral"},
    "mistral, a window as long as rows": {**SIZES, "name": "mistral", "window": 256},
    "mixtral": {"dim": 64, "name": "mixtral", "moe": EXPERTS},
    "olmo2": {**SIZES, "name": "olmo2"},
    "qwen2": {**SIZES, "name": "qwen2"},
    "qwen3": {**SIZES, "name": "qwen3", "head_dim": 32},
    "qwen3, experts": {"dim": 64, "name": "qwen3", "head_dim": 32, "moe": EXPERTS},
}
LOG_PROBABILITIES = 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_has_the_log_probabilities_of_a_family(family: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", config_of(**FAMILIES[family]))
    assert convert("hf2dcp", folder, tmp_path / "dcp") == 0
    file = tmp_path / "model.gguf"
    assert convert("dcp2gguf", tmp_path / "dcp", file, "--dtype", "fp32") == 0
    theirs, model = LlamaCpp(file, 320), loaded_by_transformers(folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    printable = {number for token, number in tokens.items() if token.isascii() and number}
    generator, compared = torch.Generator().manual_seed(3), 0
    for length in range(1, 60):
        ids = torch.randint(256, (1, length), generator=generator)
        with torch.no_grad():
            wanted = model(ids).logits[0, -1].float().log_softmax(0)
        assert wanted.max() - wanted.min() > 100 * LOG_PROBABILITIES
        # The server says nothing of a token that ends the text or is a part of a character.
        if wanted.argmax().item() not in printable:
            continue
        found = theirs.log_probabilities(ids[0].tolist())
        assert (found - wanted).abs().max() < LOG_PROBABILITIES, length
        compared += 1
    assert compared > 3
