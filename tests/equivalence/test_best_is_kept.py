"""With `export.checkpoint = "best"` the weights of the best evaluation are on the disk, whatever ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.tasks.checkpoint import mark_best
from onward.tasks.export import choose
from onward.trainer.checkpoint.retention import describe_exported, list_checkpoints, step_in
from onward.trainer.checkpoint.verification import verify
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import CheckpointInfo, TrainResult
from tests.support import graphs
from tests.support.runs import events, make_run, tiny_images, train_run, train_until

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("forked")]
SETTINGS: dict[str, Any] = {
    "train": {"global_batch_size": 8, "num_steps": 24, "evaluation_period": 4, "seed": 5},
    "optimizer": {"name": "adamw", "learning_rate": 3e-3},
    "checkpoint": {"minutes": 0},  # none by time, and none by steps
}


def made(folder: Path, *, gets_worse: bool = False, **sections: Any) -> RunDir:
    """gets_worse: evaluated by other labels than it learns, so that each evaluation is worse than the one before."""
    if gets_worse:
        columns = tiny_images(16, seed=1)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "other.npz", image=columns["image"], label=(columns["label"] + 1) % 4)
        sections["data"] = {"evaluation_source": str(folder / "other.npz")}
    return make_run(folder, graphs.tiny_conv_net(), tiny_images(80), **SETTINGS | sections)


def saved(run: RunDir) -> list[int]:
    return [step_in(path.name) for path in list_checkpoints(run)]


def kept(run: RunDir) -> tuple[CheckpointInfo, ...]:
    return mark_best([verify(path).info for path in list_checkpoints(run)], read_config(run).checkpoint)


def best_so_far(run: RunDir) -> list[int]:
    """Return the steps whose evaluation, as the event log has it, was better than all before it."""
    seen = {e.step: float(e.values["evaluation/loss"]) for e in events(run, "evaluation") if e.step > 0}
    return [step for step in sorted(seen) if seen[step] == min(seen[each] for each in seen if each <= step)]


def test_a_checkpoint_is_saved_whenever_an_evaluation_is_the_best_so_far_and_the_best_one_is_chosen(
    tmp_path: Path,
) -> None:
    worse = made(tmp_path / "worse", gets_worse=True)
    result = train_run(worse)
    assert best_so_far(worse) == [4]
    assert saved(worse) == [4, 24]
    assert choose(kept(worse), "best").step == 4
    ended = TrainResult(
        status="done", attempts=1, step=24, samples_seen=192, metrics=result.metrics, elapsed_s=result.elapsed_s
    )
    first, last = (info.metrics["evaluation/loss"] for info in kept(worse))
    assert describe_exported(4, kept(worse), ended, read_config(worse).checkpoint) == (
        f"step 4: evaluation/loss {first:.4g}; the last, step 24, had {last:.4g}"
    )

    better = made(tmp_path / "better", parallel={"data": 2})
    train_run(better)
    assert saved(better) == sorted({*best_so_far(better), 24})

    only_last = made(tmp_path / "only_last", export={"checkpoint": "last"})
    train_run(only_last)
    assert saved(only_last) == [24]


def test_early_stopping_leaves_the_weights_of_before_its_patience(tmp_path: Path) -> None:
    run = made(tmp_path, gets_worse=True, stop={"patience": 2})
    assert train_run(run).step == 12, "the evaluation of step 4 was the best, and two were worse"
    assert saved(run) == [4, 12]
    assert choose(kept(run), "best").step == 4


def test_a_killed_run_knows_what_was_the_best_before(tmp_path: Path) -> None:
    run = made(tmp_path, gets_worse=True, parallel={"data": 2}, checkpoint={"minutes": 0, "period": 9})
    for moment in (("scalars", 6), ("evaluation", 12)):
        train_until(run, moment)
    assert train_run(run).attempt == 3
    assert saved(run) == [4, 9, 18, 24], "evaluations 8 to 24 were worse than that at step 4, also after the resumes"
