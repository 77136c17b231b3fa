"""Which source reads a path."""

from __future__ import annotations

from pathlib import Path

SUFFIXES = {".jsonl": "jsonl", ".parquet": "parquet"}
SAVED_SPLIT, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""what `save_to_disk` leaves of one split, and of several"""


def source_kind(path: str) -> str:
    """Return the name of the source for a file, a folder or a glob, by how its files are named."""
    place = Path(path).expanduser()
    if any((place / name).is_file() for name in (SAVED_SPLIT, SAVED_SPLITS)):
        return "hf"
    for suffix, kind in SUFFIXES.items():
        if place.suffix == suffix or (place.is_dir() and any(place.rglob(f"*{suffix}"))):
            return kind
    return "text"
