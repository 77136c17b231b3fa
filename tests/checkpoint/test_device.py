"""A save in the background uses the GPU of its rank: a new thread starts with GPU 0."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from trainer.engine.checkpoint.ranks import Ranks
from trainer.engine.checkpoint.writer import Writer


def test_the_copying_thread_sets_its_device_before_it_makes_a_stream(monkeypatch):
    calls = []
    side = SimpleNamespace(wait_event=lambda event: None, record_event=lambda: "copied")
    after = SimpleNamespace(device=torch.device("cuda", 3))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set", device)))
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device: calls.append(("stream", device)) or side
    )
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    writer = Writer(Ranks(None), lambda source: torch.empty_like(source))
    writer.plan({"weight": torch.ones(2)})
    assert writer.copy(after) == "copied"
    assert calls == [("set", after.device), ("stream", after.device)]
    calls.clear()
    assert writer.copy(None) is None
    assert calls == []
