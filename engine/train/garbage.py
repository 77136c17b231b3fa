"""When Python collects garbage while a run trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paced_garbage_collection(interval: int) -> Iterator[None]:
    """Leave Python's garbage collection to the training loop, if `interval` is not 0.

    Ranks that collect at different steps wait for each other.
    """
    if not interval:
        yield
        return
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
