"""Randomness without state: a keyed hash of integers, and a keyed permutation of 0..n-1."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

NUM_ROUNDS = 6
"""Feistel rounds; four already make a pseudo-random permutation (Luby and Rackoff 1988)."""


def key64(*parts: object) -> np.uint64:
    """A 64-bit key from any values; the same on every machine."""
    text = "\0".join(str(part) for part in parts)
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def mix64(values: Array, key: np.uint64) -> Array:
    """Hash each uint64 under a key: the finaliser of splitmix64 (Steele et al. 2014), modulo 2^64."""
    x = values.astype(np.uint64) ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permutation(positions: Array, size: int, *, seed: int, epoch: int) -> Array:
    """Where a shuffle of 0..size-1 puts each position [n]; int64 [n].

    A balanced Feistel network permutes the smallest 4^k >= size; what falls outside of 0..size-1 is
    permuted again until it falls inside (cycle walking: less than four walks on average). So any position
    is known at once, from seed and epoch alone: there is no order to store and none to restore.
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    keys = [key64("permutation", seed, epoch, number) for number in range(NUM_ROUNDS)]
    result = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := np.flatnonzero(result >= size)).size:
        result[outside] = _feistel(result[outside], half, keys)
    return result.astype(np.int64)


def _feistel(values: Array, half: np.uint64, keys: list[np.uint64]) -> Array:
    """A permutation of the integers of 2 * half bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mix64(right, key) >> (np.uint64(64) - half))
    return (left << half) | right
