"""The functions behind `onward verify`: read checkpoints again, and train a part of a run again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from onward.flows.api import require_flow
from onward.flows.configuration import AnyPath, prefect_at_home
from onward.flows.running.stop_signals import exit_on_sigterm
from onward.trainer.errors import ConfigError

if TYPE_CHECKING:
    from onward.flows.running.replayed_training import Replay
    from onward.trainer.checkpoint.verification import CheckedCheckpoint, CheckedRun


def verify(source: AnyPath = "last") -> CheckedRun | CheckedCheckpoint:
    """Read the checkpoints of a run and its data again, or one checkpoint, and compare every byte with its digest.

    `source`: a checkpoint directory, a bundle, or a run as `status` takes it. What is wrong is in `problems`.
    Raises ConfigError when there is no such run, CheckpointError when it has no checkpoint.
    """
    from onward.flows.run_state.exports import opened
    from onward.flows.run_state.runs import checkpoint_at, find_run
    from onward.trainer.checkpoint.verification import check_checkpoint, check_run

    if Path(source).is_file():
        with opened(os.fspath(source), run_code=True) as (_, checkpoint):  # nothing of it is run here
            return check_checkpoint(checkpoint)
    # a checkpoint directory may also lie outside of any run
    if found := checkpoint_at(os.fspath(source)):
        return check_checkpoint(found[1])
    return check_run(find_run(os.fspath(source)))


def replay(source: AnyPath = "last", *, from_step: int | None = None) -> Replay:
    """Train a part of a run again, from one kept checkpoint to the next, and compare the results bit for bit.

    `source`: a run, or one of its checkpoints, from which it begins. `from_step`: the checkpoint to begin at; 0 = the
    ONNX file; by default the last but one. Differing tensors are in `differences` of the record. Raises CheckpointError
    when a checkpoint is missing or damaged; else as `run`, and from the main thread like it.
    """
    require_flow("onward.replay")
    from onward.flows.run_state.runs import checkpoint_at, find_run

    with prefect_at_home():
        from onward.flows.running.replayed_training import replay as replay_run
    from onward.trainer.checkpoint.retention import step_in

    if (path := checkpoint_at(os.fspath(source))) is None:
        with exit_on_sigterm():
            return replay_run(find_run(os.fspath(source)), from_step=from_step)
    run, checkpoint = path
    if run is None or from_step is not None:
        raise ConfigError(f"{checkpoint}: name the run, and the step with --from, to replay it")
    with exit_on_sigterm():
        return replay_run(run, from_step=step_in(checkpoint.name))
