"""Run one step of the examination in this process: `python -m tests.gpu.step NAME`, started by `python -m tests.gpu`.

Exit status: 0 = the step has ended, 1 = it has ended and a check failed. Any other status means that it broke off.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from tests.gpu import results
from tests.gpu.steps import EVERY_STEP_NEEDS, STEPS, Step

if TYPE_CHECKING:
    import pytest


class Recorder:
    """A plugin of pytest: leaves finished tests out and records each of the others as one check."""

    def __init__(self) -> None:
        self.left_out = 0
        self._phases: dict[str, list[pytest.TestReport]] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        finished = [item for item in items if results.is_finished(check_name(item.nodeid))]
        self.left_out = len(finished)
        config.hook.pytest_deselected(items=finished)
        items[:] = [item for item in items if item not in finished]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        phases = self._phases.setdefault(report.nodeid, [])
        phases.append(report)
        if report.when != "teardown":
            return
        worst = next((each for each in phases if each.outcome != "passed"), phases[-1])
        failed = next((each for each in phases if each.outcome == "failed"), None)
        results.record(
            check_name(report.nodeid),
            status=(failed or worst).outcome,
            reason=reason_of(failed or worst),
            seconds=sum(each.duration for each in phases),
            **dict(report.user_properties),
        )
        if failed is not None:
            results.leave_a_lost_device(str(failed.longrepr))


def check_name(nodeid: str) -> str:
    """Return the name of a test as a sentence: `test_a_b[c]` -> `a b [c]`."""
    name, bracket, case = nodeid.partition("::")[2].partition("[")
    return name.removeprefix("test_").replace("_", " ") + (f" [{case}" if bracket else "")


def reason_of(report: pytest.TestReport) -> str:
    """Return why a test was skipped or failed; empty when it passed."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)


def run_tests(step: Step) -> None:
    """Run the tests marked `gpu` of one step. Raises RuntimeError when pytest itself fails or finds no test."""
    import pytest

    recorder = Recorder()
    # a warning of another version of a package is no result of this examination
    options = ["-v", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"]
    words = [*options, "-k", step.keyword, f"--rootdir={results.ROOT}", f"tests/gpu/{step.module}.py"]
    status = pytest.main(words, plugins=[recorder])
    if status not in (0, 1) and not (status == 5 and recorder.left_out):
        raise RuntimeError(f"pytest ended with status {int(status)}")


def measure(step: Step) -> None:
    """Call `main` of the step's module; a name in its CHECKS that has no line afterwards is a failed check."""
    found = importlib.import_module(f"tests.gpu.{step.module}")
    found.main()
    for check in getattr(found, "CHECKS", ()):
        if not results.is_finished(check):
            results.record(check, status="failed", reason="the step has ended without a result of this check")


def run(step: Step) -> int:
    """Run a step and record its end; return the exit status."""
    os.environ[results.STEP] = step.name
    started_at = time.monotonic()
    if missing := [name for name in (*EVERY_STEP_NEEDS, *step.needs) if importlib.util.find_spec(name) is None]:
        reason = f"this Python has no package {', '.join(missing)}"
        results.record(results.WHOLE_STEP, status="skipped", reason=reason)
        return 0
    (run_tests if step.module.startswith("test_") else measure)(step)
    lines = results.newest(results.present(results.read()[0]))
    mine = [
        line["status"] for (name, check), line in lines.items() if name == step.name and check != results.WHOLE_STEP
    ]
    counts = {status: mine.count(status) for status in ("passed", "failed", "skipped")}
    status, reason = ("passed", "") if mine else ("failed", "no check was made")
    seconds = time.monotonic() - started_at
    results.record(results.WHOLE_STEP, status=status, reason=reason, seconds=seconds, **counts)
    return int(counts["failed"] > 0 or not mine)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive a killed examination
    sys.exit(run(next(step for step in STEPS if step.name == sys.argv[1])))
