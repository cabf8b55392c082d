"""Show checked certificates and replays as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from onward.trainer.checkpoint.chain import CheckedCheckpoint, CheckedRun

if TYPE_CHECKING:  # the task imports Prefect
    from onward.tasks.replay import Replay

SHOWN = 12
"""Digits of a digest that tables show."""


def rows_of_check(checked: CheckedRun | CheckedCheckpoint) -> Iterator[tuple[str, ...]]:
    """Yield a row for each checkpoint: name, the one before, digests of certificate, weights and optimizer, result."""
    for each in checked.checkpoints if isinstance(checked, CheckedRun) else (checked,):
        found = each.certificate
        digests = (found.digest, found.weights, found.optimizer) if found else ("", "", "")
        result = "differs" if each.problems else "as saved"
        yield (each.name, each.goes_on_from, *(digest[:SHOWN] for digest in digests), result)


def facts_of_replay(replayed: Replay) -> dict[str, str]:
    """Return names and values of a replay."""
    start = f"step {replayed.from_step}" if replayed.from_step else "the ONNX file"
    return {
        "replayed": f"from {start} to step {replayed.to_step}",
        "weights": f"{replayed.replayed.weights[:SHOWN]}, saved {replayed.certificate.weights[:SHOWN]}",
        "optimizer": f"{replayed.replayed.optimizer[:SHOWN]}, saved {replayed.certificate.optimizer[:SHOWN]}",
        "result": "other bits" if replayed.differences else "the same bits",
    }
