"""What the numbers of a stored tensor give away: masks, tables of waves and positions, placeholders."""

from __future__ import annotations

import re

import numpy as np
import torch

FEW_ROWS, MANY_ROWS = 8, 64
"""A table is told by its first rows; fewer than these tell nothing."""

BLOCK, NUM_BLOCKS = 512, 8
"""Where a tensor is looked at in a few places: a mapped file should not be read for it."""


def is_mask(tensor: torch.Tensor) -> bool:
    """Zeros and large negative numbers; or a matrix that holds both zeros and ones and nothing else."""

    def only(values: torch.Tensor, matrix: bool) -> bool:
        allowed = (values == 0) | (values <= -50)
        return bool((allowed | (values == 1) if matrix else allowed).all())

    matrix = tensor.ndim >= 2 and tensor.shape[-1] > 1 and tensor.shape[-2] > 1
    flat = tensor.reshape(-1)
    if not only(flat[:64], matrix) or not only(flat, matrix):  # most weights are told by their first few values
        return False
    return bool((flat <= -50).any()) or (matrix and bool((flat == 0).any() and (flat == 1).any()))


def is_sinusoidal_table(tensor: torch.Tensor) -> bool:
    """Whether each column is a sine, a cosine or a ramp of the row's number: positions made into features.

    Such columns x obey x[n + 1] + x[n - 1] = 2 cos(w) x[n]; no learned table does.
    """
    if tensor.ndim < 2 or tensor.shape[-2] < FEW_ROWS or not tensor.numel():
        return False
    rows = tensor.reshape(-1, *tensor.shape[-2:])[0][:MANY_ROWS].double()
    sums, middle = rows[2:] + rows[:-2], rows[1:-1]
    ratio = (sums * middle).sum(0) / middle.square().sum(0).clamp_min(1e-30)
    wave = ((sums - ratio * middle).abs() <= 2e-3 * rows.abs().amax(0)).all(0)
    varied = (rows.amax(0) - rows.amin(0)) > 1e-3 * rows.abs().amax(0)
    return bool(wave.all()) and int(varied.sum()) * 2 >= rows.shape[1]


def is_integer_table(tensor: torch.Tensor) -> bool:
    """Whole numbers that are not just zeros and ones: grids, strides, distances."""
    flat = tensor.reshape(-1)
    if not _are_whole(flat[:64]) or not _are_whole(flat):
        return False
    return bool(flat.abs().max() >= 2) and bool((flat != flat[0]).any())


def _are_whole(values: torch.Tensor) -> bool:
    return bool((values == values.round()).all())


def is_distinctive(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds enough different numbers that another like it is a copy: no zeros, ones or identities."""
    flat = tensor.reshape(-1)
    starts = torch.linspace(0, max(flat.numel() - BLOCK, 0), NUM_BLOCKS).long().tolist()
    seen = len(np.unique(np.concatenate([flat[start : start + BLOCK].numpy() for start in starts])))
    return seen > max(2, min(16, flat.numel() // 4))


def is_exporter_name(name: str) -> bool:
    """Whether an exporter gave the name, not the module's author."""
    return re.fullmatch(r"onnx::\w+|val_\d+|_?\d+|.*_(fold|fused)\w*|/.*_output_\d+", name) is not None
