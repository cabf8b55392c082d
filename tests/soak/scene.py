"""Find the processes and the files of a disturbed run, and how far it is."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

from onward.infra.job import job_guard
from onward.trainer.errors import OnwardError
from onward.trainer.events import Event, Scalars, Started, last_beat, read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import AttemptResult, read_record

TAG = "ONWARD_SOAK"
"""The environment variable that every process of a soak inherits."""
Phase: TypeAlias = Literal["start", "train", "export"]
"""`start`: from the start of a command until the ranks have made a step. `export`: once training is done."""
SERVICE_WORDS = ("onward.infra.servers.supervisor", "onward.infra.servers.web_server")


class NoTarget(Exception):
    """What a fault is to hit does not exist at this moment."""


@dataclass
class Progress:
    """How far a run is, from its event log, which is read on from where it was read last."""

    offset: int = 0
    step: int = 0
    """The last step of the newest attempt in the log."""
    starts: dict[int, int] = field(default_factory=dict)
    """Attempt -> the step from which it went on."""
    first_at: dict[int, float] = field(default_factory=dict)
    """Attempt -> when its first step was in the log, in seconds since 1970."""
    steps: int = 0
    """Steps made over all attempts, repeated ones counted again."""

    def read(self, run: RunDir) -> None:
        """Read what was appended."""
        # an attempt that follows a crash removes a line that was cut off, but no line that was read
        for event, offset in read_events(run.events, self.offset):
            self.offset = offset
            self._add(event)

    def _add(self, event: Event) -> None:
        if isinstance(event, Started):
            self.starts[event.attempt] = self.step = event.step
        elif event.step > self.step and isinstance(event, Scalars):
            self.steps += event.step - self.step
            self.step = event.step
            self.first_at.setdefault(event.attempt, event.at_ms / 1000)


@dataclass
class Scene:
    """A home directory, the processes that belong to it, and its newest run."""

    home: Path
    tag: str
    flow: psutil.Process | None = None
    """The process of the command that runs now."""
    run: RunDir | None = None
    """The run of the present round; None until its directory has a configuration."""
    progress: Progress = field(default_factory=Progress)

    def environment(self) -> dict[str, str]:
        """Return what a command's environment gets, so that it uses this home alone."""
        return {"ONWARD_HOME": str(self.home), "PREFECT_HOME": str(self.home / "prefect"), TAG: self.tag}

    # -- processes

    def processes(self) -> list[psutil.Process]:
        """Return every living process of the soak, on this host."""
        wanted = f"{TAG}={self.tag}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError, psutil.Error):
                    # a zombie has no environment
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(psutil.Process(int(entry.name)))
        return found

    def jobs(self) -> list[psutil.Process]:
        """Return the processes but for those of servers, which outlive a command while another one uses them."""
        return [process for process in self.processes() if not is_service(process)]

    def having(self, *words: str) -> list[psutil.Process]:
        """Return the processes with all of these words in their command lines. Raises NoTarget without any."""
        found = [process for process in self.processes() if set(words) <= set(_command(process))]
        if not found:
            raise NoTarget(f"there is no process {' '.join(words)}")
        return found

    def ranks(self) -> list[psutil.Process]:
        """Return what mpirun has started, in the order of the ranks. Raises NoTarget if no rank runs."""
        numbered = []
        for process in self.having("onward.trainer", "train", str(self.run_dir.root)):
            with contextlib.suppress(psutil.Error, KeyError):
                numbered.append((int(process.environ()["OMPI_COMM_WORLD_RANK"]), process))  # mpirun itself has none
        if not numbered:
            raise NoTarget("no rank runs")
        return [process for _, process in sorted(numbered, key=lambda pair: pair[0])]

    def programs(self) -> list[psutil.Process]:
        """Return the processes that compute, in the order of the ranks: forks, or what mpirun has started.

        A rank has files of its attempt open. Raises NoTarget if none runs.
        """
        attempts, numbered = self.run_dir.attempts, dict[int, psutil.Process]()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                for file in map(Path, (each.path for each in process.open_files())):
                    if file.parent.parent == attempts and file.name.startswith("rank-"):
                        numbered[int(file.name[5:10])] = process
        if not numbered:
            raise NoTarget("no rank runs")
        return [process for _, process in sorted(numbered.items())]

    def mpirun(self) -> psutil.Process:
        """Return the launcher of the ranks."""
        parent = self.ranks()[0].parent()
        if parent is None or Path(_command(parent)[0]).name not in ("mpirun", "prterun"):
            raise NoTarget("mpirun has ended")
        return parent

    def guards(self) -> list[psutil.Process]:
        """Return the processes that end the job when the flow is killed. Raises NoTarget without any."""
        name = Path(job_guard.__file__).name
        found = [each for each in self.processes() if any(Path(word).name == name for word in _command(each))]
        if not found:
            raise NoTarget("there is no guard")
        return found

    def server(self) -> list[psutil.Process]:
        """Return the processes of the Prefect server, without its supervisor. Raises NoTarget without any."""
        (supervisor, *_) = self.having("onward.infra.servers.supervisor", "prefect")
        if not (found := supervisor.children(recursive=True)):
            raise NoTarget("the Prefect server does not run")
        return found

    # -- files

    @property
    def run_dir(self) -> RunDir:
        """Return the run. Raises NoTarget before it has begun."""
        if self.run is None:
            raise NoTarget("the run has no directory yet")
        return self.run

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, the oldest first."""
        return sorted(path.parent for path in self.run_dir.checkpoints.glob("step-?????????/manifest.json"))

    def find_run(self, known: set[Path]) -> None:
        """Look for the directory of the run that began after `known` were there."""
        if self.run is None:
            new = {path.parent for path in (self.home / "runs").glob("*/identity.json")} - known
            self.run = RunDir(min(new)) if new else None

    # -- how far it is

    @property
    def attempt(self) -> int:
        """Return the number of the newest attempt."""
        try:
            return self.run.current_attempt if self.run else 0
        except (OnwardError, OSError):
            return 0

    @property
    def step(self) -> int:
        """Return the step that the ranks are in, by heartbeat or log."""
        if self.run is None:
            return 0
        self.progress.read(self.run)
        beat = last_beat(self.run.heartbeat).step if self.attempt in self.progress.first_at else 0
        return max(self.progress.step, beat)

    def is_trained(self) -> bool:
        """Return whether the newest attempt has completed the training."""
        with contextlib.suppress(OnwardError, OSError):
            if self.run and (path := self.run.result(self.attempt)).exists():
                return read_record(path, AttemptResult).status == "done"
        return False

    def phase(self, *, since: float) -> Phase:
        """Return what the command does that was started at `since`, in seconds since 1970."""
        if self.is_trained():
            return "export"
        if self.run is not None:
            self.progress.read(self.run)
        return "train" if self.progress.first_at.get(self.attempt, 0.0) > since else "start"


def is_service(process: psutil.Process) -> bool:
    """Return whether a process is a server of Onward's, its supervisor, or a process below it."""
    with contextlib.suppress(psutil.Error):
        family = [process, *process.parents()]
        return any(word in SERVICE_WORDS for member in family for word in _command(member))
    return False


def until_gone(find: Callable[[], list[psutil.Process]], limit_s: float) -> list[psutil.Process]:
    """Wait until no process is found any more; return those that are left after the time limit."""
    deadline = time.monotonic() + limit_s
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def described(process: psutil.Process) -> str:
    """Return the id and the command line of a process, shortened."""
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[-120:]}"
    return str(process.pid)


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline()) or [""]
    return [""]
