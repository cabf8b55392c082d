"""What a rehearsal measures before a run, as parts of its record."""

from __future__ import annotations

import math

from onward.trainer.run.record_base import Record


class Needs(Record):
    """Least numbers of bytes that a run needs (trainer/rehearsal/needs.py)."""

    rank_bytes: int
    """Weights, gradients and optimizer state of one rank."""
    activation_bytes: int = 0
    """What a micro-batch keeps for its backward pass, measured on one row; 0 = not measured."""
    checkpoint_bytes: int
    model_bytes: int
    """The ONNX file with its external data."""


class Guard(Record):
    """The file under another runtime beside the module that is trained: values, shapes and a derivative of the loss."""

    sizes: tuple[str, ...] = ()
    """The batch sizes and lengths at which values and shapes agree, such as "4 rows, length 7 of input x"."""
    difference: float = math.nan
    """The greatest over these, of the output's largest value."""
    derivative: float = math.nan
    """Of the loss of the file, along one random direction of all trained weights, by a central difference; NaN if it
    was not had."""
    gradient: float = math.nan
    """The same by the gradient of the training step."""
    error: float = math.nan
    """How far both are apart, of the sum of all weights' parts in the derivative."""
    bound: float = math.nan
    """How far they may be apart for the runtime that computed the difference."""
    judged_by: str = ""
    """The runtime that computed the loss, and its precision."""
    left_out: tuple[str, ...] = ()
    """What could not be had, and why."""
    elapsed_s: float = 0.0

    @property
    def summary(self) -> str:
        """Return it as a clause."""
        parts = [f"the file agrees at {', '.join(self.sizes)} (off by {self.difference:.2g})"] if self.sizes else []
        if not math.isnan(self.error):
            parts.append(
                f"a derivative of the loss by {self.judged_by} is {self.error:.1g} off the gradient (bound "
                f"{self.bound:.1g})"
            )
        return "; ".join([*parts, *self.left_out])
