"""Conversion holds a few blocks of a model at a time, however large it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.formats.hf_folders import config_of
from trainer.engine.conversion.hf_files import lay_out
from trainer.engine.conversion.writing import create_file
from trainer.engine.parallel.materialize import without_storage
from trainer.kernels.choose import choose
from trainer.model_zoo.language_model import LanguageModel
from trainer.model_zoo.llama3.config import Llama3Config


def model_on_meta(config: Llama3Config) -> LanguageModel:
    with without_storage():
        return config.build(choose({}, "cpu", 64))


@pytest.mark.matrix
@pytest.mark.slow
def test_memory_stays_within_its_bound(tmp_path: Path) -> None:
    """Twice the largest tensor and 1 GB; what Python and torch take themselves is in it."""
    config = config_of(dim=2048, n_layers=40, ffn_dim=4096, vocab_size=3200, tie_embeddings=True)
    forms = {
        config.layout.to_hf(name) or "": (torch.bfloat16, tuple(parameter.shape))
        for name, parameter in model_on_meta(config).named_parameters()
    }
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config.hf_config()))
    [(file, layout)] = lay_out(forms, 10**12).items()
    create_file(source / file, layout.size, layout.head)  # zeros that take no space
    largest = 2 * 2048 * 4096
    assert layout.size > 2 * 10**9
    script = (
        "import sys\n"
        "from trainer.cli.main import _run\n"
        "code = _run(['convert-ckpt', *sys.argv[1:]])\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], code)\n"
    )
    for way, place in (("hf2dcp", source), ("dcp2hf", tmp_path / "hf2dcp")):
        words = [way, str(place), str(tmp_path / way), "--verify"]
        command = [sys.executable, "-c", script, *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peak, code = map(int, done.stdout.split("\n")[-2].split())
        assert code == 0
        assert peak * 1024 < 2 * largest + 10**9, f"{peak / 1e6:.2f} GB"
