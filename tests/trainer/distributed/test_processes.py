"""The world as ranks find it, and how they leave it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from onward.infra.job import job, mpirun
from onward.trainer.config.loading import build_config
from onward.trainer.distributed import processes
from onward.trainer.distributed.failures import _exit_status, install_excepthook, lost_a_peer
from onward.trainer.distributed.mesh import AXES, ParallelDims, make_mesh
from onward.trainer.distributed.preflight import preflight
from onward.trainer.distributed.processes import MPIContext, assign_gpus, threads_of_rank
from onward.trainer.distributed.world import Place
from onward.trainer.errors import ConfigError, Fenced, RuntimeUnavailable, Stopped, TrainingFailed
from onward.trainer.run.directory import RunDir
from onward.trainer.run.machine.this_machine import physical_cores, spin_briefly_if_busy
from onward.trainer.run.records import write_record
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]


# -- tables


@pytest.mark.parametrize(
    ("rank", "coordinate"),
    [(0, (0, 0, 0)), (1, (0, 0, 1)), (2, (0, 1, 0)), (3, (0, 1, 1)), (5, (0, 2, 1)), (6, (1, 0, 0)), (11, (1, 2, 1))],
)
def test_coordinates_count_tensor_first_then_data_then_pipeline(rank: int, coordinate: tuple[int, ...]) -> None:
    assert ParallelDims(data=3, tensor=2, pipeline=2).coordinate(rank) == coordinate


def test_a_division_that_does_not_fit_the_world_is_refused_with_all_four_numbers() -> None:
    ParallelDims(data=2, tensor=2, pipeline=2).check(8)
    with pytest.raises(RuntimeUnavailable, match=r"data 2 x tensor 3 x pipeline 2 needs 12 ranks, but 8 were started"):
        ParallelDims(data=2, tensor=3, pipeline=2).check(8)


@pytest.mark.parametrize(
    ("siblings", "quota", "ranks", "threads"),
    [
        (("0", "1", "2", "3"), None, 1, 4),
        (("0", "1", "2", "3"), None, 2, 2),
        (("0,2", "1,3", "0,2", "1,3"), None, 1, 2),  # two cores with two hyperthreads each
        (("0,2", "1,3", "0,2", "1,3"), None, 4, 1),
        (("0", "1", "2", "3"), 2.5, 1, 2),
        (("0", "1", "2", "3"), 0.5, 1, 1),
    ],
)
def test_a_rank_has_the_cores_of_its_host_and_container_over_the_ranks(
    siblings: Sequence[str], quota: float | None, ranks: int, threads: int, tmp_path: Path, monkeypatch: Any
) -> None:
    for processor, text in enumerate(siblings):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(len(siblings))))
    monkeypatch.setattr(processes, "physical_cores", lambda: physical_cores(tmp_path))
    monkeypatch.setattr(processes, "core_limit", lambda: quota)
    assert threads_of_rank(ranks) == threads
    assert threads_of_rank(ranks, 3) == 3


def test_processors_of_which_the_system_says_nothing_are_cores(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7})
    assert physical_cores(tmp_path) == 3


@pytest.mark.parametrize(
    ("load", "given", "spins"),
    [
        (6.5, {}, "1000"),
        (4.5, {}, None),  # a run of its own before this one
        (6.5, {"GOMP_SPINCOUNT": "7"}, "7"),
        (6.5, {"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_wait_asleep_where_other_programs_compute(
    load: float, given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    spin_briefly_if_busy()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.slow
def test_it_is_decided_before_torch_is_imported() -> None:
    code = """
import os, sys
os.getloadavg = lambda: (1e6, 1e6, 1e6)
sys.argv[1:] = ["plan", "absent"]
import onward.trainer.run.machine.this_machine as m
before = m.spin_briefly_if_busy
m.spin_briefly_if_busy = lambda: (before(), print("torch" in sys.modules, os.environ["GOMP_SPINCOUNT"]))
import onward.trainer.__main__
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout == "False 1000\n"


def host_of(local_size: int, num_gpus: int, *, first: int = 0, visible: Sequence[int] = ()) -> list[Place]:
    """The ranks of one host. visible: for each rank a number that stands for the GPUs it sees; default: all alike."""
    numbers = visible or [0] * local_size
    return [Place(local, local_size, first, num_gpus, seen) for local, seen in enumerate(numbers)]


@pytest.mark.parametrize(
    ("places", "ranks_per_gpu", "indices"),
    [
        (host_of(2, 2), 1, [0, 1]),
        (host_of(2, 4), 1, [0, 1]),
        (host_of(2, 2) + host_of(2, 2, first=2), 1, [0, 1, 0, 1]),
        (host_of(4, 1), 4, [0, 0, 0, 0]),
        (host_of(4, 2), 2, [0, 0, 1, 1]),
        (host_of(3, 2), 2, [0, 0, 1]),
        # Slurm with one GPU for each task; with one for each two tasks
        (host_of(3, 1, visible=[7, 8, 9]), 1, [0, 0, 0]),
        (host_of(4, 1, visible=[7, 7, 8, 8]), 2, [0, 0, 0, 0]),
    ],
)
def test_ranks_of_a_host_divide_the_gpus_that_they_see(
    places: list[Place], ranks_per_gpu: int, indices: list[int]
) -> None:
    assert assign_gpus(places, ranks_per_gpu=ranks_per_gpu) == indices


def test_more_ranks_than_gpus_are_refused_for_all_ranks_that_have_none() -> None:
    with pytest.raises(RuntimeUnavailable) as refused:
        assign_gpus(host_of(4, 1), ranks_per_gpu=2)
    first, second = refused.value.problems
    assert first == (
        "no GPU for rank 2: it is local rank 2 of 4 on its host, which has 1 GPUs; start at most 2 ranks per GPU, "
        "raise launch.ranks_per_gpu (slow), or set launch.device = 'cpu'"
    )
    assert second.startswith("no GPU for rank 3")


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:3219"), True),
        (RuntimeError("Read error [127.0.0.1]:9: Connection reset by peer"), True),
        (RuntimeError("Timed out waiting 6000ms for recv operation to complete"), True),
        (RuntimeError("Timed out after 31 seconds waiting for clients. 1/2 clients joined."), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 5x2)"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # a file or a server, not a rank
    ],
)
def test_losing_a_peer_is_not_a_root_cause(error: Exception, secondary: bool) -> None:
    assert lost_a_peer(error) == secondary


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError(), 70), (TrainingFailed(), 70), (Fenced(), 72), (Stopped(), 75), (ConfigError(""), 78)],
)
def test_exit_status_says_whether_to_try_again(error: Exception, status: int) -> None:
    assert _exit_status(error) == status


STOPPED = """
import os, signal, subprocess, sys, time
from onward.trainer.distributed.failures import StopSignal
stop = StopSignal()
compiler = subprocess.Popen(["sleep", "0.5"])
assert not stop.requested
to, number = sys.argv[1:]
os.killpg(0, int(number)) if to == "group" else os.kill(os.getpid(), int(number))
deadline = time.monotonic() + 10
while not stop.requested and time.monotonic() < deadline:
    time.sleep(0.01)
print(stop.requested, compiler.wait())
"""


@pytest.mark.parametrize(
    ("to", "number"), [("rank", signal.SIGUSR1), ("rank", signal.SIGTERM), ("group", signal.SIGUSR1)]
)
def test_a_signal_to_stop_is_remembered_and_kills_nothing(to: str, number: signal.Signals) -> None:
    """Neither the rank nor a compiler that it waits for: mpirun signals the process group of a rank."""
    command = [sys.executable, "-c", STOPPED, to, str(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert (ended.returncode, ended.stdout) == (0, "True 0\n"), ended.stderr


# -- real ranks


def find_each_other(mpi: MPIContext) -> dict[str, Any]:
    dims = ParallelDims(data=2)
    mesh = make_mesh(mpi, dims, timeout_s=7)
    total = torch.tensor([mpi.rank + 1.0])
    dist.all_reduce(total, group=mesh.get_group("data"))
    timeouts = {mesh.get_group(axis)._get_backend(torch.device("cpu")).options._timeout for axis in AXES}
    return {
        "rank": (mpi.rank, mpi.world_size, mpi.local_rank, mpi.local_size, str(mpi.device)),
        "coordinate": [mesh.get_local_rank(axis) for axis in AXES] == [*dims.coordinate(mpi.rank)],
        "sum": float(total),
        "timeouts": [timeout / timedelta(seconds=1) for timeout in timeouts],
        "threads": torch.get_num_threads(),
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
        "report": preflight(mpi, 2).model_dump(mode="json"),
    }


@pytest.mark.mpi
def test_two_ranks_find_each_other() -> None:
    first, second = run_ranks(2, "tests.trainer.distributed.test_processes:find_each_other")
    assert first["rank"] == [0, 2, 0, 2, "cpu"]
    assert second["rank"] == [1, 2, 1, 2, "cpu"]
    for rank in (first, second):
        assert rank["coordinate"]
        assert rank["sum"] == 3.0
        assert rank["timeouts"] == [7.0]  # not the 30 minutes that new groups come with
        assert rank["threads"] == 1
        assert rank["interface"] == "lo"
        assert rank["report"]["all_reduce"] == rank["report"]["all_reduce_expected"] == 3.0
        assert rank["report"]["memory_bytes"] > 1e6
    assert first["report"]["pid"] != second["report"]["pid"]


def fail_on_one(mpi: MPIContext) -> None:
    if mpi.rank == 1:
        raise ValueError("the root cause")
    dist.barrier()


@pytest.mark.mpi
def test_run_ranks_raises_the_root_cause_not_the_echo() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 failed:(.|\n)*ValueError: the root cause"):
        run_ranks(2, "tests.trainer.distributed.test_processes:fail_on_one")


def fail_with_hook(mpi: MPIContext, root: str) -> None:
    install_excepthook(RunDir(Path(root)), attempt=4, step=lambda: 12)
    try:
        fail_on_one(mpi)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)


@pytest.mark.mpi
def test_a_failing_rank_leaves_its_error_as_data_and_the_echo_does_not_mask_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(2, "tests.trainer.distributed.test_processes:fail_with_hook", str(tmp_path))
    error = RunDir(tmp_path).first_error(4)
    assert error is not None
    assert (error.rank, error.step, error.cause, error.secondary) == (1, 12, "ValueError: the root cause", False)
    assert "fail_on_one" in error.traceback


FAILS_LATER = """
import resource, sys
import torch.distributed as dist
from onward.trainer.distributed.failures import install_excepthook
from onward.trainer.run.directory import RunDir
from pathlib import Path
install_excepthook(RunDir(Path(sys.argv[1])), attempt=1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # wraps the hook into one of its own
resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
raise ValueError("the root cause")
"""


@pytest.mark.slow
def test_a_rank_that_cannot_write_its_record_prints_its_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    ended = subprocess.run([sys.executable, "-c", FAILS_LATER, str(tmp_path)], capture_output=True, text=True)
    assert (ended.returncode, run.ranks_with_errors(1)) == (70, ())
    assert ended.stderr.startswith("rank 0: Traceback (most recent call last):\n")
    assert ended.stderr.endswith("\nValueError: the root cause\n")


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
ASSERTED = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


def fail_on_the_device(mpi: MPIContext, root: str, text: str) -> None:
    """Rank 1 fails as torch does on a GPU."""
    install_excepthook(RunDir(Path(root)), attempt=4, step=lambda: 2)
    try:
        if mpi.rank == 1:
            raise torch.OutOfMemoryError(text) if "memory" in text else RuntimeError(text)
        dist.barrier()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (OUT_OF_MEMORY, f"OutOfMemory: {OUT_OF_MEMORY}. To need less memory: raise train.gradient_accumulation_steps "),
        (ASSERTED, "DeviceAssertion: a GPU kernel was given an index out of range, such as a label or token id"),
    ],
)
def test_a_rank_records_errors_of_its_device_as_errors_that_a_retry_would_repeat(
    tmp_path: Path, text: str, cause: str
) -> None:
    run = RunDir(tmp_path)
    given = {"model": {"path": "model.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 1}}
    write_record(run.config, build_config(given))
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(2, "tests.trainer.distributed.test_processes:fail_on_the_device", str(tmp_path), text)
    error = run.first_error(4)
    assert error is not None
    assert (error.rank, error.step, error.secondary) == (1, 2, False)
    assert error.cause.startswith(cause)
    assert text.splitlines()[0] in error.traceback


def listening(mpi: MPIContext) -> list[str]:
    """Send tensors, and return the addresses on which this rank listens."""
    tensor = torch.ones(2)
    torch.distributed.all_reduce(tensor)
    torch.distributed.all_reduce(tensor, group=torch.distributed.new_group(list(range(mpi.world_size))))
    found = [each.laddr.ip for each in psutil.Process().net_connections("all") if each.status == "LISTEN"]
    torch.distributed.barrier()
    return found


@pytest.mark.mpi
def test_ranks_of_one_host_listen_on_loopback_only() -> None:
    found = run_ranks(2, "tests.trainer.distributed.test_processes:listening")
    assert [set(each) for each in found] == [{"127.0.0.1"}, {"127.0.0.1"}], "gloo, and the TCPStore of rank 0"


def wait_to_be_orphaned(mpi: MPIContext, folder: str) -> None:
    (Path(folder) / f"{mpi.rank}.pid").write_text(str(os.getpid()))
    signal.pause()


@pytest.mark.mpi
def test_ranks_end_with_mpirun_even_if_nothing_else_kills_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "kill_job", lambda tag: None)
    with ThreadPoolExecutor() as threads:
        orphans = "tests.trainer.distributed.test_processes:wait_to_be_orphaned"
        running = threads.submit(run_ranks, 2, orphans, str(tmp_path), forked=False)
        while len(list(tmp_path.glob("*.pid"))) < 2:
            assert not running.done()
            time.sleep(0.02)
        ranks = [psutil.Process(int(path.read_text())) for path in tmp_path.glob("*.pid")]
        ranks[0].parent().kill()
        assert psutil.wait_procs(ranks, timeout=5)[1] == []
        with pytest.raises(AssertionError, match="died without a word"):
            running.result(30)


RANKS = "onward.trainer.distributed.processes"
JOIN = f"from {RANKS} import connect; connect(expected_world_size={{}}, timeout_s=5, device='{{}}')"


Alone = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start_alone(tmp_path: Path) -> Alone:
    """Runs a program without mpirun; what MPI leaves of it goes to the test's directory."""
    settings = {**mpirun.SETTINGS, **os.environ, "OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    return lambda program, **environment: subprocess.run(
        [sys.executable, "-c", program],
        env=settings | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.mpi
def test_a_process_started_alone_is_a_world_of_one(start_alone: Alone) -> None:
    program = JOIN.format(1, "auto") + f"; from {RANKS} import disconnect; disconnect(); print('left')"
    assert start_alone(program, CUDA_VISIBLE_DEVICES="").stdout == "left\n"


@pytest.mark.slow
@pytest.mark.mpi
def test_the_library_of_another_launcher_is_noticed_before_anything_else(start_alone: Alone) -> None:
    refused = start_alone(JOIN.format(2, "cpu"), PMI_RANK="1")
    assert (
        "RuntimeUnavailable: the job needs 2 ranks, but MPI sees a world of 1 in the process launched as rank 1: "
        "launcher and MPI library do not belong together" in refused.stderr
    )


@pytest.mark.slow
@pytest.mark.mpi
def test_a_rank_without_its_gpu_says_so_with_the_numbers(start_alone: Alone) -> None:
    refused = start_alone(JOIN.format(1, "cuda"), CUDA_VISIBLE_DEVICES="")
    assert "no GPU for rank 0: it is local rank 0 of 1 on its host, which has 0 GPUs" in refused.stderr
