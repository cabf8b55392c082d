"""The table of faults: how each is injected, when, what has to end by it, and which class Onward has to say.

Only processes of the soak and files under its own home are touched.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from onward.infra.job.stopped_ranks import STOPPED_S
from tests.soak import file_faults as files
from tests.soak import process_faults as processes
from tests.soak import refused_commands as refused
from tests.soak.file_faults import OUTAGE_S
from tests.soak.scene import Phase, Scene

Inject: TypeAlias = Callable[[Scene, float], str]
Ends: TypeAlias = Literal["nothing", "attempt", "flow"]

SHORT_S = 2.0
"""How long something is away that has to be waited for."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    what: str
    """For the table in `python -m tests.soak --help`."""
    inject: Inject
    when: Phase = "train"
    """In which phase of a command it is injected."""
    ends: Ends = "attempt"
    """What it has to end: `nothing`, the `attempt`, which is retried, or the `flow`, which is resumed."""
    classes: tuple[str, ...] = ()
    """The classes of which the attempt's record has to name one; () = it is not judged."""
    states: tuple[str, ...] = ("COMPLETED",)
    """Of a fault that ends the flow: the states of which Prefect has to show one."""


def _signalled_rank(name: str, what: str, classes: tuple[str, ...] = ("rank_lost",)) -> Kind:
    number = signal.Signals[f"SIG{name}"]
    return Kind(f"SIG{name} to one rank: {what}", partial(processes.to_rank, number), classes=classes)


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
    "ranks-kill": Kind("SIGKILL to all ranks", partial(processes.to_all_ranks, signal.SIGKILL), classes=("rank_lost",)),
    "rank-pause": Kind(
        f"one rank is stopped for {SHORT_S:g} s",
        partial(processes.pause, lambda scene, choice: [processes.one_rank(scene, choice)[1]], SHORT_S),
        ends="nothing",
    ),
    "rank-stop": Kind(
        f"one rank is stopped; Onward lets it go on after {STOPPED_S:g} s",
        partial(processes.to_rank, signal.SIGSTOP),
        ends="nothing",
    ),
    "rank-hang": Kind(
        "the main thread of one rank is held: a deadlock in native code", processes.hold, classes=("hang",)
    ),
    "mpirun-kill": Kind(
        "SIGKILL to mpirun", partial(processes.to_mpirun, signal.SIGKILL), classes=("rank_lost", "host_lost")
    ),
    "mpirun-term": Kind("SIGTERM to mpirun", partial(processes.to_mpirun, signal.SIGTERM), classes=("preempted",)),
    "mpirun-usr1": Kind("SIGUSR1 to mpirun", partial(processes.to_mpirun, signal.SIGUSR1), classes=("preempted",)),
    "mpirun-pause": Kind(
        f"mpirun is stopped for {SHORT_S:g} s",
        partial(processes.pause, lambda scene, choice: [scene.mpirun()], SHORT_S),
        ends="nothing",
    ),
    "guard-kill": Kind("SIGKILL to a guard of the job", processes.kill_guard, ends="nothing"),
    "guard-and-flow-kill": Kind(
        "SIGKILL to all guards and the flow", processes.kill_guard_and_flow, ends="flow", states=KILLED
    ),
    "flow-kill": Kind("SIGKILL to the flow", partial(processes.to_flow, signal.SIGKILL), ends="flow", states=KILLED),
    "flow-kill-start": Kind(
        "SIGKILL to the flow before it trains",
        partial(processes.to_flow, signal.SIGKILL),
        "start",
        "flow",
        states=KILLED,
    ),
    "flow-term": Kind("SIGTERM to the flow", partial(processes.to_flow, signal.SIGTERM), ends="flow", states=STOPPED),
    "flow-int": Kind("Ctrl-C", partial(processes.to_flow, signal.SIGINT), ends="flow", states=STOPPED),
    "prefect-kill": Kind("SIGKILL to the Prefect server", processes.kill_server, ends="nothing"),
    "prefect-supervisor-kill": Kind(
        "SIGKILL to the supervisor of the Prefect server", processes.kill_supervisor, ends="nothing"
    ),
    "prefect-pause": Kind(
        f"the Prefect server is stopped for {OUTAGE_S:g} s",
        partial(processes.pause, lambda scene, choice: scene.server(), OUTAGE_S),
        ends="nothing",
    ),
    "prefect-locked": Kind(
        f"Prefect's database is locked for {OUTAGE_S:g} s", partial(files.lock_database, "prefect"), ends="nothing"
    ),
    "mlflow-locked": Kind(
        f"MLflow's database is locked for {OUTAGE_S:g} s", partial(files.lock_database, "mlflow"), ends="nothing"
    ),
    "mlflow-gone": Kind(f"MLflow's database is away for {OUTAGE_S:g} s", files.hide_mlflow, ends="nothing"),
    "files-limited": Kind(
        "no rank can write further into a file (RLIMIT_FSIZE)", files.limit_files, classes=("storage",)
    ),
    "disk-full": Kind(
        f"the home's file system is full for {OUTAGE_S:g} s; needs --home on a small one of its own",
        files.fill_disk,
        classes=("storage",),
    ),
    "checkpoint-flip": Kind(
        "a flipped bit in the newest checkpoint, then SIGKILL to a rank", files.flip_checkpoint, classes=("rank_lost",)
    ),
    "checkpoint-manifest": Kind(
        "the newest checkpoint's manifest is cut off, then SIGKILL to a rank",
        files.truncate_manifest,
        classes=("rank_lost",),
    ),
    "checkpoint-deleted": Kind(
        "a file of the newest checkpoint is deleted, then SIGKILL to a rank",
        files.delete_rank_file,
        classes=("rank_lost",),
    ),
    "shard-flip": Kind(
        "SIGKILL to the flow, then a flipped bit in a shard", files.flip_shard, ends="flow", states=KILLED
    ),
    "shard-deleted": Kind(
        "SIGKILL to the flow, then a shard is deleted", files.delete_shard, ends="flow", states=KILLED
    ),
    "events-damaged": Kind(
        "SIGKILL to the flow, then a line of the event log is overwritten",
        files.damage_events,
        ends="flow",
        states=KILLED,
    ),
    "config-edited": Kind(
        "SIGKILL to the flow; with an edited config.json `onward resume` has to refuse",
        refused.edit_config,
        ends="flow",
        states=KILLED,
    ),
    "checkpoints-flipped": Kind(
        "SIGKILL to the flow; with a flipped bit in every checkpoint `onward resume` has to refuse",
        refused.flip_all_checkpoints,
        ends="flow",
        states=KILLED,
    ),
    "heartbeat-deleted": Kind("the heartbeat file is deleted", files.remove_heartbeat, ends="nothing"),
    "second-resume": Kind("`onward resume` of the run that runs", refused.second_resume, ends="nothing"),
    "exporter-kill": Kind(
        "SIGKILL to the exporting process", processes.kill_exporter, "export", "flow", states=("FAILED",)
    ),
    "flow-kill-export": Kind(
        "SIGKILL to the flow while it exports",
        partial(processes.to_flow, signal.SIGKILL),
        "export",
        "flow",
        states=KILLED,
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
