"""Permute row numbers without storing an order: a keyed hash of integers, and a keyed permutation of 0..n-1."""

from __future__ import annotations

import hashlib
from functools import lru_cache
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
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    tables = _rounds(half_bits, seed, epoch)
    result = _feistel(positions.astype(np.int64), half_bits, tables)
    # a cycle of the network that leaves 0..size-1 comes back, because the position it began at is inside
    outside = np.flatnonzero(result >= size)
    while outside.size:
        again = result[outside] = _feistel(result[outside], half_bits, tables)
        outside = outside[again >= size]
    return result


@lru_cache(16)
def _rounds(half_bits: int, seed: int, epoch: int | str) -> list[Array]:
    """Return the keyed hash of each round, of every value that a half can have: int64 [2^half_bits] each.

    Of 2^32 rows these are tables of 65,536 values; one look-up takes a tenth of the time of a hash.
    """
    halves = np.arange(1 << half_bits, dtype=np.uint64)
    keys = [hash_key("permutation", seed, epoch, number) for number in range(NUM_ROUNDS)]
    return [(keyed_hash(halves, key) >> np.uint64(64 - half_bits)).astype(np.int64) for key in keys]


def _feistel(values: Array, half_bits: int, tables: list[Array]) -> Array:
    """Permute integers of 2 * half_bits bits, int64 [n].

        left   right
          |      |---------.
          |      |      table          each round is undone by the same round with the halves swapped, so the
         XOR <---|---------'           network is a permutation whatever the hash is
           \\    /
            \\  /   swap
            /  \\
        left   right
    """
    left = values >> half_bits
    right = values & ((1 << half_bits) - 1)
    for table in tables:
        left, right = right, left ^ table.take(right)
    permuted: Array = (left << half_bits) | right
    return permuted
