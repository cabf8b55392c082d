"""All-reduce in half precision: a power of two as a common scale, then two bytes for each number."""

from __future__ import annotations

import torch
from torch import Tensor

from onward.trainer.parallel.replicas.channels import Channel

COMPRESSED = {"fp16": torch.float16, "bf16": torch.bfloat16}
CHUNK = 1 << 17
"""Elements converted at a time, so that temporary copies stay in the cache."""


class CompressedAllReduce:
    """All-reduces over a channel in half precision, adding in fp32, with equal bits on every rank.

        each rank   [ to 0 | to 1 | to 2 ] -- all-to-all --> its range of all ranks, added in fp32 -- all-gather --> all

    An all-reduce of half-precision tensors sends as many elements, but rounds the sum after each addition; here numbers
    are rounded twice. Buffers are kept between calls: allocating new pages takes longer than the arithmetic.
    """

    def __init__(self, channel: Channel, dtype: torch.dtype) -> None:
        self._channel = channel
        self._dtype = dtype
        self._memory = torch.empty(0, dtype=torch.uint8)

    def sum(self, flat: Tensor) -> None:
        """Sum a tensor [elements] in place. For overflows see `compress`. Collective: the channel."""
        # weights of fp64 or half precision: the format of the messages is made from fp32
        if flat.dtype != torch.float32:
            wide = flat.float()
            self.sum(wide)
            flat.copy_(wide)
            return
        size = self._channel.size
        length = 2 * -(-flat.numel() // (2 * size))  # even: each row of bytes begins at a multiple of 4
        stretches = [flat[rank * length : (rank + 1) * length] for rank in range(size)]
        sent, came = self._wires(size, compressed_bytes(length), flat.device)
        for stretch, wire in zip(stretches, sent, strict=True):
            compress(stretch, self._dtype, wire)
        self._channel.all_to_all(sent, came)
        own = stretches[self._channel.rank].zero_()
        for wire in came:  # in the order of ranks, wherever it is done
            add_decompressed(wire, self._dtype, own)
        # this rank, too, takes its own sum as it is after compression, so that all ranks have the same bits
        compress(own, self._dtype, sent[0])
        self._channel.gather(sent[0], came)
        for stretch, wire in zip(stretches, came, strict=True):
            add_decompressed(wire, self._dtype, stretch.zero_())

    def _wires(self, rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._memory.numel() < 2 * rows * size:
            self._memory = torch.empty(2 * rows * size, dtype=torch.uint8, device=device)
        sent, came = self._memory[: 2 * rows * size].view(2, rows, size)
        return sent, came


def compressed_bytes(length: int) -> int:
    """Return the bytes of this many compressed values: the scale and two bytes per value."""
    return 4 + 2 * length


def compress(values: Tensor, dtype: torch.dtype, wire: Tensor) -> None:
    """Write fp32 values to the start of `wire`: a power of two, then each value divided by it in half precision.

    values [n] -> wire uint8 [at least 4 + 2 n].

    The power of two scales the greatest magnitude to just below 2^15. So no value overflows in fp16, and gradients of a
    mean loss, which are small, do not underflow: a value of 2^-29 times the greatest is still a normal fp16 number.
    Dividing by a power of two does not round. Infinity and NaN are kept, so that an overflow is detected.
    """
    greatest = torch.stack(torch.aminmax(values)).abs().max() if values.numel() else values.new_zeros(())
    # within the normal powers of two of fp32: the scale and its inverse are sent or used as fp32 numbers
    exponent = torch.frexp(greatest).exponent.sub(15).clamp(-126, 126)
    exponent = torch.where(greatest.isfinite(), exponent, 0)
    scale, inverse = (torch.ldexp(torch.ones_like(greatest), power) for power in (exponent, -exponent))
    wire[:4].view(torch.float32).copy_(scale)
    halves = wire[4 : compressed_bytes(values.numel())].view(dtype)
    for part, half in zip(torch.split(values, CHUNK), torch.split(halves, CHUNK), strict=True):
        half.copy_(part * inverse)


def add_decompressed(wire: Tensor, dtype: torch.dtype, values: Tensor) -> None:
    """Decompress what `compress` has written, uint8 [at least 4 + 2 n], and add it to fp32 values [n]."""
    scale = wire[:4].view(torch.float32)
    halves = wire[4 : compressed_bytes(values.numel())].view(dtype)
    for part, half in zip(torch.split(values, CHUNK), torch.split(halves, CHUNK), strict=True):
        part.add_(half.float().mul_(scale))
