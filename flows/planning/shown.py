"""Print what a run takes, as `onward plan` shows it below the layout."""

from __future__ import annotations

from collections.abc import Iterator

from onward.flows.planning.checkpoint_period import CheckpointTimes
from onward.flows.planning.time_needed import TimeNeeded
from onward.flows.planning.whole_run import RunPlan
from onward.flows.shown.terminal_tables import changed_lines, print_item, table
from onward.trainer.quantities import duration, shown_size


def show_run_plan(found: RunPlan) -> None:
    """Print steps, time, disk and changed settings."""
    print("\nsteps and time of the training")
    table([*_steps(found), *_times(found.time)])
    for text in found.time.guessed:
        print_item(text)
    print("\ndisk, at most at a time")
    table([(each.what, shown_size(each.bytes), each.place) for each in found.disk.shares])
    in_all = shown_size(found.disk.total_bytes)
    of_checkpoint = shown_size(found.disk.checkpoint_bytes)
    shards = "shards are not counted"
    if found.rows.shard_bytes:
        shards = f"the shards exist ({shown_size(found.rows.shard_bytes)})"
    print(f"{in_all} in all; a checkpoint has {of_checkpoint}; {shards}")
    copied = f"beside the training, from a copy of {shown_size(found.copy_bytes)} in the memory of the hosts"
    print(f"checkpoints are written {copied if found.copy_bytes else 'while the training waits'}")
    for problem in found.disk.problems:
        print_item(problem)
    print("\ncheckpoints and failures")
    table(list(_checkpoint_times(found.checkpoint_times)))
    print("\nsettings that differ from the defaults")
    for line in changed_lines(found.changed, found.origins):
        print(line)


def _steps(found: RunPlan) -> Iterator[tuple[str, str]]:
    if found.rows.train:
        yield (
            "rows",
            f"{found.rows.train:,} to train on, {found.rows.evaluation:,} to evaluate on ({found.rows.source})",
        )
    else:
        yield "rows", found.rows.source
    if found.num_steps is None:
        yield "steps", "one epoch has an unknown number of steps"
    else:
        epochs = f", {found.epochs:.4g} epochs" if found.epochs is not None else ""
        yield "steps", f"{found.num_steps:,} of {found.num_samples or 0:,} samples{epochs}"


def _checkpoint_times(times: CheckpointTimes) -> Iterator[tuple[str, str]]:
    rate = f"{shown_size(times.storage_bytes_per_s)}/s"
    guess = "" if times.storage_given else ", a guess: --storage says the rate"
    yield "a checkpoint", f"complete after {duration(times.write_s)} at {rate}{guess}"
    yield "the training waits", f"{duration(times.wait_s)} for each"
    if not times.failures_every_s:
        yield "failures", "not counted: --failures-every says how often they are"
        return
    lost = f"lost in checkpoints, repeated steps and restarts of {duration(times.restart_s)}"
    yield "failures", f"one in {duration(times.failures_every_s)}"
    minutes = f"checkpoint.minutes={times.best_period_s / 60:.3g}"
    yield "best period", f"{duration(times.best_period_s)}, {minutes}: {times.best_loss:.1%} {lost}"
    if times.period_s:
        yield "configured period", f"{duration(times.period_s)}: {times.loss:.1%}"
    else:
        yield "configured period", "none: a failure costs all that was trained"


def _times(time: TimeNeeded) -> Iterator[tuple[str, str]]:
    about = "about " if time.source == "estimate" else ""
    yield "a step", f"{about}{duration(time.step_s)}, {about}{time.samples_per_s:.4g} samples/s: {time.said}"
    if time.steps_s is None:
        yield "1000 samples", f"{about}{duration(time.per_1000_samples_s)}"
        return
    parts = [f"steps {duration(time.steps_s)}"]
    if time.evaluations and time.evaluation_s is not None:
        parts.append(f"{time.evaluations} evaluations {duration(time.evaluations * time.evaluation_s)}")
    if time.checkpoints and time.checkpoint_s is not None:
        several = "s" * (time.checkpoints > 1)
        parts.append(f"{time.checkpoints} checkpoint{several} {duration(time.checkpoints * time.checkpoint_s)}")
    if time.setup_s:
        parts.append(f"loading {duration(time.setup_s)}")
    yield "in all", f"{about}{duration(time.total_s or 0.0)} ({', '.join(parts)})"
