"""What the tests of observers share."""

import pytest


@pytest.fixture
def event_files_in_order(monkeypatch):
    """Number TensorBoard's files of one second so that their names sort as they were opened."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
