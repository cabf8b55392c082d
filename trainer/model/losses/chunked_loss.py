"""Cross-entropy of half-precision logits, without an fp32 copy of all of them.

    bytes per logit               F.cross_entropy(z.float())      here
    z, from the forward pass      2                               2
    fp32 copy                     4                               of one chunk of rows
    log-softmax, kept             4                               of one chunk of rows, not kept
    gradient of it                4                               -
    gradient of the copy, of z    4 + 2                           2

The backward pass computes the softmax again. In fp32 there is no copy to save: `loss.py` calls torch's function then.
torch.compile makes one kernel of the loss and one of its gradient, which keep no copy either.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Logits that are fp32 at a time: 4 MiB where the cache of a core should hold them, 128 MiB to keep a GPU busy."""


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return a tensor [...] in fp32; one in float64, which the rehearsal has of the file itself, as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return the cross-entropy summed over labels: logits [..., C] in half precision, labels [...] -> an fp32 scalar.

    All arithmetic is in fp32; the gradient is rounded once, to the dtype of the logits.
    """
    return _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels.flatten(), ignore_index)  # type: ignore[no-any-return, no-untyped-call]


def compiled_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return what `cross_entropy` returns, from compiled code: [..., C] and [...], where C alone has one length."""
    rows = logits.reshape(-1, logits.shape[-1])
    flat = labels.flatten()
    for tensor in (rows, flat):
        # one code for every number of rows
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled()(rows, flat, ignore_index)


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor, int], Tensor]:
    return torch.compile(_of_rows)


def _of_rows(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction="sum")


def chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of [rows, C], with about CHUNK logits each; in a dry run the first two only."""
    size = max(1, CHUNK["cpu" if logits.device.type == "cpu" else "cuda"] // max(1, logits.shape[-1]))
    for first in range(0, len(logits), size):
        yield slice(first, first + size)
        # the second one is made while what the first took is still alive; a third would take no more
        if _few_chunks.get() and first:
            return


_few_chunks = ContextVar("few chunks of a dry run", default=False)


@contextlib.contextmanager
def few_chunks() -> Iterator[None]:
    """Compute two chunks of each loss in a block, for a dry run: all chunks take the same memory, one after another."""
    token = _few_chunks.set(True)
    try:
        yield
    finally:
        _few_chunks.reset(token)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        losses = torch.empty(len(labels), device=logits.device)
        for rows in chunks(logits):
            # softmax functions with a dtype convert while they read
            likelihoods = F.log_softmax(logits[rows], -1, dtype=torch.float32)
            losses[rows] = F.nll_loss(likelihoods, labels[rows], ignore_index=ignore_index, reduction="none")
        context.save_for_backward(logits, labels)
        context.ignore_index = ignore_index
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = context.saved_tensors
        counted = labels != context.ignore_index
        index = torch.where(counted, labels, 0)[:, None]
        # ignored labels are multiplied by 0, not set to 0, so that a NaN stays a NaN as in torch's cross-entropy
        each = torch.where(counted, gradient, 0.0)[:, None]
        result = torch.empty_like(logits)
        for rows in chunks(logits):
            part = F.softmax(logits[rows], -1, dtype=torch.float32)
            # each row has one index, so this needs no atomic addition, whose order would not be determined
            part.scatter_(1, index[rows], part.gather(1, index[rows]) - 1.0)
            torch.mul(part, each[rows], out=result[rows])  # rounds while it writes
        return result, None, None
