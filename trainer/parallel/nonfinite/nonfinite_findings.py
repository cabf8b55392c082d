"""What is found of bad values, which are NaN or infinite: JSON-able records, made on each rank and compared by all."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from onward.trainer.data.batches.batches import Batch

Phase = Literal["weight", "input", "forward", "loss", "backward", "gradient"]
PHASES: tuple[Phase, ...] = ("weight", "input", "forward", "loss", "backward", "gradient")
"""In the order in which a step goes through them: what is bad in one makes the next ones bad."""
NUM_ROWS = 5
"""Rows that a finding names; the others are counted."""


class Range(BaseModel):
    """The values of one tensor."""

    name: str
    shape: tuple[int, ...]
    low: float
    high: float
    """Of the finite values; NaN if there is none."""
    num_bad: int
    extreme_row: int = -1
    """The row with the value of largest magnitude; -1 if rows cannot be told apart."""

    def __str__(self) -> str:
        values = "no finite value" if math.isnan(self.low) else f"{self.low:.4g} to {self.high:.4g}"
        bad = f", {self.num_bad} of {math.prod(self.shape)} NaN or infinite" if self.num_bad else ""
        return f"{self.name} {list(self.shape)}: {values}{bad}"


class Finding(BaseModel):
    """The first bad value of one micro-batch on one rank."""

    phase: Phase
    tensor: str
    """The tensor of the ONNX graph; of a weight its initializer."""
    place: int
    """When it was computed, counted in nodes of the rank."""
    stage: int
    micro_batch: int
    found: Range
    operands: tuple[Range, ...] = ()
    readers: tuple[str, ...] = ()
    """backward: the tensors whose backward pass has computed the gradient."""
    rows: tuple[int, ...] = ()
    """The first rows with bad values, by number in the split."""
    num_rows: int = 0
    """How many samples have bad values; 0 if they cannot be told apart."""
    num_samples: int = 0
    rank: int = 0
    replica: int = 0

    @property
    def order(self) -> tuple[int, ...]:
        """Sorts findings so that the first one comes first, on whichever rank it is."""
        # gradients go from the last stage to the first
        stage = -self.stage if self.phase in ("backward", "gradient") else self.stage
        return (PHASES.index(self.phase), self.micro_batch, stage, self.place, self.rank)


def describe(name: str, tensor: Tensor, batch: Batch | None = None) -> Range:
    """Return the range of a tensor's values. tensor: [...], of any shape; its rows are named as by `samples_of`."""
    values = tensor.detach().float()
    finite = torch.isfinite(values)
    num_bad = int((~finite).sum())
    good = values[finite]
    low, high = (float(good.min()), float(good.max())) if good.numel() else (math.nan, math.nan)
    extreme = -1
    by_sample = samples_of(values, batch)
    if by_sample is not None and batch is not None and by_sample.numel():
        sizes = torch.nan_to_num(by_sample.abs(), nan=math.inf, posinf=math.inf).amax(dim=1)
        extreme = int(batch.rows[int(sizes.argmax())])
    return Range(name=name, shape=tuple(tensor.shape), low=low, high=high, num_bad=num_bad, extreme_row=extreme)


def samples_of(tensor: Tensor, batch: Batch | None) -> Tensor | None:
    """Return the values as [B, values of a sample]; None where the dimensions do not show what belongs to a sample.

    The samples are the first dimension, or parts of it, as in [B x T, D].
    """
    if batch is None or not len(batch.rows) or not tensor.ndim:
        return None
    count = batch.filled_to or batch.size
    length = len(tensor)
    # a count that is the length of another dimension, too, may be the samples there: nothing shows which
    has_parts_of_samples = length > 0 and length % count == 0 and count not in tensor.shape[1:]
    if length != count and not has_parts_of_samples:
        return None
    return tensor.reshape(count, -1)[: batch.size]


def bad_rows(tensor: Tensor, batch: Batch | None) -> list[int] | None:
    """Return the rows of the split whose samples have a bad value; None if samples cannot be told apart.

    tensor: [B, ...] or [B x T, ...], as `samples_of` takes it.
    """
    by_sample = samples_of(tensor.detach(), batch)
    if by_sample is None or batch is None:
        return None
    bad = (~torch.isfinite(by_sample)).any(dim=1).cpu().numpy()
    return [int(row) for row in batch.rows[bad]]
