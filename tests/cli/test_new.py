"""A recipe that trains a Hugging Face folder further."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conversion.models import hf_folder
from tests.formats.hf_folders import config_of
from trainer import load_recipe
from trainer.cli.main import _run
from trainer.engine.recipe import read

FACTORS = {"short_factor": [1.0, 1.5], "long_factor": [4.0, 8.0]}
MODELS: dict[str, dict[str, Any]] = {
    "llama3": {"norm_eps": 1e-4, "max_seq_len": 64, "tie_embeddings": True},
    "mixtral": {"moe": {"num_experts": 3, "expert_ffn_dim": 24}},
    "phi3": {"rotary_fraction": 0.5, "rope_scaling": FACTORS},
    "gpt_oss": {"window": 9, "rope_scaling": {"factor": 4.0, "attention_factor": 1.5}},
}


@pytest.mark.parametrize("family", MODELS)
def test_a_recipe_takes_model_sizes_and_tokenizer_of_a_folder(family: str, tmp_path: Path) -> None:
    config = config_of(family, **MODELS[family])
    folder = hf_folder(tmp_path / "hf", config)
    path = tmp_path / "tuned.toml"
    assert _run(["new", str(path), "--from-hf", str(folder)]) == 0
    assert _run(["validate", str(path)]) == 0
    recipe = load_recipe(path)
    computed = {"flavor", "head_dim"}
    if family != "llama3":
        config = type(config).from_hf_config(json.loads((folder / "config.json").read_text()))
    assert recipe.model.model_dump(exclude=computed) == config.model_dump(exclude=computed)
    assert (recipe.run.init_from, recipe.tokenizer.name) == (str(folder), "hf")
    assert recipe.data.seq_len == min(config.max_seq_len, 2048)


def test_the_path_of_the_schema_starts_at_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    path = tmp_path / "link" / "below" / "first.toml"
    assert _run(["new", str(path)]) == 0
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("#:schema ")]
    name = line.removeprefix("#:schema ")
    assert not Path(name).is_absolute()
    assert (path.parent.resolve() / name).samefile(read.RECIPES / "schema.json")


def test_folders_without_a_language_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tuned.toml"
    assert _run(["new", str(path), "--from-hf", str(tmp_path)]) == 5
    assert "has no config.json" in capsys.readouterr().err
    folder = hf_folder(tmp_path / "hf", config_of(), tokenizer=False)
    assert _run(["new", str(path), "--from-hf", str(folder)]) == 5
    assert "has no tokenizer.json" in capsys.readouterr().err
    assert not path.exists()
