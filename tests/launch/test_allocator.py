"""The GPU allocator grows its segments, unless the user has set it otherwise."""

import os
import sys

import pytest

from trainer.cli import entry


@pytest.mark.parametrize("theirs", [None, *entry.ALLOCATOR_SETTINGS])
def test_segments_are_expandable_unless_the_user_has_settings(theirs, monkeypatch):
    for name in entry.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if theirs:
        monkeypatch.setenv(theirs, "max_split_size_mb:64")
    monkeypatch.setattr(entry.signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr(entry.gc, "set_threshold", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["trainer", "--version"])
    with monkeypatch.context() as patch:
        patch.setattr("trainer.cli.main.main", lambda: None)
        entry.main()
    found = {name: os.environ.get(name) for name in entry.ALLOCATOR_SETTINGS}
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    if theirs:
        assert found == dict.fromkeys(entry.ALLOCATOR_SETTINGS) | {theirs: "max_split_size_mb:64"}
    else:
        assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
