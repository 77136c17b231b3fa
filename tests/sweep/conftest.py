from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweep.commands import RECIPE, Command
from trainer.cli import main as cli


@pytest.fixture
def command(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Run a command line in this process; return exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE)

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert isinstance(stop.value.code, int)
        return (int(stop.value.code), *capfd.readouterr())

    return command
