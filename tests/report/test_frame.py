"""A run's metrics as a pandas frame."""

import math
import subprocess
import sys

import pytest

from trainer import load_metrics
from trainer.engine.core.errors import DataError, EnvironmentFault
from trainer.engine.observe.metrics import MetricsLog


def write_rows(folder, resume_step, *rows):
    log = MetricsLog(folder / "metrics.jsonl", resume_step)
    for kind, step, loss in rows:
        log.write({"kind": kind, "step": step, "loss": loss})
    log.close()


def test_a_frame_has_the_rows_of_a_resumed_run_once(tmp_path):
    pytest.importorskip("pandas")
    write_rows(tmp_path, 0, ("train", 1, 5.0), ("eval", 1, 5.5), ("train", 2, 4.0))
    write_rows(tmp_path, 1, ("train", 2, 3.0), ("train", 3, math.inf))
    frame = load_metrics(tmp_path)
    assert frame["kind"].tolist() == ["train", "eval", "train", "train"]
    train = frame[frame["kind"] == "train"]
    assert train["step"].tolist() == [1, 2, 3]
    assert train["loss"].tolist() == [5.0, 3.0, math.inf]


def test_a_folder_without_metrics_is_named(tmp_path):
    pytest.importorskip("pandas")
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be read: No such file"):
        load_metrics(tmp_path)


def test_a_machine_without_pandas_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(EnvironmentFault, match="needs the package pandas") as caught:
        load_metrics(tmp_path)
    assert "pip install pandas" in caught.value.hint


def test_the_import_loads_neither_torch_nor_pandas():
    code = (
        "import sys\nfrom trainer import load_metrics\n"
        "assert not {'torch', 'pandas'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
