"""How attempts of the whole trainer end when something is done to their processes, and that the bits are the same."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from onward.infra.job import forks
from onward.infra.job.job import running_job
from onward.infra.job.job_guard import members
from onward.tasks.train import train
from onward.trainer.errors import Diverged
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.attempt_endings import endings
from onward.trainer.run.records import TrainResult
from tests.support.graphs import tiny_conv_net
from tests.support.retried import train_to_end
from tests.support.runs import assert_equal_bits, events, final_tensors, make_run, tiny_images
from tests.support.workshop import until

pytestmark = pytest.mark.mpi
STEPS = 120
STEP = {"global_batch_size": 8, "num_steps": STEPS, "evaluation_period": 0}
LAUNCH = {"heartbeat_timeout_s": 8}


def new_run(folder: Path, **sections: Any) -> RunDir:
    usual = {"train": STEP, "parallel": {"data": 2}, "checkpoint": {"period": 20}, "launch": LAUNCH}
    return make_run(folder, tiny_conv_net(), tiny_images(80), **usual | sections)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = new_run(tmp_path_factory.mktemp("undisturbed"))
    train.fn(run)
    return run


@pytest.fixture(autouse=True)
def as_in_a_run() -> Iterator[None]:
    """Start the ranks as a run of a user does: they are forks of the fork server."""
    with forks.fork_server():
        assert forks.python() != [sys.executable]
        yield


def job_of(run: RunDir) -> dict[str, psutil.Process]:
    """The processes of the run's job: "mpirun", "rank 0", "rank 1", and "client 0" for what mpirun sees of rank 0."""
    job, found = running_job(run.root), {}
    for process in map(psutil.Process, members(job.tag) if job else []):
        with contextlib.suppress(psutil.Error):
            words, client = process.cmdline(), process.environ().get("PMIX_RANK")
            own = next((file.path for file in process.open_files() if file.path.endswith(".traceback")), "")
            if own:
                found[f"rank {int(Path(own).stem[5:])}"] = process
            elif "onward.trainer" in words:
                found["mpirun" if client is None else f"client {client}"] = process
    return found


def signalled_once_saved(run: RunDir, what: str, number: signal.Signals, *, attempts: int = 1) -> threading.Thread:
    """Send a signal to a process of each of the first `attempts` attempts, once it has saved a checkpoint."""

    def send() -> None:
        for attempt in range(1, attempts + 1):
            while not any(event.attempt == attempt for event in events(run, "checkpoint")):
                time.sleep(0.005)
            job_of(run)[what].send_signal(number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "number", "kind", "said"),
    [
        ("rank 1", signal.SIGKILL, "rank_lost", "rank 1 on {host} was ended by SIGKILL"),
        ("client 1", signal.SIGKILL, "rank_lost", "rank 1 on {host} was ended by SIGKILL"),
        ("client 1", signal.SIGSTOP, "hang", "was stopped by a signal (SIGSTOP)"),
        ("rank 0", signal.SIGSEGV, "rank_lost", "rank 0 on {host} was ended by SIGSEGV: a crash in native code"),
        ("rank 0", signal.SIGFPE, "rank_lost", "rank 0 on {host} was ended by SIGFPE"),
        ("rank 1", signal.SIGTERM, "preempted", "a signal that this flow had not sent"),
        ("rank 0", signal.SIGUSR1, "preempted", "a signal that this flow had not sent"),
        ("mpirun", signal.SIGUSR1, "preempted", "a signal that this flow had not sent"),
        ("mpirun", signal.SIGTERM, "preempted", "SIGTERM"),
        ("mpirun", signal.SIGHUP, "preempted", "SIGTERM"),
        ("mpirun", signal.SIGKILL, "rank_lost", "mpirun was ended by SIGKILL"),
        ("rank 1", signal.SIGSTOP, "hang", "was stopped by a signal (SIGSTOP)"),
    ],
)
def test_what_ended_an_attempt_is_said_and_the_retry_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: RunDir, what: str, number: signal.Signals, kind: str, said: str
) -> None:
    run = new_run(tmp_path)
    sending = signalled_once_saved(run, what, number)
    result = train_to_end(run)
    sending.join()
    assert isinstance(result, TrainResult)
    assert (result.status, result.attempts, result.step) == ("done", 2, STEPS)
    first, second = endings(run)
    print(first)
    assert first.kind == kind
    assert said.format(host=socket.gethostname()) in first.sentence
    assert f"it goes on from the checkpoint of step {second.resumed_from}" in first.action
    assert second.resumed_from == first.checkpoint >= 20
    assert first.step >= first.checkpoint
    assert_equal_bits(final_tensors(run), final_tensors(undisturbed))


@pytest.mark.slow
def test_three_kills_with_progress_between_them_do_not_use_up_two_retries(tmp_path: Path, undisturbed: RunDir) -> None:
    run = new_run(tmp_path)
    sending = signalled_once_saved(run, "rank 1", signal.SIGKILL, attempts=4)
    result = train_to_end(run)
    sending.join()
    assert isinstance(result, TrainResult)
    assert result.attempts == 5
    assert [ending.retry for ending in endings(run)] == [1, 1, 1, 1, 0]
    assert_equal_bits(final_tensors(run), final_tensors(undisturbed))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_of_a_rank_has_its_class_whatever_the_number_of_ranks_and_is_not_tried_again(
    ranks: int, tmp_path: Path
) -> None:
    run = new_run(tmp_path, parallel={"data": ranks}, optimizer={"learning_rate": 1e38})
    with pytest.raises(Diverged, match="lower the learning rate"):
        train_to_end(run)
    (only,) = endings(run)
    assert (only.kind, only.retry) == ("non_finite", 0)


@pytest.mark.slow
def test_a_rank_that_somebody_starts_by_hand_ends_with_the_status_of_its_error(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    refused = read_config(run).model_dump(mode="json") | {"model": {"path": str(run.root / "absent.onnx")}}
    run.config.write_text(json.dumps(refused))
    words = [*forks.python(), "-m", "onward.trainer", "train", str(run.root)]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 78, ended.stderr
    assert "rank 0: Traceback" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_can_write_neither_log_nor_record_is_a_matter_of_the_storage_and_says_why(
    ranks: int, tmp_path: Path
) -> None:
    run = new_run(tmp_path, parallel={"data": ranks})

    def limit() -> None:
        until(lambda: any(event.attempt == 1 for event in events(run, "checkpoint")), limit_s=120)
        for what, process in job_of(run).items():
            if what.startswith("rank"):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))

    threading.Thread(target=limit, daemon=True).start()
    train_to_end(run)
    first, second = endings(run)
    assert (first.kind, second.kind) == ("storage", "done")
    assert re.match(r"rank \d on \S+ failed: \w*Error: .*File too large", first.sentence), first.sentence


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group (version 1 or 2) with 1 MB of memory."""
    version_1 = Path("/sys/fs/cgroup/memory")
    group = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / f"onward-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if version_1.is_dir() else "memory.max")
        limit.write_text("1000000")
    except OSError as error:
        pytest.skip(f"a control group with a limit of its memory needs root, and cgroups that can be written: {error}")
    yield group
    group.rmdir()


@pytest.mark.slow
def test_a_rank_that_the_kernel_ends_for_want_of_memory_is_told_from_one_that_a_person_kills(
    small_memory: Path, tmp_path: Path
) -> None:
    run = new_run(tmp_path, train={**STEP, "num_steps": 2000})

    def confine() -> None:
        until(lambda: any(event.attempt == 1 for event in events(run, "checkpoint")), limit_s=120)
        (small_memory / "cgroup.procs").write_text(str(job_of(run)["rank 1"].pid))

    threading.Thread(target=confine, daemon=True).start()
    train_to_end(run)
    first, second = endings(run)
    assert (first.kind, first.rank, second.kind) == ("out_of_memory", 1, "done")
    assert "was ended by SIGKILL: the kernel's out-of-memory killer ended 1 process on this host" in first.sentence
