"""Promise 11: the event log ships to MLflow without a gap or a duplicate, whatever died in between.

Three may die: who writes the log (the training), who ships it (the monitor), who takes it (MLflow).
This file is also the program that is killed: `python -m tests.equivalence.test_event_log_ships_once ROLE ...`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from onward.infra.mlflow.model_package import Point
from onward.infra.mlflow.tracking import Tracker
from onward.tasks.monitor import monitor
from onward.tasks.shown.event_shipping import Shipper, points_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.events import Evaluated, EventWriter, Started, read_events
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import AttemptResult, RunIdentity, write_record
from tests.support.stores import Server, client, new_run, points

STEPS = 600
ATTEMPTS = 6
KILLS = 30


# -- what the log says and what the store has


def first_lines(run: RunDir) -> dict[str, list[tuple[int, float]]]:
    """Metric -> (step, value) of the first line of each step, in the order of steps."""
    kept: dict[str, dict[int, float]] = {}
    for event, _ in read_events(run.events):
        for point in points_of(event):
            kept.setdefault(point.key, {}).setdefault(point.step, point.value)
    return {key: sorted(values.items()) for key, values in kept.items()}


def check(run: RunDir, tracker: Tracker) -> None:
    """Every first line is in the store, once, with its value; and the log is whole itself."""
    expected = first_lines(run)
    assert [step for step, _ in expected["train/loss"]] == list(range(1, STEPS + 1))
    assert {key: points(tracker, key) for key in expected} == expected
    assert set(client(tracker).get_run(tracker.run_id).data.metrics) == set(expected)


# -- who writes


def write_log(run: RunDir, pause_s: float) -> None:
    """Several attempts, each killed inside a line, each next one going on from an older step."""
    dice = random.Random(0)
    reached = 0
    for attempt in range(1, ATTEMPTS + 1):
        run.begin_attempt()
        resumed = max(0, reached - dice.randrange(1, 40))
        last = attempt == ATTEMPTS
        reached = STEPS if last else STEPS * attempt // ATTEMPTS
        events = EventWriter(run.events, attempt=attempt, rank=0)  # cuts off what the last one left unfinished
        events.emit(Started(step=resumed, num_steps=STEPS, num_samples=32 * STEPS, num_parameters=1))
        for step in range(resumed + 1, reached + 1):
            cost = {"samples_per_s": dice.random(), "tflops": dice.random(), "mfu": dice.random(), "memory_bytes": 1e9}
            events.scalars(step, loss=dice.random(), learning_rate=1e-3, **cost)
            if step % 50 == 0:
                events.emit(Evaluated(step=step, values={"evaluation/loss": dice.random()}))
            time.sleep(pause_s)
        events.close()
        if not last:
            with run.events.open("ab") as file:
                file.write(b'{"at_ms": 1700000000000, "attempt": 1, "step": 7, "kind": "scalars", "values": {"train/lo')
    result = {"attempt": ATTEMPTS, "status": "done", "step": STEPS, "samples_seen": 1, "metrics": {}, "elapsed_s": 1}
    write_record(run.result(ATTEMPTS), AttemptResult.model_validate(result))
    run.close_log()


# -- who ships, and dies


class Mortal(Tracker):
    """A Tracker whose process may die at the two worst moments: before a batch is stored, and just after."""

    dice = random.Random()

    def log_batch(self, points: Iterable[Point]) -> None:
        self._die(0.1)
        super().log_batch(points)
        self._die(0.1)

    def _die(self, chance: float) -> None:
        if self.dice.random() < chance:
            os.kill(os.getpid(), signal.SIGKILL)


def ship(run: RunDir, tracker: Tracker) -> None:
    """Follow the log to its end."""
    shipper, closed = Shipper(run, tracker), False
    while not closed:
        closed = run.closed.exists()
        shipper.ship()
        time.sleep(0.005)


def ship_and_die(run: RunDir, uri: str, run_id: str) -> int:
    """Fork shippers and kill each after a random while; then one may finish. Returns the number killed."""
    import mlflow.tracking  # noqa: F401  once here, instead of in each child

    dice = random.Random(1)
    killed = 0
    while True:
        child = os.fork()
        if child == 0:
            Mortal.dice = random.Random(killed)
            ship(run, Mortal(uri, run_id) if killed < KILLS else Tracker(uri, run_id))
            os._exit(0)
        reaper = threading.Timer(dice.uniform(0.02, 0.5), os.kill, (child, signal.SIGKILL))
        if killed < KILLS:
            reaper.start()
        _, status = os.waitpid(child, 0)
        reaper.cancel()
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return killed
        killed += 1


@pytest.mark.slow
def test_shippers_killed_anywhere_and_attempts_killed_inside_a_line(tmp_path: Path) -> None:
    run, tracker = RunDir(tmp_path), new_run()
    script = [sys.executable, "-m", "tests.equivalence.test_event_log_ships_once"]
    writer = subprocess.Popen([*script, "write", tmp_path])
    shipper = subprocess.run(
        [*script, "ship", tmp_path, tracker.tracking_uri, tracker.run_id], capture_output=True, text=True
    )
    assert writer.wait() == 0
    assert shipper.returncode == 0, shipper.stderr
    assert int(shipper.stdout.split()[-1]) >= 10, "too few died for this to prove anything"
    check(run, tracker)


@pytest.mark.slow
def test_an_mlflow_server_killed_and_started_again_while_the_training_runs(tmp_path: Path) -> None:
    server = Server(tmp_path / "mlflow")
    server.start()
    try:
        tracker = new_run(server.uri)
        run = RunDir(tmp_path / "run")
        model, data = ModelConfig(path=tmp_path / "m.onnx"), DataConfig(source="digits")
        write_record(run.config, RunConfig(model=model, data=data, train=TrainConfig(num_steps=STEPS)))
        where = {"mlflow_run_id": tracker.run_id, "tracking_uri": server.uri}
        write_record(run.identity, RunIdentity(run_id="r", name="r", created_at="", model_sha256="", **where))
        watching = threading.Thread(target=monitor.fn, args=(run,), kwargs={"tick_s": 0.05}, daemon=True)
        writing = threading.Thread(target=write_log, args=(run, 0.02), daemon=True)
        watching.start()
        writing.start()

        while len(points(tracker, "train/loss")) < STEPS // 10:
            time.sleep(0.05)
        server.kill()
        writing.join()  # most of the training passes without MLflow
        server.start()
        watching.join()

        check(run, tracker)
        assert client(tracker).get_run(tracker.run_id).info.status == "FINISHED"
    finally:
        server.kill()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_log(RunDir(Path(sys.argv[2])), 0.004)
    else:
        print(ship_and_die(RunDir(Path(sys.argv[2])), sys.argv[3], sys.argv[4]))
