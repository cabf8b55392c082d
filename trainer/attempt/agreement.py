"""What the ranks agree on in a step: sums and decisions, after one all-reduce and one read of the device.

rank 0    squares 3.1   loss 0.2   stop 0   save 1   ...
rank 1    squares 2.9   loss 0.3   stop 1   save 0   ...
agreed    squares 6.0   loss 0.5   stop yes save yes ...      the same on both: they take the same branch
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onward.trainer.parallel.observing.throughput import Work
from onward.trainer.parallel.replicas.norms import sum_over_world


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after the backward passes of a step."""

    squares: float
    """Square of the L2 norm of all gradients, divided by `divisor`."""
    loss: float
    divisor: float
    """What the gradients are still to be divided by: 1 unless the loss counts it in its forward passes."""
    wait_s: float
    """Seconds that the ranks waited for their samples, added up."""
    trained_s: float
    """Seconds of training of all attempts, by the clock of the rank that counts them."""
    stop: bool
    """Whether any rank was asked to stop."""
    save: bool
    """Whether any rank says that a checkpoint is due."""
    work: Work
    """Of all ranks."""


def agree(
    device: torch.device,
    *,
    squares: Tensor,
    loss: Tensor,
    divisor: Tensor,
    wait_s: float,
    trained_s: float,
    stop: bool,
    save: bool,
    work: Work,
) -> Agreed:
    """Add up the numbers of all ranks, and take each decision that any rank takes. Collective: every rank.

    squares, loss, divisor: scalars; the sum over the ranks counts each gradient and each target once.
    """
    # decisions travel as 0 or 1: a sum above 0 says that some rank has taken it
    numbers = (squares, loss, divisor, wait_s, trained_s, stop, save, *work)
    squares_sum, loss_sum, divisor_sum, waits_s, trained, stops, saves, *works = sum_over_world(numbers, device)
    agreed_divisor = max(divisor_sum, 1.0)
    mean, squares_of_mean = loss_sum / agreed_divisor, squares_sum / agreed_divisor**2
    return Agreed(squares_of_mean, mean, agreed_divisor, waits_s, trained, stops > 0, saves > 0, Work(*works))
