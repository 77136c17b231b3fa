"""What adapters are called, and how large they are. Torch-free."""

from __future__ import annotations

DOWN, UP = "lora_a", "lora_b"


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name, with any prefix, is one of an adapter's."""
    return name.rpartition(".")[2] in (DOWN, UP)
