"""Stacks that ranks wrote are read, and the rank that the others waited for is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.infra.job.rank_stacks import RankStack, explain_hang, parse_exception, parse_stacks

ENTRY = '  File "/x/onward/trainer/__main__.py", line 60 in train_rank\n  File "<frozen runpy>", line 88 in _run_code\n'
C10D = '  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3 in all_reduce\n'
MAIN = "Current thread 0x00007f5594606b80 (most recent call first):\n"
THREAD = "Thread 0x00007f5594606b70 [prefetch] (most recent call first):\n"
BOOT = '  File "/v/lib/python3.11/threading.py", line 1 in _bootstrap\n'
RESULT = '  File "/v/lib/python3.11/threading.py", line 327 in wait\n'
IDLE = '  File "/v/lib/python3.11/concurrent/futures/thread.py", line 81 in _worker\n' + BOOT


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A frame of the user's code."""
    (tmp_path / "own.py").write_text("def spin():\n    while True: pass\n")
    return f'  File "{tmp_path / "own.py"}", line 2 in spin\n'


def test_a_rank_in_its_own_code_does_not_wait_and_one_in_a_collective_does(own: str) -> None:
    spins, waits = parse_stacks(THREAD + IDLE + MAIN + own + ENTRY), parse_stacks(MAIN + C10D + ENTRY)
    assert (spins.state, waits.state) == ("computes", "waits")
    found = explain_hang({0: waits, 1: spins, 2: waits}, stopped={})
    assert found.rank == 1
    assert "it is in spin (" in found.sentence
    assert "own.py:2): `while True: pass`, called by train_rank (trainer/__main__.py:60)" in found.sentence
    assert found.sentence.endswith("; 2 ranks (0, 2) wait for it")


def test_a_rank_that_waits_for_its_own_thread_is_named_with_the_line_of_that_thread(own: str) -> None:
    # every rank has an older thread that waits for the signal to stop
    stops = '  File "/v/lib/python3.11/signal.py", line 82 in sigwait\n'
    stops += '  File "/x/onward/trainer/distributed/failures.py", line 62 in _wait\n'
    stack = parse_stacks(THREAD + own + BOOT + THREAD + IDLE + THREAD + stops + BOOT + MAIN + RESULT + ENTRY)
    assert stack.state == "thread"
    assert stack.place.startswith("waits for a thread of its own, which is in spin (")


def test_the_last_dump_of_a_file_counts(own: str) -> None:
    first, last = "Timeout (0:00:02)!\n" + MAIN + own + ENTRY, MAIN + C10D + ENTRY
    assert parse_stacks(first + last).state == "waits"


def test_a_line_that_calls_a_collective_waits_also_without_python_frames_below(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def reduce():\n    work.wait()\n    total = a + b\n")
    lines = {number: f'  File "{tmp_path}/own.py", line {number} in reduce\n' for number in (2, 3)}
    assert [parse_stacks(MAIN + lines[number] + ENTRY).state for number in (2, 3)] == ["waits", "computes"]


def test_without_a_rank_to_blame_all_places_are_shown_and_a_missing_stack_is_the_cause() -> None:
    waits = parse_stacks(MAIN + C10D + ENTRY)
    assert "every rank waits for the others" in explain_hang({0: waits, 1: waits}, stopped={}).sentence
    silent = explain_hang({0: waits, 1: RankStack(())}, stopped={})
    assert (silent.rank, silent.sentence.split(",")[0]) == (1, "it wrote no stack")
    stopped = explain_hang({0: waits, 1: waits}, stopped={1: "its process 7 was stopped"})
    assert (stopped.rank, stopped.sentence.split(";")[0]) == (1, "its process 7 was stopped")


def test_the_stack_of_an_exception_is_read_from_its_traceback() -> None:
    text = 'Traceback (most recent call last):\n  File "/x/a.py", line 1, in main\n    f()\n' + (
        '  File "/v/lib/python3.11/site-packages/torch/distributed/c.py", line 9, in wait\n    x\nRuntimeError: no\n'
    )
    assert parse_exception(text).state == "waits"


@pytest.mark.parametrize("text", ["", "garbage\n", "Current thread 0x1 (most recent call first):\n", "\0\xff"])
def test_a_file_without_stacks_is_an_unknown_rank(text: str) -> None:
    assert parse_stacks(text).state == "unknown"
