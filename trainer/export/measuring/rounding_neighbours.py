"""Decide whether rounding explains why two runtimes differ on a file that rounds to integers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

MOST_NEIGHBOURS = 0.1
MOST_STEPS = 8
"""Allowed for a file that rounds to integers: the share of an output's elements that are apart (or as many as one row
has), and by how many steps. Measured: 0.8 % and 2 steps behind 13 quantized values (a MobileNet), 4.9 % and 6 steps
behind 96 (a BERT); biases that were rounded in one of both only, 67 %."""


class Neighbours:
    """Counts the elements of one output that differ because a value on the border of two integers was rounded to the
    other one.

    torch and onnxruntime add up the same products in another order, so their sums differ by about 1e-7. Where a sum is
    that close to the border of two integers, they round to neighbours, one step apart, and the layers behind pass that
    on. step: the scale of the output; 0 = it is not quantized itself, and counts as if 8 bits held its range.
    """

    def __init__(self, step: float, tolerance: float) -> None:
        self._step = step
        self._tolerance = tolerance
        self._elements = self._apart = self._row = 0
        self._greatest = self._range = 0.0

    def add(self, ours: Any, theirs: Any) -> None:
        """Count the elements of one batch."""
        pairs = [(ours, theirs)] if isinstance(ours, Tensor) else list(zip(ours, theirs, strict=False))
        for mine, other in pairs:
            a = mine.detach().double().numpy()
            b = np.asarray(other).astype(np.float64)
            if a.shape != b.shape or not np.isfinite(a).all() or not np.isfinite(b).all():
                self._greatest = math.inf  # this is no rounding
                continue
            differences = np.abs(a - b)
            self._elements += a.size
            # elements of one row
            self._row = max(self._row, a.size // max(len(a), 1) if a.ndim else 1)
            self._apart += int((differences > self._tolerance * np.abs(a).max(initial=0.0)).sum())
            self._greatest = max(self._greatest, float(differences.max(initial=0.0)))
            self._range = max(self._range, float(np.ptp(a)) if a.size else 0.0)

    @property
    def share(self) -> float:
        """The share of elements that are further apart than the tolerance."""
        return self._apart / max(self._elements, 1)

    @property
    def steps(self) -> float:
        """How many steps the furthest is apart."""
        # 255: the intervals of 8 bits
        step = self._step or self._range / 255
        return self._greatest / step if step else math.inf

    @property
    def allowed(self) -> bool:
        """Whether rounding explains it."""
        # one flip in front changes all elements of its row
        few = self._apart <= max(MOST_NEIGHBOURS * self._elements, self._row)
        return few and self.steps <= MOST_STEPS * (1 + 1e-6)

    def __str__(self) -> str:
        return (
            "the file rounds to integers, and two runtimes may round to neighbouring ones: "
            f"{100 * MOST_NEIGHBOURS:g} % of the elements may be apart by up to {MOST_STEPS} steps of 8 bits, here "
            f"{100 * self.share:.2g} % are, by up to {self.steps:.3g}; export.tolerance says what is allowed for all"
        )
