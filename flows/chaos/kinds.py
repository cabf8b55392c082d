"""The table of faults: how each is injected, when, what has to end by it, and which class Onward has to say.

Only processes of the soak and files under its own home are touched. An injector gets the scene and a number from 0 to
1, hits its target, and returns its description; it raises NoTarget when there is none yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

from onward.flows.chaos.scene import NoTarget, Phase, Scene, until_gone
from onward.infra.stopped_ranks import STOPPED_S
from onward.trainer.errors import ConfigError

Inject: TypeAlias = Callable[[Scene, float], str]
Ends: TypeAlias = Literal["nothing", "attempt", "flow"]

SHORT_S = 2.0
"""How long something is away that has to be waited for."""
OUTAGE_S = 8.0
"""How long a server or a database is away that Onward has to do without."""
LONGEST_HANG_S = 200.0
"""How long to wait for the end of a rank that is held."""
PTRACE_SEIZE, PTRACE_INTERRUPT, WAIT_FOR_THREADS = 0x4206, 0x4207, 0x40000000
"""Of linux/ptrace.h and, as __WALL, linux/wait.h."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    what: str
    """For the table in `onward chaos --help` and in the documentation."""
    inject: Inject
    when: Phase = "train"
    """In which phase of a command it is injected."""
    ends: Ends = "attempt"
    """What it has to end: `nothing`, the `attempt`, which is retried, or the `flow`, which is resumed."""
    classes: tuple[str, ...] = ()
    """The classes of which the attempt's record has to name one; () = it is not judged."""
    states: tuple[str, ...] = ("COMPLETED",)
    """Of a fault that ends the flow: the states of which Prefect has to show one."""


# -- signals


def _send(process: psutil.Process, number: int) -> str:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        raise NoTarget("the process has just ended") from None
    return f"process {process.pid}"


def _rank(scene: Scene, choice: float) -> tuple[int, psutil.Process]:
    ranks = scene.ranks()
    number = int(choice * len(ranks))
    return number, ranks[number]


def _to_rank(number: int, scene: Scene, choice: float) -> str:
    rank, process = _rank(scene, choice)
    return f"rank {rank}, {_send(process, number)}"


def _to_all_ranks(number: int, scene: Scene, choice: float) -> str:
    return "; ".join(_send(process, number) for process in scene.ranks())


def _to_mpirun(number: int, scene: Scene, choice: float) -> str:
    return f"mpirun, {_send(scene.mpirun(), number)}"


def _to_flow(number: int, scene: Scene, choice: float) -> str:
    if scene.flow is None:
        raise NoTarget("no command runs")
    return f"flow, {_send(scene.flow, number)}"


def _pause(
    find: Callable[[Scene, float], Sequence[psutil.Process]], seconds: float, scene: Scene, choice: float
) -> str:
    """Stop processes for some seconds."""
    stopped = find(scene, choice)
    told = "; ".join(_send(process, signal.SIGSTOP) for process in stopped)
    time.sleep(seconds)
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    return f"{told} for {seconds:g} s"


def _hold(scene: Scene, choice: float) -> str:
    """Hold the main thread of a rank by ptrace, as in a deadlock of native code, until the rank is ended."""
    rank, process = _rank(scene, choice)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    if libc.ptrace(PTRACE_SEIZE, process.pid, None, None) or libc.ptrace(PTRACE_INTERRUPT, process.pid, None, None):
        raise NoTarget(f"ptrace of process {process.pid}: {os.strerror(ctypes.get_errno())}")
    until = time.monotonic() + LONGEST_HANG_S
    while time.monotonic() < until:
        # the launcher is told of the rank's end only after its tracer
        pid, status = os.waitpid(process.pid, os.WNOHANG | WAIT_FOR_THREADS)
        if pid and not os.WIFSTOPPED(status):
            break
        time.sleep(0.02)
    return f"rank {rank}, process {process.pid}"


def _kill_guard(scene: Scene, choice: float) -> str:
    guards = scene.guards()
    return f"guard, {_send(guards[int(choice * len(guards))], signal.SIGKILL)}"


def _kill_guard_and_flow(scene: Scene, choice: float) -> str:
    told = [_send(guard, signal.SIGKILL) for guard in scene.guards()]
    return f"{len(told)} guards; {_to_flow(signal.SIGKILL, scene, choice)}"


def _kill_exporter(scene: Scene, choice: float) -> str:
    return f"exporter, {_send(scene.having('onward.trainer', 'export')[-1], signal.SIGKILL)}"


def _kill_supervisor(scene: Scene, choice: float) -> str:
    return f"supervisor, {_send(scene.having('onward.infra.supervisor', 'prefect')[0], signal.SIGKILL)}"


def _kill_server(scene: Scene, choice: float) -> str:
    told = []
    for process in scene.server():
        with contextlib.suppress(NoTarget):  # the server ends with its parent
            told.append(_send(process, signal.SIGKILL))
    return f"Prefect server, {'; '.join(told)}"


# -- files: never a file of the user's, and none while ranks read it


def _newest_checkpoint(scene: Scene) -> Path:
    found = scene.checkpoints()
    if len(found) < 2:
        raise NoTarget("there are no two checkpoints yet")
    return found[-1]


def flip_bit(path: Path, choice: float) -> str:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        position = int(choice * size)
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << int(choice * 8999) % 8)]))
    return f"a bit of byte {position} of {path.parent.name}/{path.name}"


def _flip_checkpoint(scene: Scene, choice: float) -> str:
    folder = _newest_checkpoint(scene)
    files = sorted(folder.glob("*.safetensors"))
    told = flip_bit(files[int(choice * len(files))], choice)
    return f"{told}; {_to_rank(signal.SIGKILL, scene, choice)}"


def _truncate_manifest(scene: Scene, choice: float) -> str:
    path = _newest_checkpoint(scene) / "manifest.json"
    os.truncate(path, int(choice * path.stat().st_size))
    return f"{path.parent.name}/manifest.json; {_to_rank(signal.SIGKILL, scene, choice)}"


def _delete_rank_file(scene: Scene, choice: float) -> str:
    files = sorted(_newest_checkpoint(scene).glob("*.safetensors"))
    path = files[int(choice * len(files))]
    path.unlink()
    return f"{path.parent.name}/{path.name}; {_to_rank(signal.SIGKILL, scene, choice)}"


def _kill_flow_and_wait(scene: Scene, choice: float) -> str:
    told = _to_flow(signal.SIGKILL, scene, choice)
    until_gone(scene.jobs, 15.0)
    return told


def _shard(scene: Scene, choice: float) -> Path:
    files = sorted(path for path in scene.run_dir.shards.resolve().iterdir() if path.name != "manifest.json")
    if not files:
        raise NoTarget("there are no shards")
    return files[int(choice * len(files))]


def _flip_shard(scene: Scene, choice: float) -> str:
    told = _kill_flow_and_wait(scene, choice)
    return f"{flip_bit(_shard(scene, choice), choice)}, after {told}"


def _delete_shard(scene: Scene, choice: float) -> str:
    told = _kill_flow_and_wait(scene, choice)
    path = _shard(scene, choice)
    path.unlink()
    return f"{path.parent.name}/{path.name}, after {told}"


def _remove_heartbeat(scene: Scene, choice: float) -> str:
    scene.run_dir.heartbeat.unlink(missing_ok=True)
    return "RUN_DIR/heartbeat"


# -- databases


def _lock_database(folder: str, scene: Scene, choice: float) -> str:
    """Hold the exclusive lock of a SQLite database, as a slow reader or a backup does."""
    path = scene.home / folder / f"{folder}.db"
    if not path.exists():
        raise NoTarget(f"{path} does not exist yet")
    with contextlib.closing(sqlite3.connect(path, timeout=5.0, isolation_level=None)) as database:
        try:
            database.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            raise NoTarget(f"{path} is in use") from None
        time.sleep(OUTAGE_S)
        database.execute("ROLLBACK")
    return f"{folder}/{path.name} for {OUTAGE_S:g} s"


def _hide_mlflow(scene: Scene, choice: float) -> str:
    """Move MLflow's database away for some seconds, with its journals."""
    folder = scene.home / "mlflow"
    files = sorted(folder.glob("mlflow.db*"))
    if not files:
        raise NoTarget(f"{folder} has no database yet")
    for path in files:
        path.rename(path.with_name(f"hidden-{path.name}"))
    time.sleep(OUTAGE_S)
    for path in folder.glob("mlflow.db*"):
        path.unlink()  # an empty one, which a client has created meanwhile
    for path in files:
        path.with_name(f"hidden-{path.name}").rename(path)
    return f"mlflow/mlflow.db for {OUTAGE_S:g} s"


# -- limits that stand for a full disk and for a full memory


def _limit_files(scene: Scene, choice: float) -> str:
    """Let no rank write further into a file than a few bytes, as on a full disk."""
    for process in scene.ranks():
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (64, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return f"{len(scene.ranks())} ranks"


def _fill_disk(scene: Scene, choice: float) -> str:
    """Fill the file system of the home for some seconds."""
    filler = scene.home / "filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for block in (1 << 22, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(block)):
                        pass
        time.sleep(OUTAGE_S)
    finally:
        filler.unlink(missing_ok=True)
    return f"the file system of {scene.home} for {OUTAGE_S:g} s"


def _second_resume(scene: Scene, choice: float) -> str:
    """Resume a run that is running; that must be refused, and do no harm."""
    words = [sys.executable, "-m", "onward.flows.cli", "resume", scene.run_dir.root.name]
    environment = {**os.environ, **environment_of(scene)}
    ended = subprocess.run(words, env=environment, cwd=scene.home, capture_output=True, text=True, timeout=120)
    if ended.returncode != 2:
        raise ConfigError(f"a second resume of a running run ended with status {ended.returncode}, not 2")
    return "a second `onward resume`, refused"


def environment_of(scene: Scene) -> dict[str, str]:
    """Return what a command's environment gets, so that it uses this home alone."""
    from onward.flows.chaos.scene import TAG

    return {"ONWARD_HOME": str(scene.home), "PREFECT_HOME": str(scene.home / "prefect"), TAG: scene.tag}


def _signalled_rank(name: str, what: str, classes: tuple[str, ...] = ("rank_lost",)) -> Kind:
    number = signal.Signals[f"SIG{name}"]
    return Kind(f"SIG{name} to one rank: {what}", partial(_to_rank, number), classes=classes)


STOPPED, KILLED = ("CANCELLED",), ("CRASHED",)
KINDS: dict[str, Kind] = {
    "rank-kill": _signalled_rank("KILL", "killed from outside"),
    "rank-segv": _signalled_rank("SEGV", "a crash in native code"),
    "rank-abrt": _signalled_rank("ABRT", "native code aborts"),
    "rank-fpe": _signalled_rank("FPE", "a division in native code"),
    "rank-bus": _signalled_rank("BUS", "a mapped file that is gone"),
    "rank-ill": _signalled_rank("ILL", "code for another processor"),
    "rank-term": _signalled_rank("TERM", "a machine that is taken away", ("preempted",)),
    "rank-usr1": _signalled_rank("USR1", "a scheduler's warning", ("preempted",)),
    "ranks-kill": Kind("SIGKILL to all ranks", partial(_to_all_ranks, signal.SIGKILL), classes=("rank_lost",)),
    "rank-pause": Kind(
        f"one rank is stopped for {SHORT_S:g} s",
        partial(_pause, lambda scene, choice: [_rank(scene, choice)[1]], SHORT_S),
        ends="nothing",
    ),
    "rank-stop": Kind(
        f"one rank is stopped; Onward lets it go on after {STOPPED_S:g} s",
        partial(_to_rank, signal.SIGSTOP),
        ends="nothing",
    ),
    "rank-hang": Kind("the main thread of one rank is held: a deadlock in native code", _hold, classes=("hang",)),
    "mpirun-kill": Kind("SIGKILL to mpirun", partial(_to_mpirun, signal.SIGKILL), classes=("rank_lost", "host_lost")),
    "mpirun-term": Kind("SIGTERM to mpirun", partial(_to_mpirun, signal.SIGTERM), classes=("preempted",)),
    "mpirun-usr1": Kind("SIGUSR1 to mpirun", partial(_to_mpirun, signal.SIGUSR1), classes=("preempted",)),
    "mpirun-pause": Kind(
        f"mpirun is stopped for {SHORT_S:g} s",
        partial(_pause, lambda scene, choice: [scene.mpirun()], SHORT_S),
        ends="nothing",
    ),
    "guard-kill": Kind("SIGKILL to a guard of the job", _kill_guard, ends="nothing"),
    "guard-and-flow-kill": Kind("SIGKILL to all guards and the flow", _kill_guard_and_flow, ends="flow", states=KILLED),
    "flow-kill": Kind("SIGKILL to the flow", partial(_to_flow, signal.SIGKILL), ends="flow", states=KILLED),
    "flow-kill-start": Kind(
        "SIGKILL to the flow before it trains", partial(_to_flow, signal.SIGKILL), "start", "flow", states=KILLED
    ),
    "flow-term": Kind("SIGTERM to the flow", partial(_to_flow, signal.SIGTERM), ends="flow", states=STOPPED),
    "flow-int": Kind("Ctrl-C", partial(_to_flow, signal.SIGINT), ends="flow", states=STOPPED),
    "prefect-kill": Kind("SIGKILL to the Prefect server", _kill_server, ends="nothing"),
    "prefect-supervisor-kill": Kind(
        "SIGKILL to the supervisor of the Prefect server", _kill_supervisor, ends="nothing"
    ),
    "prefect-pause": Kind(
        f"the Prefect server is stopped for {OUTAGE_S:g} s",
        partial(_pause, lambda scene, choice: scene.server(), OUTAGE_S),
        ends="nothing",
    ),
    "prefect-locked": Kind(
        f"Prefect's database is locked for {OUTAGE_S:g} s", partial(_lock_database, "prefect"), ends="nothing"
    ),
    "mlflow-locked": Kind(
        f"MLflow's database is locked for {OUTAGE_S:g} s", partial(_lock_database, "mlflow"), ends="nothing"
    ),
    "mlflow-gone": Kind(f"MLflow's database is away for {OUTAGE_S:g} s", _hide_mlflow, ends="nothing"),
    "files-limited": Kind("no rank can write further into a file (RLIMIT_FSIZE)", _limit_files, classes=("storage",)),
    "disk-full": Kind(
        f"the home's file system is full for {OUTAGE_S:g} s; needs --home on a small one of its own",
        _fill_disk,
        classes=("storage",),
    ),
    "checkpoint-flip": Kind(
        "a flipped bit in the newest checkpoint, then SIGKILL to a rank", _flip_checkpoint, classes=("rank_lost",)
    ),
    "checkpoint-manifest": Kind(
        "the newest checkpoint's manifest is cut off, then SIGKILL to a rank",
        _truncate_manifest,
        classes=("rank_lost",),
    ),
    "checkpoint-deleted": Kind(
        "a file of the newest checkpoint is deleted, then SIGKILL to a rank", _delete_rank_file, classes=("rank_lost",)
    ),
    "shard-flip": Kind("SIGKILL to the flow, then a flipped bit in a shard", _flip_shard, ends="flow", states=KILLED),
    "shard-deleted": Kind("SIGKILL to the flow, then a shard is deleted", _delete_shard, ends="flow", states=KILLED),
    "heartbeat-deleted": Kind("the heartbeat file is deleted", _remove_heartbeat, ends="nothing"),
    "second-resume": Kind("`onward resume` of the run that runs", _second_resume, ends="nothing"),
    "exporter-kill": Kind("SIGKILL to the exporting process", _kill_exporter, "export", "flow", states=("FAILED",)),
    "flow-kill-export": Kind(
        "SIGKILL to the flow while it exports", partial(_to_flow, signal.SIGKILL), "export", "flow", states=KILLED
    ),
}
"""Name -> the kind."""

SMALL_DISK_BYTES = 8 << 30


def without_target(kinds: Sequence[str], home: Path) -> list[str]:
    """Return why some of the kinds cannot be injected here, one sentence each."""
    problems = [f"there is no kind {name!r}; the kinds are {', '.join(KINDS)}" for name in kinds if name not in KINDS]
    if "disk-full" in kinds:
        disk = os.statvfs(home)
        if home.stat().st_dev == home.parent.stat().st_dev or disk.f_blocks * disk.f_frsize > SMALL_DISK_BYTES:
            problems.append(
                f"disk-full fills the file system of {home}, so this has to be one of its own of at most "
                f"{SMALL_DISK_BYTES >> 30} GiB: mount -t tmpfs -o size=1g none HOME"
            )
    return problems
