"""The global norm of the gradients, as the training loop computes it from what a reducer returns."""

from __future__ import annotations

import math

from onward.trainer.parallel.replicas.norms import sum_over_world
from onward.trainer.parallel.replicas.reducer import Reducer
from onward.trainer.parallel.replicas.zero import Sharded


def reduced_norm(reducer: Reducer | Sharded) -> float:
    """Complete the gradients and return their global norm. Collective: every rank of the world."""
    squares = reducer.reduce()
    (total,) = sum_over_world([squares], squares.device)
    return math.sqrt(total)
