"""Best-fit decreasing: pieces of documents are put into rows with little room left over."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from ..order import Indices


def best_fit_decreasing(lengths: Indices, capacity: int) -> tuple[Indices, int]:
    """Place pieces in rows, the longest first, each where it leaves the least room.

    Rows with equal room are interchangeable, so all pieces of one length are placed together; the
    time grows with the number of distinct lengths rather than of pieces.
    Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830.

    Args:
        lengths: [P], each 1..capacity.
        capacity: tokens a row.

    Returns:
        the row of each piece, [P], and the number of rows. Rows are numbered by their first piece.
    """
    row = np.empty(len(lengths), dtype=np.int64)
    waiting = np.argsort(-lengths, kind="stable")
    rows_by_room: dict[int, list[Indices]] = {}
    rooms: list[int] = []

    def put_back(room: int, rows: Indices) -> None:
        if room and rows.size:
            if room not in rows_by_room:
                insort(rooms, room)
                rows_by_room[room] = []
            rows_by_room[room].append(rows)

    opened = 0
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        same, waiting = waiting[:count], waiting[count:]
        while same.size:
            tightest = bisect_left(rooms, size)
            if tightest < len(rooms):
                room = rooms[tightest]
                rows = rows_by_room[room].pop()
                if not rows_by_room[room]:
                    del rows_by_room[room], rooms[tightest]
            else:
                room = capacity
                # As many as the pieces of this length fill, rounded up.
                rows = np.arange(opened, opened - (-len(same) // (capacity // size)))
                opened += len(rows)
            per_row = room // size
            full, rest = divmod(min(len(same), len(rows) * per_row), per_row)
            used = full + (rest > 0)
            placed = full * per_row + rest
            row[same[:placed]] = np.repeat(rows[:used], per_row)[:placed]
            same = same[placed:]
            # Full rows, at most one that is partly filled, and those that were not needed.
            put_back(room - per_row * size, rows[:full])
            put_back(room - rest * size, rows[full:used])
            put_back(room, rows[used:])
    return _number_by_first_piece(row, opened), opened


def _number_by_first_piece(row: Indices, num_rows: int) -> Indices:
    """Renumber rows so that, unshuffled, they follow the order of the documents."""
    first = np.empty(num_rows, dtype=np.int64)
    first[row[::-1]] = np.arange(len(row))[::-1]
    number = np.empty(num_rows, dtype=np.int64)
    number[np.argsort(first)] = np.arange(num_rows)
    return number[row]
