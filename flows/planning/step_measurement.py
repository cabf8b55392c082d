"""Measure how long a step takes: train a few steps on the real ranks, in a run directory that is deleted afterwards.

    config ── rehearse ── shards (of the cache, or made and deleted) ── mpirun ── events.jsonl ── Pace

Nothing of it is recorded in MLflow or Prefect. The directory is under ONWARD_HOME, where all hosts see it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onward.tasks.checks.machine_check import machine_problems
from onward.tasks.checks.rehearsing import Preparation
from onward.tasks.train import train_once
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.metrics import StopConfig
from onward.trainer.config.sections.training import ScheduleConfig
from onward.trainer.data.completed_settings import completed
from onward.trainer.data.storage.row_counts import cached_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.errors import RuntimeUnavailable, TrainingFailed
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.history import RunHistory
from onward.trainer.run.records import utc_now, write_record
from onward.trainer.run.remote.local_copies import LocalCopies, with_copies
from onward.trainer.run.timing.step_timing import MEASURED, Pace, pace_of

FIRST_STEPS = 2
"""Steps at the beginning that do not count: they allocate memory, compile, and fill caches."""
LONGEST_H = 0.25
"""After this time the measurement ends, with the steps that were made."""
EVALUATED = 4
"""Evaluation batches of each replica."""


def measure(config: RunConfig, copies: LocalCopies, *, steps: int) -> tuple[RunConfig, Pace]:
    """Return the configuration, with the sizes that `parallel = "auto"` chose, and the pace of `steps` steps of it.

    Raises ConfigError or RuntimeUnavailable for a run that would be refused, and the errors of its ranks.
    """
    config = completed(config, with_copies(config, copies))
    if missing := machine_problems(dict(config), resumed=True):  # resumed: no MLflow server is needed
        raise RuntimeUnavailable(missing)
    # before anything of its own computes, so that it is the load of others
    load = os.getloadavg()[0]
    with _directory() as run:
        preparation = Preparation(config, copies, run.quantized)
        if config.quantize.aware:
            preparation.quantize(run)
        chosen, _ = preparation.rehearse()
        if copies.copies:
            write_record(run.remote, copies)
        write_record(run.config, few_steps(chosen, steps + FIRST_STEPS))
        rows = _shard(run)
        train_once(run, if_stopped="the measurement was stopped; nothing of it is kept")
        batch = config.train.global_batch_size
        history = RunHistory.of(run.events, series=MEASURED)
        if (pace := pace_of(history, batch=batch, first_steps=FIRST_STEPS)) is None:
            raise TrainingFailed(f"no step was made in {60 * LONGEST_H:g} minutes, so that nothing was measured")
        facts = {"measured_at": utc_now(), "host": socket.gethostname(), "data": config.data.source, "load": load}
        return chosen, pace.model_copy(update={**facts, "evaluation_rows": rows})


def few_steps(config: RunConfig, steps: int) -> RunConfig:
    """Return the configuration of the measurement: what does not change a step is left out."""
    train = {"num_steps": steps, "num_epochs": 0.0, "log_period": 1, "evaluation_period": 0, "skip_steps": ()}
    # a few batches tell the time of an evaluation, which grows with its rows
    rows = EVALUATED * config.evaluation_batch_size * config.parallel.data
    data = {"evaluation_rows": min(config.data.evaluation_rows or rows, rows)}
    changes = {
        "train": config.train.model_copy(update=train),
        "data": config.data.model_copy(update=data),
        "checkpoint": config.checkpoint.model_copy(update={"period": 0, "minutes": 0.0, "load": ""}),
        "stop": StopConfig(max_hours=LONGEST_H),
        "schedule": ScheduleConfig(),
        "monitor": config.monitor.model_copy(update={"profile_steps": ()}),
    }
    return config.model_copy(update=changes)


@contextlib.contextmanager
def _directory() -> Iterator[RunDir]:
    """Yield a run directory, and delete it afterwards; those of killed measurements of this host go, too."""
    onward_home().mkdir(mode=0o700, parents=True, exist_ok=True)
    prefix = f".measure-{socket.gethostname()}-"
    for left in onward_home().glob(f"{prefix}*"):
        process = left.name.removeprefix(prefix).partition("-")[0]
        # the name has the process that made it; the host too, because a home may be shared
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=onward_home(), prefix=f"{prefix}{os.getpid()}-") as name:
        yield RunDir(Path(name) / "run")


def _shard(run: RunDir) -> int:
    """Link the shards of the cache, or shard the data into the directory; return how many rows are evaluated."""
    config = read_config(run)
    cache = onward_home() / "shards"
    run.root.mkdir(parents=True, exist_ok=True)
    # what is made for a measurement alone goes with it
    if cached_shards(config, cache) is None:
        cache = run.root.parent / "shards"
    directory, manifest, _ = make_training_shards(config, cache)
    run.shards.symlink_to(directory.resolve(), target_is_directory=True)
    return min(config.data.evaluation_rows, manifest.rows("evaluation"))
