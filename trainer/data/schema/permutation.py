"""Permute row numbers without storing an order: a keyed hash of integers, and a keyed permutation of 0..n-1."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

NUM_ROUNDS = 6
"""Feistel rounds; four already make a pseudo-random permutation (Luby and Rackoff 1988)."""


def hash_key(*parts: object) -> np.uint64:
    """Return a 64-bit key made from any values; the same on every machine."""
    text = "\0".join(str(part) for part in parts)
    # not Python's hash(), which has a random seed for each process
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def keyed_hash(values: Array, key: np.uint64) -> Array:
    """Hash each uint64 [...] under a key: the finaliser of splitmix64 (Steele et al. 2014), modulo 2^64."""
    x = values.astype(np.uint64) ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permutation(positions: Array, size: int, *, seed: int, epoch: int | str) -> Array:
    """Return where a shuffle of 0..size-1 puts each position [n]: int64 [n].

    A balanced Feistel network permutes the integers below the smallest 4^k >= size. A result outside of 0..size-1 is
    permuted again until it is inside (cycle walking: fewer than four rounds on average), which keeps it a permutation:

        size 6, k = 2:   0 -> 9 -> 3     outside, again, inside
                         1 -> 5          inside

    So each position is computed from seed and epoch alone: no order is stored, and none is restored at a resume.
    """
    # both halves have the same number of bits (a balanced network), so the domain has an even number of them
    half_bits = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    keys = [hash_key("permutation", seed, epoch, number) for number in range(NUM_ROUNDS)]
    result = _feistel(positions.astype(np.uint64), half_bits, keys)
    # a cycle of the network that leaves 0..size-1 comes back, because the position it began at is inside
    while (outside := np.flatnonzero(result >= size)).size:
        result[outside] = _feistel(result[outside], half_bits, keys)
    return result.astype(np.int64)


def _feistel(values: Array, half_bits: np.uint64, keys: list[np.uint64]) -> Array:
    """Permute the integers of 2 * half_bits bits.

        left   right
          |      |---------.
          |      |    keyed_hash       each round is undone by the same round with the halves swapped, so the
         XOR <---|---------'           network is a permutation whatever the hash is
           \\    /
            \\  /   swap
            /  \\
        left   right
    """
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left = values >> half_bits
    right = values & mask
    for key in keys:
        left, right = right, left ^ (keyed_hash(right, key) >> (np.uint64(64) - half_bits))
    return (left << half_bits) | right
