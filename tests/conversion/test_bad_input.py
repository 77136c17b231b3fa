"""What does not fit is said, all at once; nothing is begun under the target's name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conversion.meta_reference import PARAMS, weights
from tests.conversion.meta_reference import write as write_meta
from tests.conversion.models import hf_folder
from tests.conversion.run import convert, refused
from tests.formats.hf_folders import config_of
from trainer.engine.conversion import writing
from trainer.engine.conversion.convert import CONVERSIONS

Capture = pytest.CaptureFixture[str]
WAYS = [way for way in CONVERSIONS if way != "titan2dcp"]
"""those that need no recipe; `test_titan` has the other"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One good source of each kind, by the first half of a sub-command's name."""
    root = tmp_path_factory.mktemp("sources")
    found = {
        "hf": hf_folder(root / "hf", config_of()),
        "dcp": root / "dcp",
        "meta": write_meta(root / "meta", weights(PARAMS), PARAMS),
        "torch": root / "hf" / "model.pt",
        "gguf": root / "model.gguf",
        "titan": root / "hf",  # for what is refused before a source is opened
    }
    torch.save(load_file(root / "hf" / "model.safetensors"), found["torch"])
    assert convert("hf2dcp", found["hf"], found["dcp"]) == 0
    assert convert("dcp2gguf", found["dcp"], found["gguf"]) == 0
    return found


def kind(way: str) -> str:
    return way.partition("2")[0]


@pytest.mark.parametrize("way", WAYS)
def test_each_way_works_and_an_existing_target_is_not_replaced(
    sources: dict[str, Path], tmp_path: Path, way: str, capsys: Capture
) -> None:
    source = sources[kind(way)]
    assert convert(way, source, tmp_path / "out") == 0
    assert "MB," in capsys.readouterr().out
    for target in (tmp_path / "out", tmp_path):
        said = refused(capsys, 2, way, source, target)
        assert f"{target} exists: not replaced; remove it, or give another name" in said


@pytest.mark.parametrize("way", list(CONVERSIONS))
def test_a_source_that_is_not_there_is_refused(tmp_path: Path, way: str, capsys: Capture) -> None:
    missing = tmp_path / "missing"
    assert str(missing) in refused(capsys, 5, way, missing, tmp_path / "out")


@pytest.mark.parametrize("way", list(CONVERSIONS))
def test_a_source_of_the_other_kind_is_refused(
    sources: dict[str, Path], tmp_path: Path, way: str, capsys: Capture
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"text")
    other = tmp_path / ("folder" if way == "torch2dcp" else "file")
    assert str(other) in refused(capsys, 5, way, other, tmp_path / "out")


@pytest.mark.parametrize("way", [way for way in CONVERSIONS if way != "torch2dcp"])
def test_a_target_inside_the_source_is_refused(
    sources: dict[str, Path], way: str, capsys: Capture
) -> None:
    source = sources[kind(way)]
    said = refused(capsys, 2, way, source, source / "deep" / "out")
    assert "lies inside of" in said
    assert not (source / "deep").exists()


@pytest.mark.parametrize("way", [*CONVERSIONS, "dcp2peft"])
@pytest.mark.parametrize("name", ["a" * 300, "circle"])
def test_names_that_cannot_be_used_are_refused(
    sources: dict[str, Path], tmp_path: Path, way: str, name: str, capsys: Capture
) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for source, target in ((tmp_path / name, "out"), (sources[kind(way)], f"{name}/out")):
        assert convert(way, source, tmp_path / target) in (2, 5)
        assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "int4"], "--dtype"),
        (["--shard-size", "five"], "--shard-size five is no size"),
        (["--shard-size", "0GB"], "--shard-size 0GB is no size"),
        (["--recipe", "nowhere.toml"], "nowhere.toml"),
        (["--weights", "best"], "--weights"),
        (["--plugin", "no_such_module"], "no_such_module"),
        (["--unknown"], "--unknown"),
    ],
)
def test_wrong_options_are_refused(
    sources: dict[str, Path], tmp_path: Path, words: list[str], message: str, capsys: Capture
) -> None:
    capsys.readouterr()
    assert convert("dcp2hf", sources["dcp"], tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_average_that_was_not_kept_is_refused(
    sources: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    words = ["dcp2hf", sources["dcp"], tmp_path / "out", "--weights", "ema"]
    assert 'no weights of the section "ema"; it holds: model' in refused(capsys, 5, *words).replace(
        "\n  hint: ", "; "
    )


def misfit(tensors: dict[str, torch.Tensor], norm: str, up: str) -> dict[str, torch.Tensor]:
    """Rename a norm, give a projection another shape, and add a bias."""
    changed = {name: tensor for name, tensor in tensors.items() if name != norm}
    changed[norm.replace("weight", "wieght")] = tensors[norm]
    return {**changed, up: torch.zeros(5, 32), "layers.7.bias": torch.zeros(3)}


CASES: dict[str, tuple[str, str, str]] = {
    "hf2dcp": ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "the folder"),
    "hf2hf": ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "the folder"),
    "torch2dcp": ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "the file"),
    "meta2dcp": ("norm.weight", "layers.0.feed_forward.w3.weight", "consolidated.00.pth"),
}


@pytest.mark.parametrize("way", list(CASES))
def test_names_that_do_not_fit_are_reported_at_once(tmp_path: Path, way: str, capsys: Any) -> None:
    norm, up, place = CASES[way]
    if way == "meta2dcp":
        tensors = misfit(weights(PARAMS), norm, up)
        source = write_meta(tmp_path / "source", tensors, PARAMS)
    else:
        source = hf_folder(tmp_path / "source", config_of(), tokenizer=False)
        file = source / "model.safetensors"
        tensors = misfit(load_file(file), norm, up)
        if way == "torch2dcp":
            torch.save(tensors, source := source / "model.pt")
        else:
            save_file(tensors, file)
    said = refused(capsys, 5, way, source, tmp_path / "out")
    wrong = norm.replace("weight", "wieght")
    width = 112 if way == "meta2dcp" else 48
    for line in (
        f'{norm} (head.norm.weight here) is not in {place}; did you mean "{wrong}"?',
        f"{wrong} is in {place} but not in the model",
        f"{up} is [5, 32] there and [{width}, 32] here (layers.0.mlp.up.weight)",
        f"layers.7.bias is in {place} but not in the model",
    ):
        assert line in said


def test_a_recipe_of_another_model_is_refused(
    sources: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[run]\nsteps = 1\n[model]\ndim = 64\nn_heads = 8\nn_kv_heads = 2\n")
    words = [sources["hf"], tmp_path / "out", "--recipe", recipe]
    said = refused(capsys, 5, "hf2dcp", *words)
    assert "model.dim is 64, config.json says 32" in said
    assert "set in [model]: dim = 32" in said
    said = refused(capsys, 5, "dcp2hf", sources["dcp"], *words[1:])
    assert "embed.weight is [320, 32] there and [320, 64] here" in said


def test_a_state_dict_alone_does_not_say_what_it_is_of(
    sources: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    alone = tmp_path / "model.pt"
    alone.write_bytes(sources["torch"].read_bytes())
    said = refused(capsys, 5, "torch2dcp", alone, tmp_path / "out")
    assert "does not say what model it is of" in said
    assert "--recipe" in said


def test_a_tokenizer_that_is_not_there_is_refused(
    sources: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    words = ["hf2dcp", sources["hf"], tmp_path / "out", "--tokenizer", tmp_path / "none"]
    assert str(tmp_path / "none") in refused(capsys, 4, *words)


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path: Path, capsys: Any) -> None:
    source = hf_folder(tmp_path / "hf", config_of(vocab_size=256), tokenizer=False)
    words = ["hf2dcp", source, tmp_path / "out", "--tokenizer", "bytes"]
    assert "256 rows cannot embed the 257 tokens" in refused(capsys, 5, *words)


def test_a_full_disk_leaves_nothing(
    sources: dict[str, Path], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(writing, "_write_at", full)
    for way in WAYS:
        said = refused(capsys, 5, way, sources[kind(way)], tmp_path / "out")
        assert "no space" in said


def test_verify_finds_what_was_written_wrongly(
    sources: dict[str, Path], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_at = writing._write_at

    def flipped(descriptor: int, position: int, block: memoryview) -> int:
        changed = bytearray(block)
        if len(changed) == 32 * 4:  # a norm
            changed[5] ^= 16
        return write_at(descriptor, position, memoryview(changed))

    monkeypatch.setattr(writing, "_write_at", flipped)
    for way in ("hf2dcp", "dcp2hf", "dcp2torch"):
        assert convert(way, sources[kind(way)], tmp_path / way) == 0
        said = refused(capsys, 5, way, sources[kind(way)], tmp_path / "out", "--verify")
        assert "what was written differs from" in said
        assert "layers.1.mlp.norm.weight" in said


def test_a_kill_leaves_nothing_under_the_target(sources: dict[str, Path], tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from trainer.engine.conversion import writing\n"
        "write_at = writing._write_at\n"
        "def slow(*words):\n"
        "    print('writing', flush=True); time.sleep(0.2); return write_at(*words)\n"
        "writing._write_at = slow\n"
        "from trainer.cli.main import main\n"
        "main(['convert-ckpt', *sys.argv[1:]])\n"
    )
    words = ["hf2dcp", str(sources["hf"]), str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "out").exists()
    assert [path.name.startswith(".tmp-out-") for path in tmp_path.iterdir()] == [True]
    assert convert(*words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
