"""Words of the public contract that this version cannot do yet."""

from __future__ import annotations

from ...core.text.positions import KeyPath

_VALUES = {
    "kernels.attention": ("triton",),
}


def unavailable(path: KeyPath, value: object) -> str:
    """Return a message if the contract has this key or word and this version does not."""
    pattern = ".".join("*" if isinstance(part, int) else part for part in path)
    if isinstance(value, str) and value in _VALUES.get(pattern, ()):
        return f'"{value}" is not available in this version'
    return ""
