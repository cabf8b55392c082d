"""Collectives inside the graph, with their gradients: the two operators at the borders of a tensor-parallel region.

    x --- copy_to_region --- column-parallel --- ... --- row-parallel --- reduce_from_region --- + bias
          forward:  identity                                               forward:  all-reduce
          backward: all-reduce                                             backward: identity

These are f and g of Megatron-LM (Shoeybi et al. 2019, section 3), there copy_to_tensor_model_parallel_region and
reduce_from_tensor_model_parallel_region. With sequence parallelism the values between regions are divided along the
sequence (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198), with as many bytes:

    x, own rows --- gather_from_sequence --- column-parallel --- ... --- row-parallel --- reduce_scatter_to_sequence
                    forward:  all-gather                                                  forward:  reduce-scatter
                    backward: reduce-scatter                                              backward: all-gather

A process group is given by its name: a name is a plain string in the graph's
code, which torch.compile and fake tensors accept; fake tensors need no process group of that name.

The operators of torch's functional collectives are called without their Python wrapper. The wrapper returns a tensor
subclass that waits when it is first read, which costs up to 0.3 ms a call (2 ranks, gloo, 64 KiB: 0.45 ms with it,
0.22 ms without, 0.13 ms for `dist.all_reduce` on a clone). Here the result is waited for at once; compiled code is
the same.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed._functional_collectives  # registers the operators' shapes on meta tensors
from torch import Tensor

from onward.trainer.errors import ConfigError


def copy_to_region(x: Tensor, group: str) -> Tensor:
    """Return `x` [...] itself, and sum its gradient over the group. Collective in the backward pass."""
    return _CopyToRegion.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def reduce_from_region(x: Tensor, group: str) -> Tensor:
    """Sum the partial results [...] of all ranks of the group. Collective in the forward pass."""
    return _ReduceFromRegion.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def all_reduce(x: Tensor, group: str, op: Literal["sum", "max", "min"]) -> Tensor:
    """Reduce `x` [...] over the group into a new tensor of its shape, without a gradient. Collective.

    The maximum of values among which there is a NaN may be NaN or not; it is the same on every rank.
    """
    operators = torch.ops._c10d_functional
    # The operator copies its input, whatever its strides, into a new contiguous tensor: no clone is needed here.
    return operators.wait_tensor(operators.all_reduce(x.detach(), op, group))  # type: ignore[no-any-return]


# -- values that are divided along the sequence


class SequencePart(NamedTuple):
    """This rank's part of a dimension that `size` ranks of a group divide evenly."""

    dim: int
    rank: int
    size: int
    group: str


def gather_from_sequence(
    x: Tensor, dim: int, rank: int, size: int, group: str, gradient: Literal["sum", "same"]
) -> Tensor:
    """Return the rows of all ranks. Collective in the forward pass, and with "sum" in the backward pass.

    Along `dim`, [..., n, ...] becomes [..., n * size, ...].
    gradient: "sum" where each rank computes a part of the gradient of the result, "same" where all compute all of it.
    """
    return _GatherFromSequence.apply(x, SequencePart(dim, rank, size, group), gradient)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter_to_sequence(x: Tensor, dim: int, rank: int, size: int, group: str) -> Tensor:
    """Sum the partial results of all ranks, and return this rank's rows of the sum. Collective in both passes.

    Along `dim`, [..., n * size, ...] becomes [..., n, ...].
    """
    return _ReduceScatterToSequence.apply(x, SequencePart(dim, rank, size, group))  # type: ignore[no-any-return, no-untyped-call]


def take_from_sequence(x: Tensor, dim: int, rank: int, size: int, group: str) -> Tensor:
    """Return this rank's rows of a value that all ranks have. Collective in the backward pass.

    Along `dim`, [..., n * size, ...] becomes [..., n, ...].
    """
    return _TakeFromSequence.apply(x, SequencePart(dim, rank, size, group))  # type: ignore[no-any-return, no-untyped-call]


def all_gather_rows(x: Tensor, part: SequencePart) -> Tensor:
    """Return the rows of all ranks, without a gradient: [..., n, ...] -> [..., n * size, ...]. Collective."""
    operators = torch.ops._c10d_functional
    # the operator stacks the parts along dimension 0, whatever dimension the sequence is
    stacked = operators.all_gather_into_tensor(x.detach().contiguous(), part.size, part.group)
    return torch.cat(operators.wait_tensor(stacked).chunk(part.size), part.dim)


def reduce_scatter_rows(x: Tensor, part: SequencePart) -> Tensor:
    """Return this rank's rows of the sum over the ranks, without a gradient. Collective.

    Along the dimension of `part`, [..., n * size, ...] becomes [..., n, ...].
    """
    operators = torch.ops._c10d_functional
    # the operator divides dimension 0: the parts of the sequence are put one after the other there
    rows = torch.cat(x.detach().chunk(part.size, part.dim))
    if x.device.type != "cpu":
        reduced = operators.reduce_scatter_tensor(rows, "sum", part.size, part.group)
        return operators.wait_tensor(reduced)  # type: ignore[no-any-return]
    # gloo's reduce-scatter is an all-reduce, of twice the bytes
    lengths = [rows.shape[0] // part.size] * part.size
    received = operators.wait_tensor(operators.all_to_all_single(rows, lengths, lengths, part.group))
    # each rank sums the parts that it received, in the order of ranks, so that the bits do not depend on timing
    return received.unflatten(0, (part.size, -1)).sum(0)  # type: ignore[no-any-return]


def own_rows(x: Tensor, part: SequencePart) -> Tensor:
    """Return this rank's rows, a view: [..., n * size, ...] -> [..., n, ...].

    Raises ConfigError if the ranks cannot have equally many.
    """
    length = x.shape[part.dim]
    if length % part.size:
        raise ConfigError(
            f"parallel.sequence_parallel: {length} positions of a sequence cannot be divided evenly over "
            f"parallel.tensor = {part.size} ranks; use sequences whose length is a multiple of {part.size}, or set "
            "parallel.sequence_parallel = false"
        )
    return x.narrow(part.dim, part.rank * (length // part.size), length // part.size)


class _GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, part: SequencePart, gradient: str) -> Tensor:
        context.part = part
        context.gradient = gradient
        return all_gather_rows(x, part)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        found = reduce_scatter_rows if context.gradient == "sum" else own_rows
        return found(gradient, context.part), None, None


class _ReduceScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, part: SequencePart) -> Tensor:
        context.part = part
        own_rows(x, part)  # for its error
        return reduce_scatter_rows(x, part)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(gradient, context.part), None


class _TakeFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, part: SequencePart) -> Tensor:
        context.part = part
        return own_rows(x, part).clone()  # a view would keep all of x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(gradient, context.part), None


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: str) -> Tensor:
        context.group = group
        # autograd needs another tensor than the input, and a view costs no copy
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, context.group, "sum"), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: str) -> Tensor:
        return all_reduce(x, group, "sum")

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
