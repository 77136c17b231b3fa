"""Events and warnings of a run in `trainer status` and in the report."""

import json
from pathlib import Path

from tests.report.folders import hundred_steps, make_run
from trainer.cli.status import status
from trainer.engine.core.run_state import RunState, record_attempt
from trainer.engine.report.page import write_page
from trainer.engine.report.status import examine


def test_events_and_the_warnings_of_the_end_are_told(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path / "run", hundred_steps())
    with record_attempt(RunState(total_steps=100), run) as state:
        state.outcome, state.warnings = "finished", ["training diverged: the loss is 9"]
    rows = [{"id": f"spike-{step}", "kind": "spike", "step": step} for step in (7, 40)]
    lines = [*map(json.dumps, rows), '{"id": 3, "kind": "x", "step": 50}', "torn"]
    (run / "events.jsonl").write_text("\n".join(lines))
    found = examine(run)
    assert (found.events, found.newest_event) == (2, "spike-40")
    assert found.warnings == ["training diverged: the loss is 9"]
    status([run])
    out = capsys.readouterr().out
    assert "2, the newest spike-40" in out
    assert "training diverged" in out
    page = write_page([run])
    assert "2, the newest spike-40" in page
    assert "training diverged: the loss is 9" in page
