"""Sorting 64-bit integers, a column at a time; pure and vectorised."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["stable_order"]


def stable_order(numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the stable permutation that sorts 64-bit integers of unknown order.

    The upper bits of a number, above the minimum, and its place are sorted as one number, which numpy does with vector
    instructions: in a fifth of the time of its stable sort of places, and half of its unstable one. If the lower bits
    do not fit beside the place, they nearly always do not matter (for hashes they decide once in thousands of batches).
    If they do matter, the stable sort is used.
    """
    count = len(numbers)
    if count < 2:
        return np.arange(count, dtype=np.int64)
    # The difference of two 64-bit integers fits an unsigned one, whether they are signed or not.
    least = numbers.min()
    packed = numbers.view(np.uint64) - np.asarray(least).view(np.uint64)
    bits = (int(numbers.max()) - int(least)).bit_length()
    places = np.uint64((1 << (count - 1).bit_length()) - 1)
    packed <<= np.uint64(64 - bits)
    beside = int(places).bit_length() <= 64 - bits
    packed &= ~places
    packed |= np.arange(count, dtype=np.uint64)
    packed.sort()
    packed &= places
    order: npt.NDArray[np.int64] = packed.view(np.int64)
    if not beside:
        ordered = numbers[order]
        if bool(np.any(ordered[1:] < ordered[:-1])):
            return np.argsort(numbers, kind="stable")
    return order
