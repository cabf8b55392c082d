"""All commands under strace: what they create, change and delete lies in Onward's home and at the paths they are given.

sandbox/given    model, data, configuration: read      sandbox/out      the paths that commands are told to write
sandbox/home     ONWARD_HOME                           sandbox/tmp      TMPDIR: without files in the end
sandbox/user     HOME: untouched                       sandbox/work     the working directory: untouched
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from onward.flows import cli
from tests.support.workshop import CONFIG, Workshop, until

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed"),
]

CALLS = (
    *("open", "openat", "creat", "truncate", "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "mknod", "mknodat"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat", "chmod", "fchmodat"),
)
ELSEWHERE = re.compile(r"/dev/|/proc/|.*/__pycache__(/|$)|.*\.pyc(\.\d+)?$")
"""Devices, the kernel's own files, and where Python keeps the compiled form of a module."""
NOT_HERE = {
    "promote": "it changes MLflow's database, which `run` writes to",
}
"""Commands that this does not run, and why."""


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Path]:
    for name in ("given", "user", "out", "tmp", "work", "traces"):
        (tmp_path / name).mkdir()
    Workshop.made(tmp_path / "given")
    config = CONFIG.replace("num_steps = 600", "num_steps = 20").replace("period = 50", "period = 10")
    config = config.replace("evaluation_period = 300", "evaluation_period = 10")
    (tmp_path / "given" / "config.toml").write_text(config)
    yield tmp_path
    for process in traced(tmp_path):
        process.kill()


def written(trace: Path, root: Path) -> Iterator[str]:
    """Yield each path that a traced call created, changed or deleted."""
    for line in trace.read_text(errors="replace").splitlines():
        called = re.match(r"(?:\d+ +)?(\w+)\((.*)\) = ", line)
        if not called or called[1] not in CALLS:
            continue
        name, arguments = called.groups()
        if name in ("open", "openat") and not re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC|APPEND)", arguments):
            continue
        for directory, path in re.findall(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"', arguments):
            # a call without a directory's descriptor: relative to the working directory, which is checked as one
            yield os.path.normpath(Path(directory or root / "work") / path)
            if name.startswith("symlink"):
                break  # the first one is the content


def test_no_command_writes_outside_of_its_home_and_the_paths_it_is_given(sandbox: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))},
        **{"ONWARD_HOME": str(sandbox / "home"), "HOME": str(sandbox / "user"), "TMPDIR": str(sandbox / "tmp")},
        **{"GOMP_SPINCOUNT": "0", "XDG_CACHE_HOME": ""},
    }
    called: set[str] = set()
    # -D: the command is the child, and strace does not wait for the servers that it leaves
    strace = ("strace", "-D", "-f", "--seccomp-bpf", "-qq", "-y", "-z", "-s", "4096", "-e", f"trace={','.join(CALLS)}")

    def onward(*words: str, status: int = 0) -> None:
        called.add(words[0])
        trace = sandbox / "traces" / f"{len(list((sandbox / 'traces').iterdir())):02}-{words[0]}"
        command = [*strace, "-o", str(trace), sys.executable, "-m", "onward.flows.cli", *words]
        log = trace.with_suffix(".log")
        # into a file: the servers of `up` would keep a pipe open
        with log.open("wb") as output:
            ended = subprocess.run(
                command, env=environment, cwd=sandbox / "work", stdout=output, stderr=output, timeout=600
            )
        assert ended.returncode == status, (words, log.read_text()[-3000:])
        log.rename(sandbox / "user" / log.name).unlink()

    given, out = sandbox / "given", sandbox / "out"
    model, config = str(given / "model.onnx"), str(given / "config.toml")
    onward("init", model, str(given / "data.npz"), "-o", str(out / "new.toml"))
    onward("config", config)
    onward("doctor")
    onward("doctor", model)
    onward("plan", config, "--measure")
    onward("submit", config, "--name", "nightly-1", "--dry-run")
    onward("example", "images", str(out / "images"))
    onward("reference", "squeezenet", "--num-classes", "2", "--image-size", "32", "-o", str(out / "squeezenet.onnx"))
    onward("run", config, f"export.path='{out}/trained.onnx'", "export.variants=['fp16']")
    for words in (("status",), ("runs",), ("clean",), ("diff", model, str(out / "trained.onnx"))):
        onward(*words, status=1 if words[0] == "diff" else 0)
    onward("logs", "last")
    onward("report", "last", "-o", str(out / "report.html"))
    onward("stop", "last", status=2)  # it does not run
    onward("resume", "last")
    onward("export", "last", "-o", str(out / "again.onnx"))
    onward("predict", "last", str(given / "data.npz"), "-o", str(out / "predicted.csv"))
    onward("evaluate", "last", str(given / "data.npz"))
    onward("sweep", config, "optimizer.learning_rate=1e-3,1e-2", "train.num_steps=2", "train.evaluation_period=2")
    onward("verify", "last")
    onward("bundle", "last", str(out / "last.bundle"))
    onward("gc")
    onward("up")
    onward("deploy", config, "--name", "nightly", "--cron", "0 2 1 1 *")
    onward("ui")
    onward("down")
    until(lambda: not list((sandbox / "home" / "services").glob("**/*.pid")), limit_s=15)
    assert called >= known_commands() - NOT_HERE.keys(), "a new command: run it here"

    until(lambda: not any("strace" in process.name() for process in traced(sandbox)), limit_s=60)
    allowed = [str(sandbox / name) for name in ("home", "out", "tmp")]
    outside: Counter[str] = Counter()
    for trace in (sandbox / "traces").iterdir():
        for path in written(trace, sandbox):
            if not ELSEWHERE.match(path) and not any(path == each or path.startswith(each + "/") for each in allowed):
                outside[f"{trace.name}: {path}"] += 1
    assert not outside, "\n".join(sorted(outside))
    left = {path.name for path in (sandbox / "tmp").iterdir()}
    assert left <= {f"torchinductor_{getpass.getuser()}", "runner_storage"}, "temporary files are deleted"
    assert not [path for path in (sandbox / "tmp").rglob("*") if path.is_file()]
    assert list((sandbox / "user").iterdir()) == []
    assert list((sandbox / "work").iterdir()) == []


def traced(sandbox: Path) -> Iterator[psutil.Process]:
    """Yield the processes of the sandbox's home that still run."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("ONWARD_HOME") == str(sandbox / "home"):
                yield process
        except psutil.Error:
            continue


def known_commands() -> set[str]:
    """Return the names of all commands."""
    return {function.__name__ for commands in cli.COMMANDS.values() for function, _ in commands} | {"reference"}
