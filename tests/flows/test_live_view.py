"""The live view, on real pseudo-terminals of several widths, and its lines where there is no terminal."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from onward.flows.live_view import view as view_module
from onward.flows.live_view.live_state import LiveFacts, curve
from onward.flows.live_view.screen import MEANING, Screen, amount, clock, lines, sentence
from onward.flows.live_view.view import LiveView, live_view
from onward.flows.running.stop_signals import acknowledged_interrupt
from onward.tasks.shown.training_progress import Periodic
from onward.trainer.events import CheckpointSaved, Evaluated, EventWriter, Scalars, Started, Usage
from onward.trainer.run.directory import RunDir
from onward.trainer.run.timing.phases import Phase, enter_phase, note_in_phase, phases
from tests.support.terminals import Terminal

NEW = {"tokens_per_s": 12345.0, "tflops": 1.5, "mfu": 0.31, "memory_bytes": 2.5 * 2**30}


def events_of(run: RunDir, attempt: int = 1) -> EventWriter:
    return EventWriter(run.events, attempt=attempt, rank=0)


def training(run: RunDir, *, more: dict[str, float] | None = None) -> None:
    """A run in the middle of its training, as it is in its directory."""
    for phase in ("start", "configure", "preflight", "data", "train"):
        enter_phase(run, phase)  # type: ignore[arg-type]
    events = events_of(run, run.begin_attempt())
    events.emit(Started(step=0, num_steps=100, num_samples=3200, num_rows=800, num_parameters=7))
    for step in range(1, 41):
        events.scalars(step, loss=2.0 / step, learning_rate=3e-4, samples_per_s=3200.0, data_wait=0.02, **(more or {}))
    events.emit(Evaluated(step=40, values={"evaluation/loss": 0.25, "evaluation/accuracy": 0.9375}))
    events.emit(CheckpointSaved(step=40, path="step-000000040"))
    events.close()
    usage = {"system_memory_usage_megabytes": 4295.0, "system_memory_usage_percentage": 17.0}
    node = EventWriter(run.usage_of(0), attempt=1, rank=0)
    node.emit(Usage(step=1, node="a", values=usage))
    node.emit(
        Usage(
            step=2,
            node="a",
            values=usage | {"gpu_0_memory_usage_megabytes": 9664.0, "gpu_0_memory_usage_percentage": 60.0},
        )
    )
    node.close()


def facts_of(run: RunDir) -> LiveFacts:
    facts = LiveFacts()
    facts.attach(run, "digits-14")
    facts.read()
    return facts


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_view_fits_into_60_80_and_120_columns_and_shows_all_facts(columns: int, tmp_path: Path) -> None:
    run, terminal = RunDir(tmp_path), Terminal(columns)
    training(run, more=NEW)
    with live_view(stream=terminal.stream, tick_s=0.01) as view:
        view.attach(run, "digits-14")
        terminal.wait_for("checkpoint  step 40")
        shown = terminal.screen
    assert max(map(len, shown.splitlines())) <= columns
    for fact in (
        *("digits-14  train ", "configure 0:00", "export", "40/100  40%", " left"),
        *("loss        0.05  ", "% in 8 steps", "evaluation  step 40  loss 0.25  accuracy 0.9375"),
        *("1.60 of 4  learning rate 0.0003", "3200 samples/s  12.3k tokens/s", "1.5 TFLOP/s  MFU 31.0%"),
        *("2.0% of the time", "2.5 GiB a rank  GPU 9 GiB (60%)", "checkpoint  step 40, saved 0:0"),
    ):
        assert fact in shown
    # a view that wraps has more lines than it has drawn, and leaves some of them on the terminal
    assert len(shown.splitlines()) == len(lines(facts_of(run), columns))
    assert ("node 4 GiB (17%)" in shown) == (columns == 80)  # the least important, where there is room
    assert terminal.close() == ""


def test_the_first_phases_are_shown_with_their_times_before_there_is_a_directory(tmp_path: Path) -> None:
    run, terminal = RunDir(tmp_path), Terminal()
    with live_view(stream=terminal.stream, tick_s=0.01) as view:
        terminal.wait_for(r"onward  start: settings and servers +0:00\nstart 0:00  configure  preflight  data  train")
        enter_phase(run, "start", at_ms=int(view.facts.now_s() * 1000) - 65_000)
        enter_phase(run, "configure")
        view.attach(run, "digits-14")
        terminal.wait_for(r"digits-14  configure: rehearsal on the first rows +1:05\nstart 1:05  configure 0:00  pref")
    terminal.close()


def test_a_resumed_run_has_the_phases_of_its_newest_flow_and_says_which_attempt_it_is(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    training(run)
    before = len(phases(run))
    for phase in ("end", "start", "configure", "train"):
        enter_phase(run, phase)  # type: ignore[arg-type]
    run.begin_attempt()
    facts = facts_of(run)
    assert before == 5
    assert [phase for phase, _ in facts.elapsed_s()] == ["start", "configure", "train"]
    assert "digits-14  attempt 2, train: the ranks load the model" in lines(facts, 80)[0].plain
    events = events_of(run, 2)
    events.emit(Started(step=20, num_steps=100, num_samples=3200, num_rows=800))
    events.close()
    facts.read()
    assert facts.is_training
    assert facts.losses[-1][0] == 20  # those of the steps that are made again are not shown twice
    assert "  20/100  20%" in "\n".join(line.plain for line in lines(facts, 80))


def test_a_run_without_the_newer_metrics_shows_no_row_for_them(tmp_path: Path) -> None:
    training(RunDir(tmp_path))
    shown = "\n".join(line.plain for line in lines(facts_of(RunDir(tmp_path)), 80))
    assert "3200 samples/s" in shown
    assert not re.search("tokens|TFLOP|MFU|a rank", shown)


def test_a_damaged_log_is_named_and_the_view_goes_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    training(run)
    facts = facts_of(run)
    run.fence.write_text("two")
    facts.read()
    assert "which is not the number of an attempt" in facts.problem
    assert any(line.plain.startswith("problem") for line in lines(facts, 80))
    run.fence.write_text("1")
    facts.read()
    assert facts.problem == ""


def test_without_colours_and_without_unicode_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training(RunDir(tmp_path))
    facts = facts_of(RunDir(tmp_path))

    def drawn(encoding: str) -> str:
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        Console(file=file, width=80, force_terminal=True, color_system="standard").print(Screen(facts))
        file.seek(0)
        return file.read()

    colours = re.compile(r"\x1b\[(?:\d+;)*(?:3|4|9|10)\d(?:;\d+)*m")
    assert colours.search(drawn("utf-8"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours.search(drawn("utf-8"))
    assert drawn("ascii").isascii()  # which would fail to be written otherwise


def test_what_is_printed_and_logged_meanwhile_is_above_the_view_with_its_words_whole(tmp_path: Path) -> None:
    run, terminal = RunDir(tmp_path), Terminal(60)
    log, handler = logging.getLogger("tests.live_view"), logging.StreamHandler(terminal.stream)
    log.addHandler(handler)
    training(run)
    path = "/a/" + "long/" * 20 + "path"
    before, sys.stderr = sys.stderr, terminal.stream
    try:
        with live_view(tick_s=0.01) as view:
            view.attach(run, "digits-14")
            terminal.wait_for("checkpoint  step 40")
            log.warning("the shards are in %s", path)
            print("onward: printed", file=sys.stderr)
            terminal.wait_for(r"(?s)the shards are in\n/a/long.*path\nonward: printed\ndigits-14  train")
        assert sys.stderr is terminal.stream
    finally:
        sys.stderr = before
        log.removeHandler(handler)
    assert handler.stream is terminal.stream
    shown = terminal.close()
    assert shown.replace("\n", "").count(path) == 1
    assert shown.endswith("onward: printed")


def test_the_progress_of_a_download_is_a_row_of_the_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    with live_view(tick_s=0.01):
        print("onward: one", file=sys.stderr)
        for share in (10, 20):
            print(f"\r\033[K[###   ] {share}% of data.csv", end="", file=sys.stderr, flush=True)
            terminal.wait_for(rf"(?s)^onward: one\nonward  start.*\nnow +\[###   \] {share}% of data.csv$")
        print("\r\033[K", end="", file=sys.stderr, flush=True)
        terminal.wait_for("export$")
    assert terminal.close() == "onward: one"


def test_ctrl_c_is_acknowledged_above_the_view(tmp_path: Path) -> None:
    run, terminal = RunDir(tmp_path), Terminal()
    training(run)
    with live_view(run, stream=terminal.stream, tick_s=0.01) as view, acknowledged_interrupt(20.0, say=view.say):
        terminal.wait_for("checkpoint  step 40")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        terminal.wait_for("^onward: stopping")
    assert terminal.close().startswith("onward: stopping: while ranks train they finish their step")


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    assert LiveView(terminal.stream).is_live
    monkeypatch.setenv("TERM", "dumb")
    assert not LiveView(terminal.stream).is_live
    terminal.close()


def test_without_a_terminal_a_line_comes_only_when_there_is_something_new(tmp_path: Path) -> None:
    run, stream = RunDir(tmp_path), io.StringIO()
    view = LiveView(stream)
    view._due = Periodic(0.0)
    view.tick()
    assert stream.getvalue() == ""  # before there is a run
    view.attach(run, "digits-14")
    enter_phase(run, "configure")
    for _ in range(3):
        view.tick()
    training(run)
    for _ in range(3):
        view.tick()
    events = events_of(run)
    events.scalars(41, loss=0.01)
    events.close()
    for _ in range(3):
        view.tick()
    said = stream.getvalue().splitlines()
    assert said[0] == "onward: configure: rehearsal on the first rows"
    assert said[1].startswith("onward: step 40/100, epoch 1.60/4, loss 0.05, 3200 samples/s, data wait 2%, 0:0")
    assert said[1].endswith("; evaluation of step 40: loss 0.25, accuracy 0.9375; checkpoint of step 40")
    assert said[2].startswith("onward: step 41/100")
    assert len(said) == 3
    assert "\x1b" not in stream.getvalue()
    assert view_module.LINE_PERIOD_S == 10.0


def test_how_far_the_sharding_is_is_shown_until_the_next_phase(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    enter_phase(run, "data")
    note_in_phase(run, "68 of 200 MB, 34%, 150 MB/s, 0:01 left")
    facts = facts_of(run)
    assert sentence(facts) == "data: shards, 68 of 200 MB, 34%, 150 MB/s, 0:01 left"
    assert any(line.plain.split() == ["now", *facts.phase_note.split()] for line in lines(facts, 60))
    assert [start.kind for start in phases(run)] == ["data"]
    enter_phase(run, "train")
    facts.read()
    assert facts.phase_note == ""


def test_lines_have_at_least_ten_seconds_between_them(tmp_path: Path) -> None:
    run, stream = RunDir(tmp_path), io.StringIO()
    view = LiveView(stream)
    view.attach(run)
    for phase in ("configure", "preflight", "data"):
        enter_phase(run, phase)  # type: ignore[arg-type]
        view.tick()
    assert len(stream.getvalue().splitlines()) == 1


def test_each_phase_has_a_meaning() -> None:
    from typing import get_args

    assert set(MEANING) == set(get_args(Phase))
    facts = LiveFacts()
    assert sentence(facts) == "start: settings and servers"


def test_the_trend_compares_the_newest_losses_with_those_before_and_the_curve_covers_all_steps() -> None:
    facts = LiveFacts()
    facts.attach(RunDir(Path()))

    def add_loss(step: int, loss: float) -> None:
        facts.history.add(Scalars(attempt=1, step=step, values={"train/loss": loss}))

    assert facts.change() is None
    for step in range(1, 101):
        add_loss(step, 1.0 if step <= 80 else 0.5)
    found = facts.change()
    assert found is not None
    assert (found.ratio, found.steps) == (-0.5, 20)
    add_loss(101, float("nan"))
    assert len(facts.losses) == 100
    assert curve(facts.losses, 5) == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.5], abs=0.03)
    for step in range(102, 10_001):
        add_loss(step, 0.5)
    assert len(facts.losses) <= 2048
    assert (facts.losses[0][0], facts.losses[-1][0]) == (1, 10_000)


def test_the_time_left_is_that_of_the_last_minute_with_its_evaluations(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.begin_attempt()
    log = [(0, "start", {"num_steps": 100, "num_samples": 100})]
    # 10 steps in 10 s, then an evaluation of 40 s, and one step
    log += [(1000 * step, "scalars", {"values": {"train/loss": 1.0}}) for step in range(1, 11)]
    log += [(51_000, "scalars", {"values": {"train/loss": 1.0}})]
    steps = [0, *range(1, 11), 11]
    lines = [{"at_ms": at, "attempt": 1, "step": s, "kind": k, **f} for (at, k, f), s in zip(log, steps, strict=True)]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert facts_of(run).remaining_s() == pytest.approx(89 * 50 / 10)


def test_numbers_and_times_are_short() -> None:
    assert [clock(each) for each in (7.4, 65, 3700, 200_000)] == ["0:07", "1:05", "1:01:40", "2 d 07:33:20"]
    assert [amount(each) for each in (221.54, 9999, 12345, 4.1e6, 3e9)] == ["221.5", "9999", "12.3k", "4.1M", "3G"]
