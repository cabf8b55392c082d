"""Compute a part of a run again, from one of its checkpoints to the next, and compare the results bit for bit.

    RUN/checkpoints/step-40 --hard links--> SCRATCH/checkpoints/step-40 --ranks train--> SCRATCH/checkpoints/step-60
    RUN/checkpoints/step-60 <-------------------- the same bits? ----------------------------------'

The run directory is only read. The scratch directory is under ONWARD_HOME, where all hosts see it, and is deleted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from onward.tasks.train import train_once
from onward.trainer.checkpoint.retention import list_checkpoints, step_in
from onward.trainer.checkpoint.verification import VerifiedCheckpoint, verify
from onward.trainer.data.reading.fetching import restore_copies
from onward.trainer.errors import CheckpointError, ConfigError
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.kept_settings import refuse_left_out
from onward.trainer.run.records import Record, RunIdentity, read_record, write_record


class Replay(Record):
    """A part of a run that was computed again."""

    run: str
    from_step: int
    to_step: int
    differences: tuple[str, ...] = ()
    """The first tensors that differ, with numbers; () = the same bits."""


def replay(run: RunDir, *, from_step: int | None = None) -> Replay:
    """Train from the checkpoint of `from_step` to the next one that is kept, in the same layout; compare both.

    from_step: 0 = from the ONNX file; None = from the last but one. Raises CheckpointError when there are no two such
    checkpoints or one of them is damaged, ConfigError for a step that is not kept, and the errors of the ranks.
    """
    # two checkpoints that lie next to each other: the shortest part that can be compared
    start, stop = choose([step_in(path.name) for path in list_checkpoints(run)], from_step, run)
    restore_copies(run)
    saved = verify(run.checkpoint(stop))
    with scratch_run(run, start) as scratch:
        reached = verify(train_until(scratch, stop))
        return Replay(
            run=run.root.name,
            from_step=start,
            to_step=stop,
            differences=tuple(_differences(saved, reached)),
        )


def choose(steps: Sequence[int], from_step: int | None, run: RunDir) -> tuple[int, int]:
    """Return the step to begin at, and the one to reach. steps: of the kept checkpoints, in order."""
    kept = f"run {run.root.name} keeps the checkpoints of steps {', '.join(map(str, steps)) or 'none'}"
    if from_step is None:
        if len(steps) < 2:
            raise CheckpointError(
                f"{kept}, and a replay needs two: raise checkpoint.keep_newest, or use --from 0, which trains from the "
                "ONNX file to the first one"
            )
        return steps[-2], steps[-1]
    if from_step and from_step not in steps:
        raise ConfigError(f"--from {from_step}: {kept}; name one of them, or 0")
    later = [step for step in steps if step > from_step]
    if not later:
        raise ConfigError(f"--from {from_step}: {kept}, and none after it, which the replay could be compared with")
    return from_step, later[0]


@contextlib.contextmanager
def scratch_run(run: RunDir, start: int) -> Iterator[RunDir]:
    """Yield a run directory in which the run stands at step `start`; delete it afterwards."""
    onward_home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=onward_home(), prefix=".replay-") as name:
        scratch = RunDir(Path(name) / run.root.name)
        scratch.checkpoints.mkdir(parents=True)
        settings = read_config(run, "given")
        refuse_left_out(settings.left_out)
        saving = settings.checkpoint.model_copy(update={"period": 0})  # only at the step to reach
        unprofiled = settings.monitor.model_copy(update={"profile_steps": ()})
        write_record(scratch.config, settings.model_copy(update={"checkpoint": saving, "monitor": unprofiled}))
        identity = read_record(run.identity, RunIdentity)
        # a replay must not write to the records of the run
        nowhere = {"mlflow_run_id": "", "mlflow_url": "", "prefect_url": "", "tracking_uri": ""}
        write_record(scratch.identity, identity.model_copy(update=nowhere))
        for record, copied in ((run.remote, scratch.remote), (run.code, scratch.code)):
            if record.exists():
                shutil.copyfile(record, copied)
        for folder, copied in ((run.quantized, scratch.quantized), (run.teacher, scratch.teacher)):
            if folder.is_dir():
                shutil.copytree(folder, copied)
        if not (run.shards / "manifest.json").exists():
            raise ConfigError(
                f"{run.shards} leads to no shards: they were deleted; `onward resume {run.root.name}` makes them again"
            )
        # the same shards, because the order of the rows depends on them
        scratch.shards.symlink_to(run.shards.resolve(), target_is_directory=True)
        if start:
            shutil.copytree(run.checkpoint(start), scratch.checkpoint(start), copy_function=_link_or_copy)
        yield scratch


def train_until(run: RunDir, step: int) -> Path:
    """Train to the end of a step and save; return the checkpoint. Raises the error of the ranks."""
    train_once(run, "--until", str(step), if_stopped="the replay was stopped; the run is unchanged")
    return run.checkpoint(step)


def _differences(saved: VerifiedCheckpoint, reached: VerifiedCheckpoint) -> list[str]:
    one = saved.manifest
    other = reached.manifest
    # where the data stands is a part of the state, too
    position = [] if one.state.position == other.state.position else ["another position"]
    # the same layout writes the same files; a run that went on with fewer ranks has divided its tensors otherwise
    if [file.sha256 for file in one.files] == [file.sha256 for file in other.files]:
        return position
    from onward.trainer.checkpoint.load import differences  # imports torch

    return [*position, *differences(saved, reached)]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
