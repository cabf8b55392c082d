"""Recognise masks, tables, fixed filters and placeholders by the numbers in a stored tensor."""

from __future__ import annotations

import numpy as np
import torch

MIN_ROWS = 8
MAX_ROWS = 64
"""The test for sinusoids needs at least so many rows of a table, and reads at most so many."""

BLOCK = 512
NUM_BLOCKS = 8
"""So many blocks of so many elements are a sample of a tensor, so that a mapped file is not read as a whole."""
LARGE = 1 << 22
"""Elements. Masks, filter banks and Fourier matrices beyond this have other numbers than zeros in a sample."""

MASKED_BELOW = -50
"""A score lowered by this much has no weight after softmax."""


def is_mask(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has only zeros and large negative numbers, or is a matrix [..., n, m] of 0 and 1."""

    def only_mask_values(values: torch.Tensor, matrix: bool) -> bool:
        allowed = (values == 0) | (values <= MASKED_BELOW)
        return bool((allowed | (values == 1) if matrix else allowed).all())

    # a vector of 0 and 1 may be a scale or a bias that was initialised so
    matrix = tensor.ndim >= 2 and tensor.shape[-1] > 1 and tensor.shape[-2] > 1
    flat = tensor.reshape(-1)
    # the first values rule out most weights, without reading all of a mapped file
    if not only_mask_values(flat[:64], matrix) or not only_mask_values(flat, matrix):
        return False
    if bool((flat <= MASKED_BELOW).any()):
        return True
    # zeros alone are a bias at its start, ones alone a scale
    return matrix and bool((flat == 0).any() and (flat == 1).any())


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
    # the first matrix and its first rows are enough, in fp64 since neighbours nearly cancel
    rows = tensor.reshape(-1, *tensor.shape[-2:])[0][:MAX_ROWS].double()
    # x[n + 1] + x[n - 1] and x[n], for every n but the first and the last
    sums = rows[2:] + rows[:-2]
    middle = rows[1:-1]
    # least squares for 2 cos(w) in each column, then the residual relative to the column's greatest value
    ratio = (sums * middle).sum(0) / middle.square().sum(0).clamp_min(1e-30)
    fits = ((sums - ratio * middle).abs() <= 2e-3 * rows.abs().amax(0) + 1e-5 * rows.abs().max()).all(0)
    # constant columns satisfy the equation too; at least half of them must vary
    varies = (rows.amax(0) - rows.amin(0)) > 1e-3 * rows.abs().amax(0)
    return bool(fits.all()) and int(varies.sum()) * 2 >= rows.shape[1]


def is_fourier_matrix(tensor: torch.Tensor) -> bool:
    """Return whether the columns or the rows of a matrix [n, m] are sines and cosines."""
    # a corner rules out most weights, without reading all of a mapped file
    return any(
        is_sinusoidal_table(matrix[:MAX_ROWS, :MIN_ROWS]) and is_sinusoidal_table(matrix)
        for matrix in (tensor, tensor.t())
    )


def is_integer_table(tensor: torch.Tensor) -> bool:
    """Return whether all elements are integers, not all equal, and one is 2 or more: grids, strides, distances."""
    flat = tensor.reshape(-1)
    if not _all_integers(flat[:64]) or not _all_integers(flat):
        return False
    # 0 and 1 alone may be a mask or an initial value, and one number for all a scale
    return bool(flat.abs().max() >= 2) and bool((flat != flat[0]).any())


def _all_integers(values: torch.Tensor) -> bool:
    return bool((values == values.round()).all())


def is_identity(tensor: torch.Tensor) -> bool:
    """Return whether a matrix [n, m] or the kernel of a convolution passes its input on: torch's eye_ and dirac_."""
    matrix = tensor
    while matrix.ndim > 2:  # [outputs, inputs / groups, ...] -> its centre [outputs, inputs / groups]
        matrix = matrix.select(-1, matrix.shape[-1] // 2)
    # every element outside of the centre must be zero
    if int((tensor != 0).sum()) != int((matrix != 0).sum()):
        return False
    if torch.equal(matrix, torch.eye(*matrix.shape, dtype=matrix.dtype)):
        return True
    # each output copies one input at most; dirac_ with groups repeats the identity of one group
    once = bool(((matrix == 0) | (matrix == 1)).all()) and bool((matrix.sum(1) <= 1).all())
    return tensor.ndim > 2 and once and bool(matrix.any())


def is_distance_table(tensor: torch.Tensor) -> bool:
    """Return whether all rows are evenly spaced numbers, or all matrices [n, n] a multiple of |row - column|: ALiBi."""
    length = tensor.shape[-1] if tensor.ndim else 0
    if tensor.ndim < 2 or length < MIN_ROWS or not bool(torch.isfinite(tensor).all()):
        return False
    rows = tensor.reshape(-1, length)[: MAX_ROWS * MAX_ROWS].double()
    # evenly spaced: all steps of a row are equal
    steps = rows[:, 1:] - rows[:, :-1]
    largest = rows.abs().amax(1, keepdim=True)
    if bool(((steps - steps[:, :1]).abs() <= 1e-5 * largest).all()):
        return bool((steps.abs() > 1e-4 * largest).any())
    # distances |row - column| need as many rows as columns
    if tensor.shape[-2] != length:
        return False
    places = torch.arange(length, dtype=torch.float64)
    # the element [1, 0] of each matrix is its slope, since the distance there is 1
    distances = (places[:, None] - places).abs()
    matrices = tensor.reshape(-1, length, length).double()
    return bool(matrices.any()) and bool(torch.isclose(matrices, matrices[:, 1:2, :1] * distances, rtol=1e-5).all())


def is_fixed_filter(tensor: torch.Tensor) -> bool:
    """Return whether each kernel of [outputs, inputs / groups, ...] is symmetric, or all are made of whole numbers.

    Symmetric: unchanged, or changed in sign alone, when every spatial dimension is reversed, such as blur kernels,
    derivatives and Fourier bases. The first element of a row of a Fourier basis stands alone:

        cos(2 pi n / 8)     1  [ .7  0  -.7  -1  -.7  0  .7 ]
        sin(2 pi n / 8)     0  [ .7  1   .7   0  -.7 -1 -.7 ]

    Kernels of one number and kernels that have one element, such as those of torch's dirac_, are not fixed.
    """
    if max(tensor.shape[2:]) < 3 or not tensor.numel():
        return False
    # a few kernels rule out most weights, without reading all of a mapped file
    return all(_all_fixed(tensor, part.reshape(-1, *tensor.shape[2:])) for part in (tensor[:2, :2], tensor))


def _all_fixed(tensor: torch.Tensor, kernels: torch.Tensor) -> bool:
    """kernels: [kernels, ...], all of the tensor's or some."""
    # kernels of one element or of equal elements say nothing: only means of windows are then fixed
    flat = kernels.reshape(len(kernels), -1)
    if bool((((flat != 0).sum(1) <= 1) | (flat == flat[:, :1]).all(1)).all()):
        return _is_box(tensor, flat)
    if _symmetric(kernels):
        return True
    # a Fourier basis: its first element stands alone
    if kernels.ndim == 2 and _symmetric(kernels[:, 1:]):
        return True
    return is_integer_table(kernels)


def _is_box(tensor: torch.Tensor, flat: torch.Tensor) -> bool:
    """Return whether every kernel of a depthwise convolution is the mean of its window."""
    return tensor.shape[1] == 1 and bool(((flat * flat.shape[1] - 1).abs() < 1e-5).all())


def _symmetric(kernels: torch.Tensor) -> bool:
    """kernels: [kernels, ...]."""
    dims = tuple(range(1, kernels.ndim))
    # rounding leaves a little of what would be zero, such as the sine of the highest frequency of a Fourier basis
    bound = 1e-4 * kernels.abs().amax(dims, keepdim=True) + 1e-5 * kernels.abs().max()
    # unchanged when reversed, or changed in sign
    even, odd = (((kernels - sign * kernels.flip(dims)).abs() <= bound).flatten(1).all(1) for sign in (1, -1))
    return bool((even | odd).all())


def is_filter_bank(tensor: torch.Tensor) -> bool:
    """Return whether each column of [bins, filters] is a band: zero, then rising, then falling, then zero."""
    bins, filters = tensor.shape
    if bins < MIN_ROWS or filters < 2:
        return False
    # a corner rules out most weights, without reading all of a mapped file
    if bool((tensor[:8, :8] < 0).any()) or bool((tensor < 0).any()):
        return False
    # a band covers few of the bins
    if int((tensor == 0).sum()) * 2 < tensor.numel():
        return False
    steps = tensor[1:] - tensor[:-1]
    # behind the first fall there is no rise
    fallen = (steps < 0).cumsum(0) > 0
    bands = ~((steps > 0) & fallen).any(0)
    # bands of a single bin say little: half of the filters must cover two or more
    wide = int(((tensor > 0).sum(0) >= 2).sum())
    return bool(bands.all()) and wide * 2 >= filters


def is_distinctive(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has so many different numbers that an equal tensor must be a copy of it.

    Zeros, ones and identity matrices are equal in many places of a model without being one weight.
    """
    distinct = len(np.unique(_sample(tensor).numpy()))
    return distinct > max(2, min(16, tensor.numel() // 4))


def is_large_and_empty(tensor: torch.Tensor) -> bool:
    """Return whether a large tensor is zero in a sample of it, such as all weights of a file that is made of shapes."""
    return tensor.numel() > LARGE and not bool(_sample(tensor).any())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    # a few blocks from all over the tensor, without reading all of a mapped file
    starts = torch.linspace(0, max(flat.numel() - BLOCK, 0), NUM_BLOCKS, dtype=torch.float64).long().tolist()
    return torch.cat([flat[start : start + BLOCK] for start in starts])
