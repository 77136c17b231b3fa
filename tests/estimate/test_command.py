"""`trainer estimate-memory`: what it prints, and what it refuses."""

import json

import pytest

from tests.commands import run_in_process
from trainer.engine.estimate.devices import FRAGMENTATION

RECIPE = """
[run]
steps = 20
[model]
dim = 64
n_layers = 2
vocab_size = 512
[data]
seq_len = 64
global_batch = 8
micro_batch = 4
[[data.sources]]
name = "synthetic"
"""


@pytest.fixture
def command(capsys, tmp_path):
    """Run the command on a small recipe; return exit code, output and errors."""
    (tmp_path / "small.toml").write_text(RECIPE)

    def command(*options):
        return run_in_process(capsys, "estimate-memory", str(tmp_path / "small.toml"), *options)

    return command


def test_json_adds_up(command):
    code, out, _ = command("--json", "--gpu", "h200")
    found = json.loads(out)
    (rank,) = found["ranks"]
    assert code == 0
    assert sum(rank["at_peak"].values()) == rank["peak_bytes"]
    assert rank["margins"]["fragmentation"] == int(FRAGMENTATION * rank["peak_bytes"])
    assert rank["total_bytes"] == rank["peak_bytes"] + sum(rank["margins"].values())
    assert found["left_bytes"] == 143_771 * 2**20 - rank["total_bytes"]
    assert "NCCL" not in rank["margins"]  # one rank has nobody to talk to
    assert "knobs" not in found  # it fits


def test_ragged_rows_are_counted_in_full_and_the_output_says_so(command):
    _, padded, _ = command("--json", "--set", "data.packing=none")
    code, out, _ = command("--json", "--set", "data.packing=ragged")
    found, rows = json.loads(out), "rows are ragged: each is counted as 64 tokens, an upper bound"
    assert (code, found["row_lengths"], json.loads(padded)["row_lengths"]) == (0, rows, "")
    peaks = [each["ranks"][0]["peak_bytes"] for each in (found, json.loads(padded))]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)
    assert command("--set", "data.packing=ragged")[1].splitlines()[-1] == rows


@pytest.mark.matrix
def test_knobs_are_simulated_and_sorted(command):
    code, out, _ = command("--json", "--knobs", "--set", "memory.recompute=selective")
    assert code == 0
    found = json.loads(out)["knobs"]
    saved = [knob["saved_bytes"] for knob in found]
    assert saved == sorted(saved, reverse=True)
    assert all(each > 0 for each in saved)
    halved = next(knob for knob in found if knob["changes"] == ["data.micro_batch=2"])
    code, out, _ = command("--json", "--set", "memory.recompute=selective")
    before = json.loads(out)["ranks"][0]["peak_bytes"]
    code, out, _ = command(
        "--json", "--set", "memory.recompute=selective", "--set", "data.micro_batch=2"
    )
    assert before - json.loads(out)["ranks"][0]["peak_bytes"] == halved["saved_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world", "0"], "--world"),
        (["--world", "3"], "3 data ranks"),
        (["--gpu", "h10"], 'did you mean "h100"'),
        (["--gpu", "toaster"], "known: "),
        (["--gpu", "h100", "--cpu"], "--gpu with --cpu"),
        (["--knobs", "--cpu"], "--knobs with --cpu"),
    ],
)
def test_what_cannot_be_estimated_is_refused(command, options, message):
    code, out, err = command(*options)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    "setting", ["kernels.linear_cross_entropy=compiled", "compile.enabled=true"]
)
def test_compiled_kernels_are_counted_as_torchs(command, setting):
    found = []
    for more in ([], ["--set", setting]):
        code, out, err = command("--json", *more)
        assert code == 0, err
        found.append(json.loads(out)["ranks"][0]["peak_bytes"])
    assert found[0] == found[1]
