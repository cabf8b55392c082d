"""The account of a run's time: every second is in one part, and lost work, recovery and pauses are told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from onward.trainer.events import Ended, Event, Started, Times
from onward.trainer.run.directory import RunDir
from onward.trainer.run.history import RunHistory
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding, EndingKind
from onward.trainer.run.timing.phases import Phase, PhaseStart, enter_phase, phases
from onward.trainer.run.timing.time_account import TimeAccount, account, attempt_times, time_account
from tests.support.graphs import tiny_conv_net
from tests.support.runs import make_run, tiny_images, train_run, train_until


def flow(pid: int, **begins: int) -> list[PhaseStart]:
    """Phases of one flow: name -> the second at which it began."""
    return [PhaseStart(step=0, at_ms=1000 * at_s, kind=phase, pid=pid) for phase, at_s in begins.items()]  # type: ignore[arg-type]


def start(attempt: int, at_s: float, step: int) -> Event:
    return Started(at_ms=round(1000 * at_s), attempt=attempt, step=step, num_steps=100)


def times(attempt: int, at_s: float, step: int, **seconds: float) -> Event:
    return Times(at_ms=round(1000 * at_s), attempt=attempt, step=step, seconds=seconds)


def end(attempt: int, at_s: float, step: int) -> Event:
    return Ended(at_ms=round(1000 * at_s), attempt=attempt, step=step, status="done")


def ended(
    attempt: int, kind: EndingKind, began_s: float, detected_s: float, ended_s: float, *, checkpoint: int = 0
) -> AttemptEnding:
    return AttemptEnding(
        attempt=attempt,
        kind=kind,
        sentence="",
        action="",
        began_ms=round(1000 * began_s),
        detected_ms=round(1000 * detected_s),
        ended_ms=round(1000 * ended_s),
        checkpoint=checkpoint,
    )


def history_of(events: Sequence[Event]) -> RunHistory:
    history = RunHistory(Path())
    for event in events:
        history.add(event)
    return history


def made(
    begins: Sequence[PhaseStart], events: Sequence[Event], endings: Sequence[AttemptEnding], now_s: float | None = None
) -> TimeAccount:
    """The account of these records; its parts and the rest are the wall time, to the millisecond."""
    found = account(begins, attempt_times(history_of(events), endings), None if now_s is None else round(1000 * now_s))
    assert found is not None
    assert sum(found.parts.values()) + found.unaccounted_s == pytest.approx(found.wall_s, abs=1e-6)
    return found


def parts(found: TimeAccount) -> Mapping[str, float]:
    """The parts that took time."""
    return {name: round(seconds, 6) for name, seconds in found.parts.items() if abs(seconds) > 1e-9}


UNDISTURBED = flow(1, start=0, configure=4, preflight=10, data=14, train=16, export=62, end=70)
TRAINING = [
    start(1, 24, 0),
    times(1, 24, 0, setup=5.0),
    times(1, 26, 0, setup=5.0, evaluation=2.0),
    times(1, 40, 5, setup=5.0, evaluation=2.0, compile=3.0, data_wait=1.0, steps=10.0),
    times(1, 42, 5, setup=5.0, evaluation=2.0, compile=3.0, data_wait=1.0, steps=10.0, checkpoint=2.0),
    times(1, 58, 10, setup=5.0, evaluation=4.0, compile=3.0, data_wait=2.0, steps=22.0, checkpoint=3.0),
    end(1, 58, 10),
]


def test_an_undisturbed_run_has_every_second_in_one_part() -> None:
    found = made(UNDISTURBED, TRAINING, [ended(1, "done", 17, 59, 60)])
    assert found.wall_s == 70
    assert parts(found) == {
        "start-up": 24,  # until the event "start"
        "compile": 3,
        "data wait": 2,
        "steps": 22,
        "evaluation": 4,
        "checkpoint stall": 3,
        "ending": 4,  # 58 to 62
        "export": 8,
    }
    assert found.of_start_up == {"start": 4, "configure": 6, "preflight": 4, "data": 2, "launch": 3, "set-up": 5}
    assert (found.idle_s, found.repeated_steps, found.unaccounted_s) == (0, 0, 0)


def test_what_the_laps_do_not_add_up_to_stands_by_itself() -> None:
    events = [*TRAINING[:-2], times(1, 58, 10, setup=5.0, evaluation=4.0, steps=22.0, checkpoint=3.0), TRAINING[-1]]
    found = made(UNDISTURBED, events, [ended(1, "done", 17, 59, 60)])
    assert found.unaccounted_s == pytest.approx(5)


def killed_and_retried() -> tuple[list[Event], list[AttemptEnding]]:
    """Attempt 1 saves step 5, dies in step 9; attempt 2 goes on from step 5 after a pause."""
    events = [
        *TRAINING[:5],
        times(1, 50, 8, setup=5.0, evaluation=2.0, compile=3.0, data_wait=2.0, steps=17.0, checkpoint=2.0),
        start(2, 65, 5),
        times(2, 65, 5, setup=4.0),
        times(2, 80, 10, setup=4.0, steps=13.0, checkpoint=2.0),
        end(2, 80, 10),
    ]
    return events, [ended(1, "rank_lost", 17, 51, 52, checkpoint=5), ended(2, "done", 57, 81, 82)]


def test_steps_behind_the_last_checkpoint_of_a_dead_attempt_are_lost_work_and_the_way_back_is_recovery() -> None:
    begins = flow(1, start=0, configure=4, preflight=10, data=14, train=16, export=84, end=90)
    found = made(begins, *killed_and_retried())
    assert parts(found) == {
        "start-up": 24,
        "compile": 3,
        "data wait": 1,
        "steps": 10 + 13,
        "evaluation": 2,
        "checkpoint stall": 2 + 2,
        "lost work": 8 + 1,  # steps 6 to 8, and step 9 until its death was noticed
        "recovery": 65 - 51,
        "ending": 4,
        "export": 6,
    }
    assert found.repeated_steps == 3


def test_a_killed_flow_ends_with_its_last_sign_of_life_and_the_start_of_the_next_one_is_recovery() -> None:
    first = flow(1, configure=4, preflight=10, data=14, train=16)
    second = flow(2, start=500, configure=502, preflight=504, data=505, train=506, export=540, end=550)
    events = [
        *TRAINING[:5],
        times(1, 50, 8, setup=5.0, evaluation=2.0, compile=3.0, data_wait=2.0, steps=17.0, checkpoint=2.0),
        start(2, 520, 5),
        times(2, 520, 5, setup=4.0),
        times(2, 535, 10, setup=4.0, steps=13.0, checkpoint=2.0),
        end(2, 535, 10),
    ]
    # the next flow writes how the killed one's attempt ended, with its own time
    found = made(
        [*first, *second], events, [ended(1, "rank_lost", 17, 507, 507, checkpoint=5), ended(2, "done", 508, 536, 537)]
    )
    assert found.wall_s == (50 - 4) + (550 - 500)
    assert found.idle_s == 450
    assert parts(found)["recovery"] == 20
    assert parts(found)["start-up"] == 20
    assert parts(found)["lost work"] == 8


def test_a_run_that_was_stopped_with_a_checkpoint_has_lost_nothing_and_starts_up_again() -> None:
    first = flow(1, configure=4, preflight=10, data=14, train=16, end=62)
    second = flow(2, configure=100, preflight=102, data=103, train=104, export=124, end=125)
    events = [*TRAINING, start(2, 110, 10), times(2, 110, 10, setup=1.0), times(2, 120, 20, setup=1.0, steps=10.0)]
    stopped = [ended(1, "stopped", 17, 59, 60, checkpoint=10), ended(2, "done", 105, 121, 122)]
    found = made([*first, *second], [*events, end(2, 120, 20)], stopped)
    assert found.idle_s == 38
    assert "lost work" not in parts(found)
    assert "recovery" not in parts(found)
    assert parts(found)["start-up"] == 20 + 10


def test_an_attempt_that_ended_the_run_without_a_checkpoint_has_lost_all_of_it() -> None:
    begins = flow(1, configure=4, preflight=10, data=14, train=16, end=62)
    found = made(begins, TRAINING[:5], [ended(1, "non_finite", 17, 50, 51, checkpoint=0)])
    assert parts(found) == {"start-up": 20, "lost work": 50 - 24, "ending": 12}


def test_an_attempt_that_dies_before_its_first_step_is_lost_and_the_next_one_recovers() -> None:
    begins = flow(1, configure=4, preflight=10, data=14, train=16, export=84, end=84)
    events = [start(2, 40, 0), times(2, 40, 0, setup=2.0), times(2, 80, 9, setup=2.0, steps=40.0), end(2, 80, 9)]
    found = made(begins, events, [ended(1, "hang", 17, 30, 31), ended(2, "done", 33, 81, 82)])
    assert parts(found) == {"start-up": 13, "lost work": 14, "recovery": 9, "steps": 40, "ending": 4}


def test_a_running_run_is_accounted_for_until_now() -> None:
    begins = flow(1, configure=4, preflight=10, data=14, train=16)
    found = made(begins, TRAINING[:5], [], now_s=50)
    assert found.wall_s == 46
    assert parts(found)["steps"] == 10 + 8
    assert "lost work" not in parts(found)


def test_a_run_of_an_earlier_version_has_no_account() -> None:
    assert account(UNDISTURBED, attempt_times(history_of([start(1, 24, 0), end(1, 58, 10)]), []), None) is None


def test_a_run_directory_without_anything_has_no_account(tmp_path: Path) -> None:
    assert time_account(RunDir(tmp_path), RunHistory(tmp_path)) is None


def test_phases_are_read_as_they_were_written_and_a_flow_may_have_begun_before_its_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    order: list[Phase] = ["start", "configure", "train", "end"]
    for phase in order:
        enter_phase(run, phase, at_ms=12 if phase == "start" else None)
    found = phases(run)
    assert [each.kind for each in found] == order
    assert found[0].begin_ms == 12
    assert found[1].begin_ms > 1_700_000_000_000


def test_a_phase_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    enter_phase(RunDir(tmp_path / "file" / "run"), "train")


@pytest.mark.mpi
def test_of_a_real_run_that_was_killed_and_started_again_all_but_a_hundredth_is_in_the_parts(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        tiny_conv_net(),
        tiny_images(80),
        train={"num_steps": 40, "global_batch_size": 8, "evaluation_period": 10},
        parallel={"data": 2},
        checkpoint={"period": 10},
    )
    train_until(run, ("scalars", 27))
    train_run(run)
    found = time_account(run, RunHistory.of(run.events))
    assert found is not None
    assert sum(found.parts.values()) == pytest.approx(found.wall_s, rel=0.01)
    # the second attempt went on from step 20
    assert found.repeated_steps == 7
    assert all(found.parts[name] > 0 for name in ("start-up", "steps", "evaluation", "checkpoint stall", "lost work"))
    assert found.parts["recovery"] > 0.1  # ranks start and load again
