"""Fifos and devices in the place of files: a message at once, never a hang or a full memory."""

import os
from pathlib import Path

import pytest

import trainer
from trainer.cli import main as cli

DEBUG = str(Path(trainer.__file__).parent / "recipes" / "llama3_debug.toml")
STEP = "checkpoints/step-00000001"
RUN = (
    "metrics.jsonl", "state.json", "recipe.toml", "events.jsonl", "profiles/summary.json",
    f"{STEP}/manifest.json", f"{STEP}/index.json", f"{STEP}/shard-00000.safetensors",
)  # fmt: skip
HF = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
META = ("params.json", "consolidated.00.pth", "tokenizer.model")
TOKENS = ("tokens.json", "offsets.npy", "tokens-00000.bin")

CASES = [
    (("status", "x"), ("x/.lock", *(f"x/{name}" for name in RUN))),
    (("report", "x", "--out", "page.html"), ("x/.lock", *(f"x/{name}" for name in RUN))),
    (("checkpoint", "list", "x"), [f"x/{name}" for name in RUN]),
    (("checkpoint", "inspect", "x"), [f"x/{name}" for name in RUN]),
    (("checkpoint", "verify", "x"), [f"x/{name}" for name in RUN]),
    (("checkpoint", "prune", "x", "--keep", "1"), ("x/.lock", *(f"x/{name}" for name in RUN))),
    (("generate", "x"), [f"x/{name}" for name in RUN]),
    (("generate", "x"), [f"x/{name}" for name in HF]),
    (("evaluate", "x"), [f"x/{name}" for name in HF]),
    (("convert-ckpt", "dcp2hf", "x", "out"), [f"x/{name}" for name in RUN]),
    (("convert-ckpt", "hf2dcp", "x", "out"), [f"x/{name}" for name in HF]),
    (("convert-ckpt", "meta2dcp", "x", "out"), [f"x/{name}" for name in META]),
    (("convert-ckpt", "torch2dcp", "x.pt", "out"), ["x.pt"]),
    (("data", "inspect", "x"), [f"x/{name}" for name in TOKENS]),
    (("data", "inspect", "x.toml"), ["x.toml"]),
    (("data", "prepare", "x.jsonl", "--out", "out"), ["x.jsonl"]),
    (("data", "prepare", "x.parquet", "--out", "out"), ["x.parquet"]),
    (("data", "prepare", "saved", "--out", "out"), ["saved/data-00000-of-00001.arrow"]),
    (("validate", "x.toml"), ["x.toml"]),
    (("validate", "extending.toml"), ["x.toml"]),
    (("sweep", DEBUG, "--grid", "run.seed=1", "--dir", "x", "--dry-run"), ["x/sweep.json"]),
    (
        ("run", DEBUG, "--set", "parallel.pipelining.csv=x.csv", "--set", "parallel.pipeline=2"),
        ["x.csv"],
    ),
    (
        ("run", DEBUG, "--dry-run", "--set", "tokenizer={name='hf', path='x'}"),
        [f"x/{name}" for name in HF],
    ),
    (
        ("run", DEBUG, "--dry-run", "--set", "tokenizer={name='tiktoken', path='x.model'}"),
        ["x.model"],
    ),
    (("run", DEBUG, "--set", "run.resume=x"), [f"x/{name}" for name in RUN]),
    (("run", DEBUG, "--dry-run", "--set", "run.init_from=x"), [f"x/{name}" for name in HF]),
    (("run", DEBUG, "--set", "run.dir=.", "--set", "run.name=x"), ["x/.lock"]),
    (("run", DEBUG, "--set", "run.dir=.", "--set", "run.name=x"), [f"x/{name}" for name in RUN]),
    (
        ("run", DEBUG, "--set", "run.dir=.", "--set", "run.name=x", "--set", "run.steps=1"),
        ["x/metrics.jsonl", "x/events.jsonl"],
    ),
]  # fmt: skip


def put(kind, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize(
    "case", range(len(CASES)), ids=lambda case: f"{case}-{' '.join(CASES[case][0][:2])[:30]}"
)
def test_what_is_no_regular_file_is_refused_at_once(case, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "extending.toml").write_text('extends = ["x.toml"]\n')
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text('{"_fingerprint": "x", "_data_files": []}')
    words, names = CASES[case]
    for name in names:
        put(kind, tmp_path / name)
    with pytest.raises(SystemExit) as stop:
        cli.main(list(words))
    texts = capsys.readouterr()
    assert "unexpected" not in texts.err
    assert stop.value.code in (0, 2, 3, 4, 5), texts.err
    assert stop.value.code or words[0] in ("status", "report", "checkpoint", "sweep")
