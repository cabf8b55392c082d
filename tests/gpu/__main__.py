"""Run the steps of the examination one after the other: `make gpu`, or `python -m tests.gpu [STEP ...]`.

Each step is a process of its own with a limit of time. The results of a step that is killed stay, and the next call
continues behind them: what is finished for the same commit, device and versions is not run again without `--again`.
Nothing is installed from a network; `--wheels DIR` installs the wheels of a folder into an environment of their own.

Exit status: 0 = every check passed or was skipped with a reason, 1 = a check failed or a step did not end, 3 = there
is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.gpu import environment, results
from tests.gpu.steps import STEPS, TOTAL_LIMIT_S, Step

TAG = "ONWARD_GPU_TAG"
"""Variable in the environment of every process of a step, by which the rest of a killed step is found."""


def run_steps(steps: Sequence[Step], *, total_limit_s: float = TOTAL_LIMIT_S) -> int:
    """Run the steps that are not finished; return the exit status."""
    started_at = time.monotonic()
    for step in steps:
        left_s = total_limit_s - (time.monotonic() - started_at)
        if _is_finished(step):
            print(f"{step.name}: finished before", flush=True)
        elif left_s < min(30.0, total_limit_s / 2):
            print(f"{step.name}: not started, the {total_limit_s:g} s of all steps are over", flush=True)
        else:
            _run(step, min(step.limit_s, left_s))
    return _summary(steps)


def _is_finished(step: Step) -> bool:
    line = results.newest(results.present(results.read()[0])).get((step.name, results.WHOLE_STEP))
    return line is not None and line["status"] != "failed"


def _run(step: Step, limit_s: float) -> None:
    """Run one step, again when it has lost the device, until it ends or its time is over."""
    log = results.RESULTS.parent / f"{step.name}.log"
    log.unlink(missing_ok=True)
    started_at, num_lines = time.monotonic(), -1
    while (left_s := limit_s - (time.monotonic() - started_at)) > 0:
        before, num_lines = num_lines, len(results.read()[0])
        broke_off, status = _run_process(step, left_s, log)
        # every start has made a check more; if not, it would go on for ever
        if status != results.LOST_DEVICE or num_lines == before:
            break
    if broke_off:
        os.environ[results.STEP] = step.name
        reason = f"{broke_off}; its last words: {_last_words(log)}"
        seconds = time.monotonic() - started_at
        results.record(results.WHOLE_STEP, status="failed", reason=reason, seconds=seconds)


def _run_process(step: Step, limit_s: float, log: Path) -> tuple[str, int | None]:
    """Run one step in its process, and kill what is left afterwards; return why it broke off, and its status."""
    tag, status = uuid.uuid4().hex, None
    words = _command(step)
    child = {**os.environ, TAG: tag, results.STEP: step.name, results.IDENTITY: json.dumps(results.identity())}
    with log.open("ab") as output:
        process = subprocess.Popen(
            words,
            cwd=results.ROOT,
            env=child,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
            broke_off = "" if status in (0, 1) else f"it ended with status {status}"
        except subprocess.TimeoutExpired:
            broke_off = f"it was killed after {limit_s:.0f} s"
        finally:
            _kill(process, tag)
    return broke_off, status


def _command(step: Step) -> list[str]:
    """Return the command line of a step: a rehearsal forks a process that has imported torch, to save its seconds."""
    words = [sys.executable]
    if results.identity()["rehearsal"]:
        from tests.support import rank_server

        words = [*rank_server.command()]
        os.environ[rank_server.SHARED] = words[-1]  # the steps start their ranks from it, too
    return [*words, "-m", "tests.gpu.step", step.name]


def _kill(process: subprocess.Popen[bytes], tag: str) -> None:
    """Kill the group of a step's process, and the processes that have left the group but not the environment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{TAG}={tag}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def _last_words(log: Path) -> str:
    text = log.read_bytes()[-2000:].decode(errors="replace")
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())[-600:] or "none"


def _summary(steps: Sequence[Step]) -> int:
    """Print what every step has found; return the exit status."""
    found, damaged = results.read()
    lines = results.newest(results.present(found))
    status = 0
    for step in steps:
        mine = {check: line for (name, check), line in lines.items() if name == step.name}
        whole = mine.pop(results.WHOLE_STEP, None)
        failed = [line for line in mine.values() if line["status"] == "failed"]
        counts = [f"{sum(line['status'] == kind for line in mine.values())} {kind}" for kind in ("passed", "skipped")]
        print(f"{step.name}: {', '.join(counts)}, {len(failed)} failed")
        for line in failed:
            print(f"    {line['check']}: {' '.join(line['reason'].split())[:300]}")
        if whole is None or whole["status"] != "passed":
            print(f"    {'it has not ended' if whole is None else whole['reason']}")
        status |= bool(failed) or whole is None or whole["status"] == "failed"
    if damaged:
        print(f"{damaged} damaged lines in {results.RESULTS} were left out")
    print(
        f"the results are in {results.RESULTS}; `python -m tests.gpu.report` writes docs/gpu.md from them", flush=True
    )
    return int(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the steps."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(each.name for each in STEPS)}")
    parser.add_argument("--again", action="store_true", help="run what is finished, too")
    parser.add_argument("--limit-s", type=float, default=TOTAL_LIMIT_S, help="seconds for all steps together")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first, without a network")
    given = parser.parse_args(arguments)
    if unknown := set(given.steps) - {step.name for step in STEPS}:
        parser.error(f"there is no step {', '.join(sorted(unknown))}")
    if given.wheels:
        options = [*(["--again"] * given.again), "--limit-s", str(given.limit_s)]
        environment.continue_with(given.wheels, ["-m", "tests.gpu", *options, *given.steps])
    search = [str(results.ROOT / ".package"), str(results.ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, search))
    if given.again:
        os.environ[results.AGAIN] = str(time.time())
    results.RESULTS.parent.mkdir(parents=True, exist_ok=True)
    try:
        mine = results.identity()
    except RuntimeError as error:
        print(f"nothing was examined: {error}. ONWARD_GPU_REHEARSAL=1 rehearses on the CPU.")
        return 3
    print(f"{mine['device']}, commit {mine['commit']}, {mine['versions']}", flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which kills the step first
    chosen = [step for step in STEPS if not given.steps or step.name in given.steps]
    return run_steps(chosen, total_limit_s=given.limit_s)


if __name__ == "__main__":
    sys.exit(main())
