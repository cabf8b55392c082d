"""Whether `graph.compile = "auto"` compiles depends on the measured times and the steps that are left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.rehearsal.trials import compile_trial
from onward.trainer.rehearsal.trials.compile_trial import (
    COMPILE_S,
    MOST_SAVED,
    CompileTimes,
    decide,
    number_of_steps,
    obstacle,
)
from onward.trainer.run.records import CompileTrial, RehearsedBatch

TIMES = CompileTimes(eager_s=0.5, compiled_s=0.375, compile_s=30.0, start_s=5.0)


def config(**sections: Any) -> RunConfig:
    given = {
        "model": {"path": Path("m.onnx")},
        "data": {"source": "digits"},
        "train": {"num_steps": 1000, "global_batch_size": 8} | sections.pop("train", {}),
        "launch": {"device": "cpu"} | sections.pop("launch", {}),
        "graph": {"compile": "auto"} | sections.pop("graph", {}),
    }
    return build_config(given | sections)


@pytest.fixture(autouse=True)
def _has_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_trial, "missing_compiler", lambda: "")


@pytest.mark.parametrize(
    ("steps", "compiled_s", "compiles", "break_even"),
    [
        (41, 0.375, True, 40),
        (40, 0.375, False, 40),  # the steps would pay for the start, and for nothing more
        (10_000, 0.499, False, None),  # noise
        (10_000, 0.6, False, None),
    ],
)
def test_a_run_compiles_if_it_has_more_steps_than_pay_for_a_start(
    steps: int, compiled_s: float, compiles: bool, break_even: int | None
) -> None:
    found = CompileTimes(0.5, compiled_s, 30.0, 5.0).choice(steps)
    assert (found.compiles, found.break_even, found.steps) == (compiles, break_even, steps)


def test_the_choice_says_all_its_numbers() -> None:
    assert TIMES.choice(2000).text == (
        "the passes of a step take 0.5 s eagerly and 0.375 s compiled; compiling took 30.0 s, and with the code that "
        "was kept 5.0 s: 40 of the 2000 steps pay for a start, and the others are faster"
    )
    assert TIMES.choice(20).text.endswith("a start would pay after 40 steps, and the run has 20")


@pytest.mark.parametrize(
    ("sections", "on_gpu", "why"),
    [
        ({}, True, "the ranks compute on GPUs"),
        ({"launch": {"hostfile": "hosts"}}, False, "the ranks compute on the hosts of launch.hostfile"),
        ({"parallel": {"tensor": 2}}, False, "each of parallel.tensor 2 ranks computes a part of every layer"),
        (
            {
                "parallel": {"pipeline": 2, "schedule": "zero_bubble", "stages_per_rank": 2},
                "train": {"gradient_accumulation_steps": 4},
            },
            False,
            "cannot be combined with graph.compile",
        ),
        (
            {"graph": {"dropout": 0.1}, "recompute": {"mode": "selective"}, "parallel": {"data": 2, "zero": 2}},
            False,
            "",
        ),
        ({"parallel": {"pipeline": 2}, "train": {"gradient_accumulation_steps": 2}}, False, ""),
    ],
)
def test_what_forbids_compiling_makes_the_run_eager_and_is_said(
    sections: dict[str, Any], on_gpu: bool, why: str
) -> None:
    found = obstacle(config(**sections), on_gpu=on_gpu)
    assert (why in found) if why else found == ""


def test_without_a_compiler_the_run_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_trial, "missing_compiler", lambda: "there is neither g++ nor clang++")
    assert obstacle(config(), on_gpu=False) == "there is neither g++ nor clang++"


def test_the_steps_of_a_run_are_those_that_its_hours_allow() -> None:
    rows: Any = SimpleNamespace(counts=(80, 20))
    assert number_of_steps(config(), rows, step_s=1.0) == 1000
    assert number_of_steps(config(stop={"max_hours": 0.1}), rows, step_s=1.0) == 360
    epochs = {"num_steps": 0, "num_epochs": 3}
    assert number_of_steps(config(train=epochs), rows, step_s=1.0) == 30


def test_a_run_that_begins_with_a_checkpoint_has_the_steps_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = SimpleNamespace(counts=(80, 20))
    given = config(checkpoint={"load": "/runs/other/checkpoints/step-000000400"})
    assert number_of_steps(given, rows, step_s=1.0) == 1000  # it cannot be read: the ranks will say so
    manifest = SimpleNamespace(state=SimpleNamespace(step=400))
    monkeypatch.setattr(compile_trial, "read_manifest", lambda path: manifest)
    assert number_of_steps(given, rows, step_s=1.0) == 600


class Decided:
    """`decide` on a micro-batch of a given time."""

    def __init__(self, batch_s: float, given: RunConfig, *, counts: tuple[int, int] | None = (80, 20)) -> None:
        self.findings, self.limits = Findings(pending=["whether compiling pays"]), list[float]()
        graph: Any = SimpleNamespace(
            run=lambda kind, batch: RehearsedBatch(what=kind, rows=8, loss=1.0, elapsed_s=batch_s), module=None
        )
        rows: Any = SimpleNamespace(counts=counts, columns={})
        batch: Any = SimpleNamespace(size=8)
        decide(graph, given, lambda kind: batch, rows, self.findings, self.limits.append, on_gpu=False)

    @property
    def choice(self) -> CompileTrial:
        assert self.findings.compile
        return self.findings.compile


def test_nothing_is_compiled_for_a_run_too_short_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_trial, "time_compiled", lambda *_, **__: pytest.fail("it was compiled"))
    decided = Decided(0.01, config())
    assert decided.limits == []
    assert decided.choice.text == (
        "the passes of 1000 steps take about 10 s, of which compiling could save some 3.5 s, and compiling alone takes "
        "15 s or more"
    )
    assert not decided.choice.compiles


def test_a_trial_may_take_what_it_could_save_and_no_longer_than_compiling_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_trial, "time_compiled", lambda *_, **__: TIMES)
    needed_s = COMPILE_S / MOST_SAVED / 1000
    assert Decided(1.01 * needed_s, config()).limits == [pytest.approx(1.01 * COMPILE_S)]
    assert Decided(1000.0, config()).limits == [1800.0]
    decided = Decided(0.5, config())
    assert (decided.choice, decided.findings.pending) == (TIMES.choice(1000), [])


def test_a_graph_that_does_not_compile_is_trained_eagerly_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> CompileTimes:
        raise RuntimeError("CppCompileError: C++ compile error\nCommand: g++ ...")

    monkeypatch.setattr(compile_trial, "time_compiled", fails)
    choice = Decided(0.5, config()).choice
    assert (choice.compiles, choice.text) == (
        False,
        "compiling failed: RuntimeError: CppCompileError: C++ compile error",
    )


def test_steps_that_are_not_known_make_the_run_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_trial, "count_rows", lambda config, cache: SimpleNamespace(train=0))
    choice = Decided(0.5, config(train={"num_steps": 0, "num_epochs": 3}), counts=None).choice
    assert choice.text.startswith("the number of steps is not known before the data is sharded")
