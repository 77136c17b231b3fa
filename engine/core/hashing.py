"""Hashes of 64-bit words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# 2**64 divided by the golden ratio: the increment of SplitMix64.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


Words = NDArray[np.uint64]


def mix(words: Words) -> Words:
    """Return a well mixed hash of each 64-bit word, a bijection.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), variant 13 of D. Stafford.
    """
    # numpy's products of unsigned words wrap around at 2**64, as the hash needs.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
