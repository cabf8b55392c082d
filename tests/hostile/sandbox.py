"""Try one case in a process of its own: bounded memory and time, and no file outside of its directory.

parent (has imported torch, onnx, ... once)
    | fork                                            a case costs milliseconds, not the imports' seconds
    +--- child: RLIMIT_AS, RLIMIT_CPU, an audit hook on every open, then the command itself
secret/     beside the child's directory, watched by inotify: what C++ opens raises no audit event of Python
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 30
"""What a case may take beyond the imports."""
CPU_S = 20
WAIT_S = 60.0
"""Seconds that a case may wait: sleep, or wait for a lock, a file or a process. While other processes have the
processors it does not wait."""
LOOK_S = 0.25
STARTS = "would start a process"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys."""
SECRET = "the-content-of-a-private-file"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CREATES, OPENS = 0x100, 0x20
"""IN_CREATE and IN_OPEN of inotify."""


@dataclass(frozen=True)
class Case:
    """What a family has made: the command to try in the sandbox directory."""

    command: Sequence[str]
    accepted: bool = True
    """Whether the input may be accepted; False: it must be refused, with an exit status of Onward's."""
    starts_programs: bool = True
    """Whether the command may start a process, which ends the case."""
    named: frozenset[str] = frozenset()
    """Files of `secret` that the user's own words name, which may be read then, though not be printed."""


Family = Callable[[random.Random, Path], Case]
"""Writes the files of one case into an empty directory; `secret` beside it is a directory that must not be read."""


@dataclass(frozen=True)
class Result:
    """How a case ended."""

    family: str
    seed: int
    status: int
    """The exit status, or minus the signal."""
    output: str
    elapsed_s: float
    cpu_s: float
    memory_bytes: int
    """The peak of the resident memory, beyond that of the parent at the fork."""
    command: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.family} seed {self.seed}: {'; '.join(self.problems)}\n  {self.command}\n{self.output[-1500:]}"


def import_all() -> None:
    """Import what the commands need, so that the forks have it."""
    import mlflow
    import numpy
    import onnx
    import onnxruntime
    import pandas
    import PIL.Image
    import pyarrow.parquet
    import soundfile
    import tokenizers
    import torch

    from onward.flows import cli
    from onward.flows import predict as predictions
    from onward.flows.running import local_run
    from onward.tasks import configure
    from onward.trainer.diagnostics import doctor
    from onward.trainer.proposal import initialise

    PIL.Image.init()
    del (
        initialise,
        cli,
        local_run,
        predictions,
        configure,
        doctor,
        mlflow,
        numpy,
        onnx,
        onnxruntime,
        pandas,
        PIL,
        pyarrow,
        soundfile,
        tokenizers,
    )
    torch.set_num_threads(1)


def try_case(name: str, family: Family, seed: int) -> Result:
    """Make a case and try it."""
    with tempfile.TemporaryDirectory(prefix="onward-hostile-") as folder:
        root = Path(folder).resolve()
        inside, secret = root / "inside", root / "secret"
        for each in (inside, secret):
            each.mkdir()
        for file in ("secret.txt", "secret.bin", "secret.csv", "secret.onnx"):
            (secret / file).write_bytes((SECRET + "\n").encode() * 100)
        before = Path.cwd()
        os.chdir(inside)
        try:
            case = family(random.Random(f"{name}/{seed}"), inside)
        finally:
            os.chdir(before)
        watch = _watch(secret, root)
        try:
            result = _fork(name, seed, case, inside, root)
            touched = select.select([watch], [], [], 0)[0]
            seen = _touched(watch) if touched else []
        finally:
            os.close(watch)
            for directory, _, _ in os.walk(inside):
                os.chmod(directory, 0o700)  # noqa: PTH101
        problems = [*result.problems, *(f"opened or created {each} outside" for each in seen if each not in case.named)]
        if SECRET in result.output:
            problems.append("printed a private file")
        return Result(**(vars(result) | {"problems": tuple(problems)}))


def _fork(name: str, seed: int, case: Case, inside: Path, root: Path) -> Result:
    output = root / "output"
    start = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            status = _run(case, inside, output)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    resident = _resident_bytes(child)
    waited, status, usage = _wait(child)
    code = os.waitstatus_to_exitcode(status)
    elapsed_s, cpu_s = time.monotonic() - start, usage.ru_utime + usage.ru_stime
    text = output.read_bytes().decode(errors="replace") if output.exists() else ""
    obeyed = CONTROL.search(text)
    for log in sorted((inside / ".tmp").glob("onward-error-*.log"))[:1]:
        text += log.read_text(errors="replace")
    taken = max(0, usage.ru_maxrss * 1024 - resident)
    problems = []
    if code < 0:
        problems.append(
            f"ended by signal {-code} ({signal.Signals(-code).name}) after {elapsed_s:.1f} s, "
            f"{cpu_s:.1f} s of processor time and {waited:.0f} s of waiting"
        )
    if obeyed:
        problems.append(f"wrote the control character {obeyed[0]!r}")
    if STARTS in text and not case.starts_programs:
        problems.append("started a process")
    if "Traceback (most recent call last)" in text:
        problems.append("a traceback")
    if code == 1 and "diff" not in case.command[:1]:
        problems.append("exit status 1")
    if re.search(r"the traceback is in .*onward-error-", text) or "unexpected write to" in text:
        problems.append("an unexpected error")
    if code == 0 and not case.accepted:
        problems.append("was accepted")
    if taken > MOST_BYTES:
        problems.append(f"took {taken >> 20} MB")
    return Result(name, seed, code, text, elapsed_s, cpu_s, taken, " ".join(case.command), tuple(problems))


def _wait(child: int) -> tuple[float, int, resource.struct_rusage]:
    """Wait for a process, which is killed once it has waited for WAIT_S; return that time, its status and usage."""
    descriptor = os.pidfd_open(child)
    waited, used, looked = 0.0, -1, time.monotonic()
    try:
        while not select.select([descriptor], [], [], LOOK_S)[0]:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            before, used = used, int(fields[11]) + int(fields[12])
            now = time.monotonic()
            # of several threads the first one may wait for the others
            waited += now - looked if fields[0] != "R" and used == before else 0.0
            looked = now
            if waited > WAIT_S:
                os.kill(child, signal.SIGKILL)
                break
    finally:
        os.close(descriptor)
    return waited, *os.wait4(child, 0)[1:]


def _resident_bytes(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _run(case: Case, inside: Path, output: Path) -> int:
    """Run the command as `onward` does, up to the launch of ranks."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
    os.chdir(inside)
    temporary = inside / ".tmp"
    temporary.mkdir(exist_ok=True)
    tempfile.tempdir = str(temporary)
    os.environ |= {"ONWARD_HOME": str(inside / "home"), "HOME": str(inside), "TMPDIR": str(temporary)}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # address space is reserved more freely than memory is used, by allocators and mapped files
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * MOST_BYTES, used + 2 * MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.dont_write_bytecode = True  # the first import of a module would write beside its source
    _stop_at_the_launch()
    _audit(inside)
    sys.argv = ["onward", *case.command]
    from onward.flows import cli

    try:
        with warnings.catch_warnings():
            cli.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


def _stop_at_the_launch() -> None:
    """Let `onward run` shard the data and end there, and no command start a process."""
    import subprocess

    from onward.flows import api
    from onward.flows.run_state.runs import how_to_continue
    from onward.trainer.checkpoint.verification import newest_complete
    from onward.trainer.data.storage.opened_shards import open_shards
    from onward.trainer.data.storage.sharding import make_training_shards
    from onward.trainer.run.directory import RunDir, onward_home
    from onward.trainer.run.outcomes.attempt_endings import endings

    def train(
        config: Any, view: Any, *, resume: str = "", named: Any = None, origins: Any = None, asked_ms: int = 0
    ) -> Any:
        make_training_shards(config, Path("shards"))
        if resume:  # what a flow and its ranks read of the run that they go on with
            run = RunDir(onward_home() / "runs" / resume)
            newest_complete(run)
            open_shards(run.shards, "train")
            how_to_continue(run)
            print(run.current_attempt, run.first_error(1), endings(run))
        print("ready to launch")
        sys.exit(0)

    def refuse(*command: Any, **_: Any) -> Any:
        print(STARTS)
        sys.exit(0)

    api._train = train
    subprocess.Popen.__init__ = refuse  # type: ignore[method-assign]


def _audit(inside: Path) -> None:
    """Print a traceback for each file that Python opens for writing outside of the directory."""
    own = f"{inside}/"

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], str | bytes) or not isinstance(args[2], int):
            return
        path = os.path.abspath(os.fsdecode(args[0]))  # noqa: PTH100
        if args[2] & WRITES and not path.startswith((own, "/dev/", "/proc/self/")):
            print(f"unexpected write to {path}")
            traceback.print_stack()

    sys.addaudithook(hook)


# -- inotify, of the C library


def _watch(secret: Path, root: Path) -> int:
    """Return a descriptor that is readable once a file in `secret` was opened, or one was made beside it."""
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = int(library.inotify_init1(os.O_NONBLOCK))
    for path, events in ((secret, CREATES | OPENS), (root, CREATES)):
        if library.inotify_add_watch(descriptor, os.fsencode(path), events) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(path))
    return descriptor


def _touched(descriptor: int) -> list[str]:
    data, names = os.read(descriptor, 65536), set[str]()
    while data:
        _, mask, _, size = struct.unpack_from("iIII", data)
        name = data[16 : 16 + size].rstrip(b"\0").decode()
        names |= {name} if name != "output" and not mask & 0x40000000 else set()  # a directory that is listed
        data = data[16 + size :]
    return sorted(names)
