"""The benchmark of kernels goes through all its cases, as on a GPU."""

import json
import subprocess
import sys
from collections import defaultdict

import pytest

from tests.kernels.child import ROOT

OF_GROUPS = {
    "grouped_mm": {"dense", "torch", "torch, max-autotune", "loop", "ours, pointers"},
    "grouped_dw": {"dense", "torch", "loop"},
    "grouped_mm_fp8": {"dense", "dense in bf16", "torch, scales of rows", "ours in bf16"},
    "routing_plan": {"torch"},
    "permute": {"torch"},
    "unpermute": {"torch"},
    "moe_up_swiglu": {"torch's chain", "ours and the plan"},
    "moe_down_combine": {"torch's chain"},
    "cvmm": {"ours in fp8"},
}


@pytest.mark.matrix
def test_a_dry_run_measures_every_baseline_of_every_case(tmp_path):
    out, kept = tmp_path / "rows.jsonl", ROOT / "benchmarks/results/kernels.jsonl"
    before = kept.read_bytes() if kept.exists() else None
    command = [sys.executable, "benchmarks/kernels.py", "--dry", "--write", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    bounds, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert bounds["dense_tflops"] > 0
    assert bounds["dense_fp8_tflops"] > 0
    assert bounds["copy_gbytes"] > 0
    found = defaultdict(set)
    for row in rows:
        # What only newer versions of torch have may fail on others; what is ours may not.
        assert "failed" not in row or row["baseline"].startswith("torch"), row
        found[row["operation"], row["routing"]].add(row["baseline"])
        if "failed" not in row:
            assert row["low"] <= row["milliseconds"] <= row["high"]
            assert row["replayed"]
            fp8 = row["operation"] == "grouped_mm_fp8" or "fp8" in row["baseline"]
            assert 0 <= row["relative_error"] < (0.05 if fp8 else 5e-3), row
    for routing in ("balanced", "multinomial", "zipf"):
        for operation, others in OF_GROUPS.items():
            assert {"ours", *others} <= found[operation, routing]
    for operation in ("rms_norm", "swiglu", "rotary", "quant_act", "linear_cross_entropy"):
        assert {"torch", "ours"} <= found[operation, ""]
    assert len(done.stdout.splitlines()) == len(rows) + 2
    assert (kept.read_bytes() if kept.exists() else None) == before


def test_rows_fall_on_groups_as_routing_makes_them(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from kernel_cases.case import ends

    def sizes(kind):
        host = ends(kind, 4096, 16, seed=0)
        assert host[-1] == 4096
        return [end - start for start, end in zip([0, *host], host, strict=False)]

    assert sizes("balanced") == [256] * 16
    assert all(150 < size < 400 for size in sizes("multinomial"))
    zipf = sizes("zipf")
    assert [group for group, size in enumerate(zipf) if not size] == [3, 11]
    assert zipf[0] > 1000
