"""Run a configuration with faults: start the commands that a user would type, inject, and watch what comes of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from onward.infra.job.child_program import signalled_with_parent
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import endings
from tests.soak.account import Command, Fault
from tests.soak.kinds import KINDS
from tests.soak.plan import PlannedFault
from tests.soak.scene import NoTarget, Progress, Scene, described, until_gone

POLL_S = 0.05
ORPHAN_S = 15.0
"""How long after the end of a flow its processes may take to end."""
RECOVERY_S = 300.0
"""How long the run may take until it works again after a fault; then it is killed, and the soak ends."""
TOO_LATE_S = 3.0
"""An attempt that is done so soon after a fault had made all of its steps by then."""
TRIES = 20
"""How often a fault is tried that finds no target, before others come first."""
LAST_TRY = 15 * TRIES
"""How often it is tried at all: an exporter, for example, is there for seconds in a minute."""
FRUITLESS = 4
"""Commands in a row without a step; then the soak ends."""


class GaveUp(Exception):
    """The run does not go on, although it was resumed."""


@dataclass
class Soak:
    """The faults of a plan, injected into runs of one configuration under one home."""

    scene: Scene
    words: tuple[str, ...]
    """CONFIG and overrides of `onward run`."""
    pending: list[PlannedFault]
    say: Callable[[str], None] = lambda line: None
    faults: list[Fault] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    ends_early: bool = False
    """Whether no further fault is injected."""
    problems: list[str] = field(default_factory=list)
    tries: dict[int, int] = field(default_factory=dict)
    """Number of a planned fault -> how often it found no target."""
    rounds: int = 0
    open: Fault | None = None
    """The fault from which the run has not recovered yet."""
    step_after: int = 0
    """The step at the end of its injection, which may take seconds."""
    ready_at: float = 0.0
    """When the command began, or the run worked again, on the monotonic clock; the next pause begins there."""

    def run_once(self) -> RunDir:
        """Run the configuration once, to its exported file, with the faults that come up. Raises GaveUp."""
        scene = self.scene
        self.rounds += 1
        known = {path.parent for path in (scene.home / "runs").glob("*/identity.json")}
        scene.run, scene.progress = None, Progress()
        fruitless, made = 0, 0
        while self._command(known) != 0:
            fruitless, made = (0 if scene.progress.steps > made else fruitless + 1), scene.progress.steps
            # without a fault there is nothing from which to resume
            if fruitless == FRUITLESS or not (self.faults or self.pending or self.open):
                raise GaveUp(
                    f"run {self.rounds} made no step in {FRUITLESS} commands; the output of the last one is in "
                    f"{self.commands[-1].log}"
                )
        assert scene.run is not None
        return scene.run

    def _command(self, known: set[Path]) -> int:
        """Run one command to its end, and inject meanwhile; return its exit status."""
        scene, number = self.scene, len(self.commands) + 1
        words = ("run", *self.words) if scene.run is None else ("resume", scene.run.root.name)
        log = scene.home / "logs" / f"{number:03d}-{words[0]}.log"
        log.parent.mkdir(exist_ok=True)
        began = time.time()
        with log.open("wb") as output:
            process = subprocess.Popen(
                # the command saves and ends if this process is killed
                signalled_with_parent([sys.executable, "-m", "onward.flows.cli", *words, "--json"], signal.SIGTERM),
                env={**without_servers(os.environ), **scene.environment()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        scene.flow, self.ready_at = psutil.Process(process.pid), time.monotonic()
        injected = len(self.faults)
        try:
            while process.poll() is None:
                scene.find_run(known)
                self._watch(began)
                time.sleep(POLL_S)
        finally:
            scene.flow = None
            if process.poll() is None:
                process.terminate()
                process.wait(60)
        scene.find_run(known)
        self._end_command(process.returncode)
        ended = self.faults[injected:] + ([self.open] if self.open else [])
        hit = [fault for fault in ended if fault.command == number and KINDS[fault.kind].ends == "flow"]
        text = log.read_text(errors="replace")
        self.commands.append(
            Command(
                number=number,
                words=words,
                status=process.returncode,
                began=began,
                ended=time.time(),
                tracebacks=len(re.findall(r"^Traceback \(most recent call last\)", text, re.MULTILINE)),
                expected=KINDS[hit[-1].kind].states
                if hit
                else ("COMPLETED",)
                if not process.returncode
                else ("FAILED",),
                log=str(log),
            )
        )
        return int(process.returncode)

    # -- one look at the run

    def _watch(self, began: float) -> None:
        """Follow the fault that is open; without one, inject the next when its time has come."""
        phase = self.scene.phase(since=began)
        if self.open is not None:
            self._follow(self.open)
            return
        fault = self._next(phase)
        if fault is None or self.ends_early:
            return
        # a start takes some seconds, which the pauses of a long run would always exceed
        if phase != "train":
            wait_s = fault.choice * (8.0 if phase == "start" else 1.0)
        else:
            first = self.scene.progress.first_at.get(self.scene.attempt, time.time())
            self.ready_at, wait_s = max(self.ready_at, time.monotonic() - (time.time() - first)), fault.wait_s
        if time.monotonic() - self.ready_at >= wait_s:
            self._inject(fault)

    def _next(self, phase: str) -> PlannedFault | None:
        """Return the first fault of the plan for this phase."""
        fits = [fault for fault in self.pending if KINDS[fault.kind].when == phase]
        if phase == "start":  # before the faults in training that come first in the plan
            trains = [fault.number for fault in self.pending if KINDS[fault.kind].when == "train"]
            fits = [fault for fault in fits if fault.number < min(trains, default=fault.number + 1)]
        return fits[0] if fits else None

    def _inject(self, planned: PlannedFault) -> None:
        scene, kind = self.scene, KINDS[planned.kind]
        attempt, step, at = scene.attempt, scene.step, time.time()
        try:
            target = kind.inject(scene, planned.choice)
        except (NoTarget, FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess) as error:
            self._postpone(planned, str(error))
            return
        self.pending.remove(planned)
        self.step_after = scene.step
        self.open = Fault(
            number=planned.number,
            kind=planned.kind,
            target=target,
            round=self.rounds,
            command=len(self.commands) + 1,
            at=at,
            attempt=attempt,
            step=step,
        )
        self.say(f"fault {planned.number}: {planned.kind} ({target}), step {step}")

    def _postpone(self, planned: PlannedFault, why: str) -> None:
        """Try again in 0.2 s; behind all others if that was in vain for some time, and at last not at all."""
        tries = self.tries[planned.number] = self.tries.get(planned.number, 0) + 1
        self.ready_at = time.monotonic() - planned.wait_s + 0.2
        if tries % TRIES == 0:
            self.pending.remove(planned)
            if tries < LAST_TRY:
                self.pending.append(planned)
            else:
                self.problems.append(f"fault {planned.number} ({planned.kind}) found no target: {why}")

    def _follow(self, fault: Fault) -> None:
        """Note what came of the open fault; close it once the run works again."""
        scene, now = self.scene, time.time()
        if fault.ended == "nothing" and scene.attempt != fault.attempt and KINDS[fault.kind].when == "train":
            self.open = fault = fault.model_copy(update={"ended": "attempt"})
        if fault.detected_s is None and fault.ended != "nothing":
            self.open = fault = fault.model_copy(update={"detected_s": round(now - fault.at, 2)})
        if KINDS[fault.kind].when != "export" and self._works_again(fault):
            self._close(fault)
        elif now - fault.at > RECOVERY_S:
            raise GaveUp(f"fault {fault.number} ({fault.kind}): the run made no step in {RECOVERY_S:g} s after it")

    def _works_again(self, fault: Fault) -> bool:
        """Return whether a step was made that the fault has not stopped, or all steps."""
        scene = self.scene
        if KINDS[fault.kind].ends == "nothing" and scene.attempt == fault.attempt:
            return scene.step > self.step_after + 1 or scene.is_trained()
        trains = scene.progress.first_at.get(scene.attempt, 0.0) > fault.at
        return trains or (fault.ended != "nothing" and scene.attempt != fault.attempt and scene.is_trained())

    def _close(self, fault: Fault) -> None:
        scene = self.scene
        resumed_from = scene.progress.starts.get(scene.attempt, fault.step)
        lost = max(0, fault.step - resumed_from) if fault.ended != "nothing" and scene.attempt != fault.attempt else 0
        known = {each.attempt: each for each in endings(scene.run_dir)}
        ending, before = known.get(fault.attempt), known.get(fault.attempt - 1)
        update: dict[str, Any] = {
            "recovered_s": round(time.time() - fault.at, 2),
            "lost": lost,
            "said": ending.kind if ending else "",
        }
        if ending and ending.kind == "done":
            update["too_late"] = ending.detected_ms / 1000 - fault.at < TOO_LATE_S
        if ending and before:
            update["spent"] = before.retry > 0 and ending.retry == 0
        if ending and fault.ended == "attempt":
            update["detected_s"] = max(0.0, round(ending.detected_ms / 1000 - fault.at, 2))
        self.faults.append(closed := fault.model_copy(update=update))
        self.open, self.ready_at = None, time.monotonic()
        said = f", said {closed.said}" if closed.said else ""
        self.say(f"  ended the {closed.ended}{said}; works again after {closed.recovered_s} s, {lost} steps again")

    def _end_command(self, status: int) -> None:
        """Note that the command has ended, and wait for the end of its processes."""
        scene = self.scene
        left = until_gone(scene.jobs, ORPHAN_S)
        told = tuple(described(process) for process in left)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.open is None:
            self.problems += [f"left {ORPHAN_S:g} s after a command: {each}" for each in told]
            return
        fault = self.open.model_copy(update={"orphans": told})
        if status:
            detected_s = fault.detected_s or round(time.time() - fault.at, 2)
            fault = fault.model_copy(update={"ended": "flow", "detected_s": detected_s})
        self.open = fault
        if not status:
            self._close(fault)


def without_servers(environment: os._Environ[str]) -> dict[str, str]:
    """Return an environment in which no Prefect server and no MLflow store are configured."""
    return {name: value for name, value in environment.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
