"""A resume verifies its checkpoint once, says where it goes on, and never begins again at step 0 unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.flows.run_state.runs import discard_damaged
from onward.trainer.checkpoint.resume import find_resume_point
from onward.trainer.checkpoint.retention import set_aside
from onward.trainer.checkpoint.save import save
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement
from onward.trainer.errors import CheckpointError, ConfigError
from onward.trainer.events import EventWriter
from onward.trainer.run.directory import RunDir
from onward.trainer.run.recorded.sweep_records import Membership
from onward.trainer.run.records import write_record
from tests.support import graphs
from tests.support.ranks import run_ranks
from tests.support.runs import events as events_of
from tests.support.runs import make_run, start_attempt, train_run


def files_hashed_by(mpi: MPIContext, root: str, attempt: int) -> list[str]:
    """Run the training loop; return the checkpoint files that this rank has read for their digest, in order."""
    from onward.trainer import loop
    from onward.trainer.events import Heartbeat

    hashed: list[str] = []
    plain_open = Path.open

    def recording_open(path: Path, mode: str = "r", buffering: int = -1, *others: Any, **options: Any) -> Any:
        if path.suffix == ".safetensors" and mode == "rb" and buffering == 0:
            hashed.append(path.name)
        return plain_open(path, mode, buffering, *others, **options)

    run = RunDir(Path(root))
    Path.open = recording_open  # type: ignore[assignment,method-assign]
    result = loop.train(
        run,
        mpi,
        attempt=attempt,
        heartbeat=Heartbeat(run.heartbeat),
        stop_requested=lambda: False,
    )
    assert (result.status, result.step) == ("done", 2)
    return hashed


@pytest.mark.mpi
def test_a_resume_hashes_each_file_of_its_checkpoint_once(tmp_path: Path) -> None:
    rows = np.random.default_rng(0)
    columns = {"features": rows.normal(size=(40, 4)).astype(np.float32), "label": np.ones((40, 1), np.float32)}
    run = make_run(
        tmp_path,
        graphs.tiny_mlp(),
        columns,
        model={"loss": "mse"},
        train={"global_batch_size": 8, "num_steps": 2},
        parallel={"data": 2},
    )
    program = f"{__name__}:files_hashed_by"
    assert run_ranks(2, program, str(run.root), run.begin_attempt(), timeout_s=240) == [[], []]
    resumed = run_ranks(2, program, str(run.root), run.begin_attempt(), timeout_s=240)
    assert sorted(resumed) == [["rank-00000.safetensors"], ["rank-00001.safetensors"]]


# -- which checkpoint it is, and what is said

ALONE = MPIContext(0, 1, 0, 1, "here", torch.device("cpu"))


def with_checkpoints(root: Path, *steps: int) -> RunDir:
    run = RunDir(root)
    run.root.mkdir(exist_ok=True)
    run.begin_attempt()
    for step in steps:
        state = TrainState(step=step, samples_seen=step, scaler={}, metrics={})
        parts = {"model/w": (torch.full((100,), float(step)), Placement.full((100,)))}
        save(run, attempt=1, state=state, parts=parts, mpi=ALONE)
    return run


def damage(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def test_a_run_that_had_no_checkpoint_begins_at_step_0_and_a_repeated_one_says_so(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path)
    assert find_resume_point(run, mpi=ALONE) == (None, (), "")
    again = find_resume_point(run, mpi=ALONE, step_before=7)
    assert again.sentence == "begins again at step 0, because no checkpoint was saved; steps 1 to 7 are made again"


def test_the_sentence_names_the_step_the_damaged_ones_and_what_is_made_again(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path, 20, 40, 60)
    assert find_resume_point(run, mpi=ALONE).sentence == "goes on from step 60 (step-000000060)"
    assert find_resume_point(run, mpi=ALONE, step_before=61).sentence.endswith("; step 61 is made again")
    damage(run.checkpoint(60))
    damage(run.checkpoint(40))
    set_aside(run.checkpoint(60))  # as the checkpoint task does meanwhile
    events = EventWriter(run.events, attempt=1, rank=0)
    events.scalars(63, loss=1.0)
    events.close()
    found = find_resume_point(run, mpi=ALONE, step_before=61)
    assert found.checkpoint is not None
    assert found.damaged == ("step-000000060", "step-000000040")
    assert found.sentence == (
        "goes on from step 20 (step-000000020); steps 21 to 63 are made again; 2 newer checkpoints are damaged and not "
        f"used: step-000000060, step-000000040 (kept in {run.checkpoints})"
    )


@pytest.mark.parametrize("renamed", [False, True])
def test_a_run_with_damaged_checkpoints_alone_is_refused_with_the_choices(tmp_path: Path, renamed: bool) -> None:
    run = with_checkpoints(tmp_path, 20, 40)
    for step in (20, 40):
        damage(run.checkpoint(step))
        if renamed:
            set_aside(run.checkpoint(step))
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints of run .* are damaged .*--from-start.*new run"):
        find_resume_point(run, mpi=ALONE)
    discard_damaged(run)  # what --from-start does
    assert find_resume_point(run, mpi=ALONE).checkpoint is None
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step-000000020.discarded",
        "step-000000040.discarded",
    ]


def test_a_trial_with_damaged_checkpoints_alone_is_told_what_its_sweep_can_do(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path, 20, 40)
    write_record(run.trial, Membership(sweep_id="abc", number=3, mlflow_run_id=""))
    damage(run.checkpoint(40))
    with pytest.raises(ConfigError, match=r"so `onward sweep --resume abc` goes on from step 20.*start a new sweep"):
        discard_damaged(run)
    damage(run.checkpoint(20))
    told = "begin trial 3 of its sweep again at step 0 with `onward sweep --resume abc --from-start`, .* new sweep"
    with pytest.raises(CheckpointError, match=told):
        find_resume_point(run, mpi=ALONE)


def test_from_start_is_refused_where_a_checkpoint_is_complete(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path, 20, 40)
    damage(run.checkpoint(40))
    with pytest.raises(ConfigError, match=r"step-000000020 is complete.*goes on from step 20"):
        discard_damaged(run)
    assert run.checkpoint(40).is_dir()


def test_a_checkpoint_that_is_a_link_out_of_the_run_is_not_followed(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path / "run", 20, 40)
    run.checkpoint(40).rename(tmp_path / "elsewhere")
    run.checkpoint(40).symlink_to(tmp_path / "elsewhere")
    found = find_resume_point(run, mpi=ALONE)
    assert found.checkpoint is not None
    assert (found.checkpoint.info.step, found.damaged) == (20, ("step-000000040",))


@pytest.mark.mpi
def test_ranks_refuse_a_run_of_which_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    rows = np.random.default_rng(0)
    columns = {"features": rows.normal(size=(40, 4)).astype(np.float32), "label": np.ones((40, 1), np.float32)}
    sections: dict[str, Any] = {"model": {"loss": "mse"}, "train": {"global_batch_size": 8, "num_steps": 4}}
    run = make_run(tmp_path, graphs.tiny_mlp(), columns, **sections, parallel={"data": 2}, checkpoint={"period": 2})
    train_run(run)
    damage(run.checkpoint(4))
    train_run(run)  # the other one is complete
    (*_, resumed) = events_of(run, "start")
    assert resumed.step == 2
    assert resumed.resumed.startswith(
        "goes on from step 2 (step-000000002); steps 3 to 4 are made again; 1 newer checkpoint is damaged"
    )
    for path in run.checkpoints.glob("step-*[0-9]"):
        damage(path)
    assert start_attempt(run).wait(60) != 0
    assert "CheckpointError: all 2 checkpoints of run run are damaged" in run.log(run.current_attempt).read_text()
