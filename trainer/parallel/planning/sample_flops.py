"""The FLOPs that a sample adds to a weight update, by the lengths of its rows; the same number in every layout.

The graph is counted before it is divided (flops.py), for an update of `train.global_batch_size` samples. Where the rows
of an input vary in length, the FLOPs are a polynomial of second degree in the length, as attention makes them. It is
found from counts at three lengths of the data, and each sample then counts with its own length:

    length       128        96        64                 FLOPs(L) = c0 + c1 L + c2 L^2
    counted       o          o         o

    encoder and decoder: two lengths, six counts         c0 + c1 L + c2 M + c3 L^2 + c4 L M + c5 M^2

So padding is not counted, which depends on the micro-batch that a sample is in.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batch, Batches
from onward.trainer.data.schema.columns import Array
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import reason_of
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.planning.flops import count_flops, measure_flops

log = logging.getLogger(__name__)

ROWS_LOOKED_AT = 256
"""Of the data, to find which inputs have rows of one length, and which lengths there are."""


@dataclass(frozen=True)
class Lengths:
    """The lengths of the rows of the data. Inputs whose rows are always equally long, such as ids and mask, are one."""

    members: tuple[tuple[int, ...], ...]
    """For each length, the inputs that have it: columns of `Batch.lengths`."""
    nodes: tuple[tuple[int, ...], ...]
    """For each length, up to three of its values that occur, the longest first."""

    @classmethod
    def of(cls, rows: Array) -> Lengths:
        """Return those of rows: int64 [rows, inputs whose rows vary]."""
        members: list[list[int]] = []
        # ids, mask and token types vary together: as one length they take three counts, as three ten
        for place, column in enumerate(rows.T):
            same = next((each for each in members if np.array_equal(rows[:, each[0]], column)), None)
            members.append([place]) if same is None else same.append(place)
        return cls(tuple(map(tuple, members)), tuple(_nodes(rows[:, each[0]]) for each in members))

    @property
    def terms(self) -> list[tuple[int, ...]]:
        """Return the exponents of each term of the polynomial; [()] where no row varies."""
        # up to the square of a length or the product of two, which is what attention costs
        degrees = [range(len(each)) for each in self.nodes]
        return [powers for powers in itertools.product(*degrees) if sum(powers) <= 2]

    def of_term(self, powers: Sequence[int]) -> list[int]:
        """Return the lengths at which the FLOPs are counted for a term; together they determine the polynomial."""
        return [nodes[power] for nodes, power in zip(self.nodes, powers, strict=True)]


def _nodes(lengths: Array) -> tuple[int, ...]:
    """Return up to three lengths that occur: the longest, and those next to three quarters and to half of it."""
    known = np.unique(lengths)
    found: list[int] = []
    for part in (1.0, 0.75, 0.5):
        # each length once: three equal nodes would not determine a polynomial
        left = known[~np.isin(known, found)]
        if len(left):
            found.append(int(left[np.abs(left - part * known[-1]).argmin()]))
    return tuple(sorted(found, reverse=True))


@dataclass(frozen=True)
class SampleFlops:
    """What samples cost: a polynomial in their lengths."""

    lengths: Lengths
    coefficients: tuple[float, ...]
    """Of `lengths.terms`."""
    mean: float
    """Of a sample, over the rows that were looked at."""

    def of(self, batches: Sequence[Batch]) -> float:
        """Return the FLOPs of micro-batches, forward and backward."""
        return sum(self.of_rows(batch.lengths) for batch in batches)

    def of_rows(self, rows: Array) -> float:
        """Return the FLOPs of rows of these lengths, int64 [rows, inputs whose rows vary]."""
        return _value(self.lengths, self.coefficients, rows)


def _value(lengths: Lengths, coefficients: Sequence[float], rows: Array) -> float:
    """Return the sum of the polynomial's values for rows."""
    total = 0.0
    found = [rows[:, each[0]].astype(np.float64) for each in lengths.members]
    for powers, coefficient in zip(lengths.terms, coefficients, strict=True):
        # coefficient x length^power of each length, for all rows at once
        term = np.full(len(rows), coefficient)
        for length, power in zip(found, powers, strict=True):
            term *= length**power
        total += float(term.sum())
    return total


def count_sample_flops(
    module: ImportedGraph,
    config: RunConfig,
    example: Sequence[Tensor],
    batches: Batches,
    mpi: MPIContext,
    *,
    beat: Callable[[], None],
) -> SampleFlops | None:
    """Return what samples cost, counted on the whole graph by rank 0; None if they cannot be counted, with a warning.

    example: the inputs of one micro-batch, [B, ...] each. The module is not changed. Collective: every rank of the
    world.
    """
    rows = batches.first_lengths(ROWS_LOOKED_AT)
    lengths = Lengths.of(rows)
    found = torch.full((len(lengths.terms),), math.nan, dtype=torch.float64)
    if mpi.rank == 0:
        beat()
        found = torch.tensor(_count(module, config, example, lengths, batches.counts.places), dtype=torch.float64)
        beat()
    if mpi.world_size > 1:
        dist.broadcast(found, 0)
    # NaN on rank 0 reaches every rank by the broadcast, so that all return the same
    if found.isnan().any():
        return None
    coefficients = tuple(found.tolist())
    rows = rows if len(rows) else np.empty((1, 0), np.int64)
    return SampleFlops(lengths, coefficients, _value(lengths, coefficients, rows) / len(rows))


def _count(
    module: ImportedGraph, config: RunConfig, example: Sequence[Tensor], lengths: Lengths, places: Sequence[int]
) -> list[float]:
    """Return the coefficients of the polynomial; NaN if nothing can be counted."""
    terms = lengths.terms
    # an output without a name is the first one of the graph
    read = {loss.own_output or module.output_names[0] for loss in config.soft_losses}
    for loss in config.losses:
        read |= {name or module.output_names[0] for name in loss.outputs}
    fixed = config.model.keeps_batch
    # one row is too few for a BatchNormalization of vectors
    num_rows = len(example[0]) if fixed else max(2, config.train.global_batch_size)
    # a graph may fail in ways of its own on fake tensors, and what is only shown must not end a training
    try:
        counts = []
        for powers in terms:
            inputs = _like(example, num_rows, lengths, lengths.of_term(powers), places)
            counts.append(count_flops(module, inputs, read).total / num_rows)
        return _polynomial(lengths, counts)
    except Exception as reason:
        log.info("the FLOPs of the graph cannot be counted by shapes: %s", reason_of(reason))
    try:
        found = measure_flops(module, example, read).total / len(example[0])
        log.info("they are counted for the first micro-batch, and may differ with other data")
        return [found if not any(powers) else 0.0 for powers in terms]
    except Exception as reason:
        log.warning("the FLOPs of the graph cannot be counted, so TFLOP/s and MFU are not shown: %s", reason)
        return [math.nan] * len(terms)


def _like(
    example: Sequence[Tensor], num_rows: int, lengths: Lengths, chosen: Sequence[int], places: Sequence[int]
) -> list[Tensor]:
    """Return tensors without data like the example's, with so many rows of these lengths."""
    shapes = [[num_rows, *value.shape[1:]] for value in example]
    for members, length in zip(lengths.members, chosen, strict=True):
        for member in members:
            shapes[places[member]][1] = length
    return [torch.empty(shape, dtype=value.dtype, device="meta") for shape, value in zip(shapes, example, strict=True)]


def _polynomial(lengths: Lengths, counts: Sequence[float]) -> list[float]:
    """Return the coefficients with which the polynomial has these values at the lengths of its terms."""
    terms = lengths.terms
    longest = np.array([nodes[0] for nodes in lengths.nodes], np.float64)
    powers = np.array(terms, np.float64).reshape(len(terms), len(longest))
    points = np.array([lengths.of_term(each) for each in terms], np.float64).reshape(powers.shape)
    # in units of the longest, where all powers are of one size
    matrix = ((points / longest)[:, None, :] ** powers[None, :, :]).prod(2)
    solved = np.linalg.solve(matrix, np.array(counts))
    return [float(value) for value in solved / (longest**powers).prod(1)]
