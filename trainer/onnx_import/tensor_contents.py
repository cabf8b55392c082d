"""Recognise masks, position tables, grids and placeholders by the numbers in a stored tensor."""

from __future__ import annotations

import re

import numpy as np
import torch

MIN_ROWS, MAX_ROWS = 8, 64
"""The test for sinusoids needs at least so many rows of a table, and reads at most so many."""

BLOCK, NUM_BLOCKS = 512, 8
"""`is_distinctive` samples so many blocks of so many elements, so that a mapped file is not read as a whole."""

MASKED_BELOW = -50
"""A score lowered by this much has no weight after softmax."""


def is_mask(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds only zeros and large negative numbers, or is a matrix of zeros and ones."""

    def only_mask_values(values: torch.Tensor, matrix: bool) -> bool:
        allowed = (values == 0) | (values <= MASKED_BELOW)
        return bool((allowed | (values == 1) if matrix else allowed).all())

    matrix = tensor.ndim >= 2 and tensor.shape[-1] > 1 and tensor.shape[-2] > 1
    flat = tensor.reshape(-1)
    # the first values rule out most weights, without reading all of a mapped file
    if not only_mask_values(flat[:64], matrix) or not only_mask_values(flat, matrix):
        return False
    return bool((flat <= MASKED_BELOW).any()) or (matrix and bool((flat == 0).any() and (flat == 1).any()))


def without_repetition(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a copy of length 1 in a dimension if all slices along it are equal, else the tensor itself."""
    if tensor.shape[dim] == 0:
        return tensor
    first = tensor.narrow(dim, 0, 1)
    return first.clone() if torch.equal(tensor, first.expand_as(tensor)) else tensor


def is_sinusoidal_table(tensor: torch.Tensor) -> bool:
    """Return whether each column of [..., rows, columns] is a sine, a cosine or a linear function of the row number.

    Such columns x satisfy x[n + 1] + x[n - 1] = 2 cos(w) x[n] for some w; columns of a learned table do not.
    """
    if tensor.ndim < 2 or tensor.shape[-2] < MIN_ROWS or not tensor.numel():
        return False
    rows = tensor.reshape(-1, *tensor.shape[-2:])[0][:MAX_ROWS].double()
    sums, middle = rows[2:] + rows[:-2], rows[1:-1]
    # least squares for 2 cos(w) in each column, then the residual relative to the column's greatest value
    ratio = (sums * middle).sum(0) / middle.square().sum(0).clamp_min(1e-30)
    fits = ((sums - ratio * middle).abs() <= 2e-3 * rows.abs().amax(0)).all(0)
    # constant columns satisfy the equation too; at least half of them must vary
    varies = (rows.amax(0) - rows.amin(0)) > 1e-3 * rows.abs().amax(0)
    return bool(fits.all()) and int(varies.sum()) * 2 >= rows.shape[1]


def is_integer_table(tensor: torch.Tensor) -> bool:
    """Return whether all elements are integers, not all equal, and one is 2 or more: grids, strides, distances."""
    flat = tensor.reshape(-1)
    if not _all_integers(flat[:64]) or not _all_integers(flat):
        return False
    return bool(flat.abs().max() >= 2) and bool((flat != flat[0]).any())


def _all_integers(values: torch.Tensor) -> bool:
    return bool((values == values.round()).all())


def is_distinctive(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has so many different numbers that an equal tensor must be a copy of it.

    Zeros, ones and identity matrices are equal in many places of a model without being one weight.
    """
    flat = tensor.reshape(-1)
    starts = torch.linspace(0, max(flat.numel() - BLOCK, 0), NUM_BLOCKS).long().tolist()
    distinct = len(np.unique(np.concatenate([flat[start : start + BLOCK].numpy() for start in starts])))
    return distinct > max(2, min(16, flat.numel() // 4))


def is_exporter_name(name: str) -> bool:
    """Return whether an exporter generated the name; other names come from the author's module."""
    return re.fullmatch(r"onnx::\w+|val_\d+|_?\d+|.*_(fold|fused)\w*|/.*_output_\d+", name) is not None
