"""Every recorded way in which an attempt or a flow ends, with its class, its retries, its exit status and what to do.

The job is a stand-in that leaves what real ranks and mpirun have left; all that follows is the code of a run. Real
ranks are in tests/tasks/test_train.py and test_endings_of_real_ranks.py, whole commands in test_exit_statuses.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from prefect import State

from onward.flows.run_state.run_status import describe
from onward.flows.running.flow_guard import Ending
from onward.infra.job.job import Outcome
from onward.tasks.train import train, worth_retrying
from onward.trainer.config.loading import build_config
from onward.trainer.errors import ConfigError, DataError, OnwardError, RuntimeUnavailable, Stopped, TrainingFailed
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import endings
from onward.trainer.run.outcomes.run_ending import ending_of
from onward.trainer.run.records import AttemptResult, RankError, RankReport, RuntimeReport, TrainResult, write_record
from tests.flows.test_cli import make_run
from tests.support.attempts import ASSERTION, TIMED_OUT, WATCHDOG

LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
WAITED = "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation"
KILL = "SIGKILL: killed from outside"
FULL = "OSError: [Errno 27] File too large"
DAEMON = "PRTE has lost communication with a remote daemon.\n  Remote daemon: [prterun@0,2] on node h1"
DEAF = "A daemon failed to report back after being spawned.\n\n  Local host:    h0\n  Remote host:   h1\n"
LOST_HOST = "mpirun cannot reach host h1, or has lost it; mpirun ended with status "
BY_SIGNAL = "prterun noticed that process rank {} with PID 6074 on node h0 exited on signal {} ({}).\n"
BY_STATUS = "The first process to do so was:\n   Process name: [prterun-h0-6106@1,{}]   Exit code:    1\n"
ABORTED = BY_SIGNAL.format(0, 6, "Aborted")
CHAINED = (
    "\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n"
)
"""What follows the first error of a chain, which has no traceback if it was only remembered."""

GOES_ON = "no checkpoint is saved, so that it begins again at step 0: onward resume mlp-3"
ANSWERS: Mapping[str, tuple[bool, int, str]] = {
    # class: whether a retry follows an attempt, the usual exit status, what to do
    "done": (False, 0, ""),
    "stopped": (False, 75, GOES_ON),
    "user_error": (False, 2, "correct what is listed. A run keeps the configuration that it began with: start a new"),
    "data_error": (False, 2, "correct the rows that are named, and start a new run"),
    "non_finite": (False, 6, "it would diverge again: lower optimizer.learning_rate, set train.clip_norm, or look at"),
    "out_of_memory": (
        True,
        70,
        f"change what the message lists, and start a new run; where more memory is free, {GOES_ON}",
    ),
    "hang": (True, 70, f"look at the line that is named (`onward logs` shows the stacks of all ranks); {GOES_ON}"),
    "rank_lost": (True, 70, GOES_ON),
    "preempted": (True, 70, GOES_ON),
    "host_lost": (True, 70, f"start the host again, or take it out of launch.hostfile; {GOES_ON}"),
    "storage": (True, 3, f"make room (`onward gc` lists what may go) or repair the disk; {GOES_ON}"),
    "server": (True, 70, f"start the server again (Onward's own: `onward up`); {GOES_ON}"),
    "unknown": (True, 70, f"the traceback is in flow.log (`onward logs`); {GOES_ON}"),
    "machine": (False, 3, f"correct what is listed; {GOES_ON}"),
    "fenced": (False, 72, "nothing: a newer attempt has the run"),
}


def printed(rank: int, cause: str) -> str:
    """What the exception hook of a rank prints."""
    return f'rank {rank}: Traceback (most recent call last):\n  File "loop.py", line 7, in train\n    save()\n{cause}\n'


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a job of two ranks leaves behind."""

    errors: Mapping[int, str] = field(default_factory=dict)
    """Rank -> what its record says."""
    secondary: tuple[int, ...] = ()
    """The ranks that only lost another one."""
    output: str = ""
    result: Literal["", "done", "stopped"] = ""
    reason: Literal["exited", "stopped", "silent", "start_timeout"] = "exited"
    returncode: int | None = 70
    stopped_ranks: Mapping[int, str] = field(default_factory=dict)
    traceback: str = ""
    """What rank 1 wrote when it was ended."""
    oom_kills: int = 0
    disk: str = ""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """The hosts that do not answer, and why."""
    first: int | None = None
    """The rank that is to be named as the first one that failed."""
    said: str = ""
    """A part of what is to be said about the ending."""


def error(cause: str, **known: Any) -> Left:
    """One rank has written an error."""
    return Left(errors={1: cause}, **known)


def lost(cause: str, **known: Any) -> Left:
    """One rank has lost the other one."""
    return Left(errors={1: cause}, secondary=(1,), **known)


STOPPED_RANK: dict[str, Any] = {"stopped_ranks": {1: "its process 6075 was stopped by a signal (SIGSTOP) for 3 s"}}
CASES: tuple[tuple[Left | Exception, str] | tuple[Left | Exception, str, int], ...] = (
    # what is left, the class, and the exit status in the end if it is not the usual one of the class
    (Left(result="done", returncode=0), "done"),
    (Left(result="stopped", reason="stopped", returncode=75), "stopped"),
    (Left(reason="stopped"), "stopped"),
    # -- ranks with a record of their error
    (error("Fenced: attempt 1 found attempt 2"), "stopped", 72),
    (error("ConfigError: no weight matches"), "user_error"),
    (error("UnsupportedModel: no operator"), "user_error"),
    (error("RuntimeUnavailable: no GPU for rank 1"), "user_error", 3),
    (error("CheckpointError: checkpoint x belongs to another model"), "user_error", 4),
    (error("RecordError: manifest.json is damaged"), "unknown", 4),
    (error("DataError: row 7"), "data_error"),
    (error("DeviceAssertion: index out of range"), "data_error", 8),
    (error("Diverged: step 7: loss nan"), "non_finite"),
    (error("OutOfMemory: CUDA out of memory"), "out_of_memory", 7),
    (error("MemoryError: "), "out_of_memory"),
    (error(KILL, oom_kills=1), "out_of_memory"),
    (error("Hang: the job made no progress: it computes"), "hang"),
    (error("ReplicasDiffer: weight w"), "rank_lost"),
    (error("TrainingFailed: the gradients of rank 1 never came"), "unknown"),
    (error("SIGTERM: asked to end from outside"), "preempted"),
    (error(KILL), "rank_lost"),
    (error("SIGSEGV: a crash in native code"), "rank_lost"),
    (error("status 1: it made no progress for 0:00:30"), "hang"),
    (error("SIGABRT: a collective timed out: ALLREDUCE number 78"), "hang"),
    (error(KILL, hosts={"h1": "No route to host"}), "host_lost"),
    (error("Hang: it wrote no stack", hosts={"h1": "No route to host"}), "host_lost"),
    (lost(LOST), "rank_lost"),
    (lost(LOST, output=DAEMON), "host_lost"),
    (lost(WAITED, first=0), "hang"),
    (lost(WAITED, first=0, output=BY_SIGNAL.format(1, 6, "Aborted")), "hang"),
    (error("ConnectionError: cannot reach the store"), "server"),
    (error("ReadTimeout: 30 s"), "server"),
    (error("ValueError: a bug"), "unknown"),
    # -- disks
    (error("StorageUnavailable"), "storage"),
    (error("StorageUnavailable: step 7 could not be saved: No space left on device: /x"), "storage"),
    (error("CheckpointError: step 7 could not be saved: File too large: /x"), "storage"),
    (error("OSError: [Errno 28] No space left on device"), "storage"),
    (error("OSError: [Errno 5] Input/output error"), "storage"),
    (error("OSError: [Errno 30] Read-only file system: 'x'"), "storage"),
    (error("OSError: [Errno 116] Stale file handle"), "storage"),
    # its status is 3 where the disk is still full when the flow ends: see tests/flows/running/test_flow_guard.py
    (Left(disk="/x cannot be written: No space left on device"), "storage", 70),
    # -- ranks that could not write their record, and have printed their error
    (Left(output=printed(0, FULL), first=0), "storage"),
    (Left(output=printed(0, LOST) + printed(1, FULL), first=1), "storage"),
    (Left(output=f"rank 0: {FULL}\n{CHAINED}  File ...\n{FULL}\n", first=0), "storage"),
    (Left(output=f"rank 0: done\nrank 0: epoch: 3\n{printed(1, FULL)}", first=1), "storage"),
    (
        Left(errors={0: LOST}, secondary=(0,), output=printed(1, FULL) + printed(0, LOST), first=1),
        "storage",
    ),
    (Left(errors={0: "DataError: row 7"}, output=printed(1, FULL), first=0), "data_error"),
    (Left(output=printed(1, LOST), first=1), "rank_lost"),
    (Left(output=printed(0, "onward.trainer.errors.DataError: row 7"), first=0), "data_error"),
    # -- what mpirun says, and how it ended
    (Left(returncode=1), "preempted"),
    (Left(returncode=-15), "preempted"),
    (Left(returncode=-9), "rank_lost"),
    (Left(result="stopped", returncode=75), "preempted"),
    (Left(output=BY_STATUS.format(1), returncode=1), "unknown"),
    (Left(output="-----\nThere are not enough slots\n", returncode=1), "unknown"),
    (Left(output=DAEMON, returncode=0, said=LOST_HOST), "host_lost"),
    (Left(output=DEAF, returncode=213, said=LOST_HOST), "host_lost"),
    (Left(output="ssh: connect to host h1 port 22: No route to host\n"), "host_lost"),
    (Left(), "unknown"),
    (Left(reason="silent", returncode=-9), "hang"),
    (Left(reason="start_timeout"), "hang"),
    (Left(traceback="Timeout (0:00:30)!\nThread 0x7f (most recent call first):\n"), "hang"),
    # -- what a rank printed before a signal ended it
    (Left(output=BY_SIGNAL.format(0, 9, "Killed")), "rank_lost"),
    (Left(output=BY_SIGNAL.format(0, 15, "Terminated")), "preempted"),
    (Left(output=ABORTED), "rank_lost"),
    (Left(output=WATCHDOG.format(TIMED_OUT) + BY_SIGNAL.format(1, 6, "Aborted")), "hang"),
    (
        Left(output=ASSERTION + "CUDA error: device-side assert triggered\n" + ABORTED),
        "data_error",
        8,
    ),
    (Left(output=f"CUDA out of memory. Tried to allocate 2 GiB\n{ABORTED}"), "out_of_memory", 7),
    (Left(output=f"CUDA error: an illegal memory access\n{ABORTED}"), "rank_lost"),
    (Left(output=f"NCCL error: unhandled system error\n{ABORTED}"), "rank_lost"),
    (Left(output=f"CUDA error: unknown error\n{BY_STATUS.format(1)}", returncode=1), "unknown"),
    # -- while a rank is stopped by a signal
    (Left(output=BY_SIGNAL.format(0, 9, "Killed"), first=0, **STOPPED_RANK), "rank_lost"),
    (Left(output=BY_SIGNAL.format(1, 9, "Killed"), first=1, **STOPPED_RANK), "rank_lost"),
    (Left(output=ABORTED, first=0, **STOPPED_RANK), "rank_lost"),
    (Left(output=f"[rank0]:[E1122] {TIMED_OUT}\n{ABORTED}", first=1, **STOPPED_RANK), "hang"),
    (
        Left(errors={0: WAITED}, secondary=(0,), output=BY_STATUS.format(0), first=1, **STOPPED_RANK),
        "hang",
    ),
    # -- errors of the flow
    (ConfigError("no key lr"), "user_error"),
    (DataError("a.csv, line 3: no number"), "data_error"),
    (RuntimeUnavailable("no MPI: there is no mpirun"), "machine"),
    (OSError(28, "No space left on device", "/dev/full"), "storage"),
    (PermissionError(13, "Permission denied", "/etc/shadow"), "machine"),
    (RuntimeUnavailable(f"2 ranks did not start: {DEAF}"), "host_lost", 3),
    (
        RuntimeUnavailable("2 ranks did not start: ssh: connect to host h9 port 22: No route to host"),
        "host_lost",
        3,
    ),
    (RuntimeUnavailable("1 host does not answer: h9 (no answer in 15 s)"), "host_lost", 3),
    (RuntimeUnavailable("MLflow at http://h cannot be reached: refused"), "server", 3),
    (ZeroDivisionError("of nothing"), "unknown", 1),
)


def name_of(left: Left | Exception) -> str:
    """The name of a case: what is not as in `Left()`."""
    if isinstance(left, Exception):
        return f"{type(left).__name__} {left}"[:60]
    changed = {name: value for name, value in vars(left).items() if value != getattr(Left(), name)}
    return "; ".join(f"{name} {value}" for name, value in changed.items())[:60]


@dataclass(frozen=True)
class Job:
    """Stands for the job of mpirun."""

    run_dir: RunDir
    attempt: int
    left: Left

    def run(self) -> Outcome:
        """Leave what is to be left."""
        run, left, attempt = self.run_dir, self.left, self.attempt
        for rank, cause in left.errors.items():
            known = {"attempt": attempt, "rank": rank, "host": "h0", "step": 7, "traceback": "", "at_ms": rank}
            write_record(
                run.rank_error(attempt, rank), RankError(cause=cause, secondary=rank in left.secondary, **known)
            )
        if left.result:
            values = {"attempt": attempt, "status": left.result, "step": 7, "samples_seen": 1, "metrics": {}}
            write_record(run.result(attempt), AttemptResult.model_validate({**values, "elapsed_s": 1}))
        run.log(attempt).write_text(left.output)
        run.heartbeat.write_text('{"step": 7, "silence_s": 20}')
        if left.traceback:
            run.traceback(attempt, 1).write_text(left.traceback)
        now_ms = time.time_ns() // 1_000_000
        return Outcome(left.returncode, left.reason, 9.0, now_ms, left.stopped_ranks)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A configured run of two ranks, whose attempts follow without a pause."""
    monkeypatch.setattr(
        "onward.flows.running.flow_guard._expect_no_answer", lambda: None
    )  # it is for the rest of the process
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    monkeypatch.setattr("onward.tasks.attempts.retry_policy.FIRST_DELAY_S", 0.0)
    run = make_run(tmp_path, "aaaa-1", "mlp-3", config_name="mlp")
    (tmp_path / "hosts").write_text("h0 slots=1\nh1 slots=1\n")
    launch = {"retries": 1, "hostfile": str(tmp_path / "hosts")}
    sections = {
        "model": {"path": str(tmp_path / "model.onnx")},
        "data": {"source": "digits"},
        "train": {"num_steps": 100, "global_batch_size": 8},
        "parallel": {"data": 2},
        "launch": launch,
    }
    write_record(run.config, build_config(sections))
    return run


def trained(run: RunDir) -> None:
    """Train as the flow does."""
    while True:
        try:
            result = train.fn(run)
        except OnwardError as failed:
            if worth_retrying(train, None, _failed(failed)):  # type: ignore[arg-type]
                continue
            raise
        if isinstance(result, State):
            raise Stopped(result.message or "")
        if isinstance(result, TrainResult) and result.status == "done":
            return


def _failed(error: Exception) -> State[Any]:
    from prefect.states import Failed

    return Failed(data=error)


def test_the_host_that_a_rank_has_lost_is_named_and_not_the_rank(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    left = lost("RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.88.0.11]:4711")
    known = {"world_size": 2, "expected_world_size": 2, "pid": 1, "device": "cpu", "versions": {}, "memory_bytes": 1}
    known |= {"all_reduce": 3.0, "all_reduce_expected": 3.0}
    ranks = [RankReport(rank=rank, host=f"h{rank}", address=f"10.88.0.1{rank}", **known) for rank in (0, 1)]
    write_record(run.runtime, RuntimeReport(ranks=tuple(ranks), launch_s=1.0, disk_free_bytes=1))
    monkeypatch.setattr("onward.tasks.attempts.attempt.silent_hosts", lambda hosts: {})
    monkeypatch.setattr("onward.tasks.attempts.wait_before_retry.unready_hosts", lambda run, hosts: {})
    monkeypatch.setattr("onward.tasks.train.job_of_attempt", lambda attempt: Job(attempt.run, attempt.number, left))
    with pytest.raises(TrainingFailed, match=r"step 7: rank 1 on h0 has lost the ranks on h1: RuntimeError: "):
        trained(run)
    first, _ = endings(run)
    assert (first.kind, first.rank, first.host) == ("rank_lost", None, "h1")
    assert first.sentence.startswith("rank 1 on h0 has lost the ranks on h1: ")


@pytest.mark.parametrize(
    ("left", "kind", "status"), [pytest.param(*case, *[None] * (3 - len(case)), id=name_of(case[0])) for case in CASES]
)
def test_an_ending_has_its_class_its_retry_its_exit_status_and_what_to_do(
    left: Left | Exception, kind: str, status: int | None, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "fenced" if status == 72 else kind
    retried, usual, to_do = ANSWERS[shown]
    if isinstance(left, Left):
        counts = iter((0, left.oom_kills) * 2)
        monkeypatch.setattr("onward.tasks.attempts.attempt.num_oom_kills", lambda: next(counts))
        monkeypatch.setattr("onward.tasks.attempts.attempt.silent_hosts", lambda hosts: left.hosts)
        monkeypatch.setattr("onward.tasks.attempts.wait_before_retry.unready_hosts", lambda run, hosts: {})
        monkeypatch.setattr("onward.tasks.attempts.attempt.storage_problem", lambda folder: left.disk)
        monkeypatch.setattr("onward.tasks.train.job_of_attempt", lambda attempt: Job(attempt.run, attempt.number, left))
    with contextlib.suppress(OnwardError), Ending(run):
        if isinstance(left, Exception):
            raise left
        trained(run)
    ended = ending_of(run)
    assert ended is not None
    assert ended.exit_status == (status or usual), ended
    attempts = endings(run)
    assert len(attempts) == (1 + retried if isinstance(left, Left) else 0)
    assert all(attempt.sentence and "\n" not in attempt.sentence for attempt in attempts)
    if isinstance(left, Left):
        assert {attempt.kind for attempt in attempts} == {kind}
        assert left.first in (None, attempts[0].rank)
        assert all(left.said in attempt.sentence for attempt in attempts)
        assert not left.stopped_ranks or run.stacks(1).exists() == (kind == "hang")
    if usual:
        described = describe(run)
        assert described.state == ("stopped" if usual == 75 else "failed")
        assert described.kind == shown
        assert described.to_do.startswith(to_do)
        if isinstance(left, Exception):
            assert (getattr(left, "strerror", None) or str(left)) in described.error
