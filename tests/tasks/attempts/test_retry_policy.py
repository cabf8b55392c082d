"""Which kind an ending is, what follows it, and what a retry waits for. No processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from onward.tasks.attempts import wait_before_retry as readiness
from onward.tasks.attempts.attempt import Attempt
from onward.tasks.attempts.retry_policy import adjustments, plan_next
from onward.tasks.attempts.wait_before_retry import wait_until_ready
from onward.trainer.config.loading import build_config
from onward.trainer.errors import RuntimeUnavailable, StorageUnavailable
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding, EndingKind, endings
from onward.trainer.run.outcomes.storage import storage_problem
from onward.trainer.run.records import write_record


def new_run(folder: Path, **sections: Any) -> RunDir:
    """A configured run of two ranks."""
    run = RunDir(folder)
    config = build_config(
        {
            "model": {"path": str(folder / "model.onnx")},
            "data": {"source": "digits"},
            "train": {"num_steps": 100, "global_batch_size": 8} | sections.pop("train", {}),
            "parallel": {"data": 2} | sections.pop("parallel", {}),
            **sections,
        }
    )
    write_record(run.config, config)
    return run


def ending(run: RunDir, kind: EndingKind, **known: Any) -> AttemptEnding:
    """Plan what follows an ending, and write its record as the task does."""
    times = {"began_ms": 1, "detected_ms": 2, "ended_ms": time.time_ns() // 1_000_000}
    found = AttemptEnding(attempt=run.begin_attempt(), kind=kind, sentence="it ended", action="", **times, **known)
    planned = plan_next(run, found, read_config(run))
    write_record(run.ending(planned.attempt), planned)
    return planned


def save(run: RunDir, step: int) -> None:
    run.checkpoint(step).mkdir(parents=True)


@pytest.mark.parametrize("kind", ["hang", "rank_lost", "host_lost", "preempted", "storage", "server", "unknown"])
def test_without_progress_the_retries_are_used_up_and_their_pauses_grow(tmp_path: Path, kind: EndingKind) -> None:
    run = new_run(tmp_path, launch={"retries": 3})
    found = [ending(run, kind, step=5) for _ in range(4)]
    assert [(each.retry, each.delay_s) for each in found] == [(1, 0.5), (2, 2), (3, 8), (0, 0)]
    assert found[0].action == "it starts again from the beginning (5 steps are repeated) in 0.5 s, retry 1 of 3"
    assert found[-1].action == "the run ends after 3 retries without a new checkpoint (launch.retries)"


def test_a_checkpoint_beyond_all_earlier_ones_resets_the_retries(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    steps = [0, 0, 20, 20, 40, 40, 20, 40]  # the last but one lost a damaged checkpoint, which is no progress
    found = [ending(run, "rank_lost", step=step + 7, checkpoint=step) for step in steps]
    assert [each.retry for each in found] == [1, 2, 1, 2, 1, 2, 0, 1]
    assert found[2].action == "it goes on from the checkpoint of step 20 (7 steps are repeated) in 0.5 s, retry 1 of 2"


@pytest.mark.parametrize("kind", ["done", "stopped", "user_error", "data_error", "non_finite", "out_of_memory"])
def test_what_a_retry_would_repeat_is_not_retried(tmp_path: Path, kind: EndingKind) -> None:
    found = ending(new_run(tmp_path), kind, step=2)
    assert (found.retry, found.delay_s) == (0, 0)
    assert "retry" not in found.action or "would" in found.action


def test_memory_lost_in_later_steps_is_retried_once(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert [ending(run, "out_of_memory", step=9).retry for _ in range(2)] == [1, 0]


def test_smaller_micro_batches_keep_the_batch_and_end_at_one_sample(tmp_path: Path) -> None:
    run = new_run(tmp_path, launch={"on_out_of_memory": "smaller"})
    sizes = []
    while ending(run, "out_of_memory", step=1).retry:
        config = read_config(run)
        sizes.append((config.micro_batch_size, config.train.gradient_accumulation_steps))
        assert config.train.global_batch_size == 8
    assert sizes == [(2, 2), (1, 4)]


def test_steps_that_are_not_finite_are_passed_over_until_the_retries_are_used_up(tmp_path: Path) -> None:
    run = new_run(tmp_path, train={"on_non_finite": "skip"})
    found = [ending(run, "non_finite", step=step) for step in (7, 9, 11)]
    assert [each.retry for each in found] == [1, 2, 0]
    assert found[0].action.startswith("step 7 will be passed over (train.on_non_finite): it starts again")
    assert read_config(run).train.skip_steps == (7, 9)
    assert found[-1].action == "a retry would do the same again"


# -- what a retry waits for


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, in no time."""
    pauses: list[float] = []
    monkeypatch.setattr(readiness.time, "sleep", pauses.append)
    return pauses


def test_a_retry_waits_until_the_disk_takes_a_checkpoint(
    tmp_path: Path, quick: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onward.tasks.attempts.retry_policy.FIRST_DELAY_S", 0.0)
    run = new_run(tmp_path)
    ending(run, "storage")
    answers = iter(["it is full", "it is full", ""])
    monkeypatch.setattr(readiness, "storage_problem", lambda folder, needed: next(answers))
    wait_until_ready(run)
    assert quick == [0, 2, 2]
    assert "it is full: waiting up to 600 s for that to change" in caplog.text


def test_a_disk_that_stays_full_ends_the_run_with_the_numbers(
    tmp_path: Path, quick: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "STORAGE_WAIT_S", 0.0)
    run = new_run(tmp_path)
    save(run, 20)
    (run.checkpoint(20) / "rank-00000.safetensors").touch()
    with (run.checkpoint(20) / "rank-00000.safetensors").open("r+b") as file:
        file.truncate(1 << 43)  # sparse
    ending(run, "storage", checkpoint=20)
    numbers = r"bytes free of the 8,79\d,\d+,\d+,\d+ that are needed; make room .*waited for 0 s"
    with pytest.raises(StorageUnavailable, match=numbers):
        wait_until_ready(run)
    assert "cannot be written" in storage_problem(Path("/proc"))


@pytest.mark.parametrize(("number", "kind"), [(28, "storage"), (13, "unknown")])
def test_a_job_that_cannot_be_written_down_is_not_taken_for_one_that_was_stopped(
    tmp_path: Path, number: int, kind: EndingKind
) -> None:
    run = new_run(tmp_path)
    attempt = Attempt.begin(run, read_config(run))
    error = OSError(number, os.strerror(number), "job.json")
    with pytest.raises(OSError, match=r"job\.json"), attempt.recorded_if_interrupted():
        raise error
    (found,) = endings(run)
    assert (found.kind, found.retry) == (kind, 0)
    why = "No space left on device: the disk of job.json" if number == 28 else f"[Errno {number}]"
    assert f"the job could not be started: {why}" in found.sentence


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Hosts that do not answer."""
    down: set[str] = set()
    monkeypatch.setattr(
        readiness, "unready_hosts", lambda run, hosts: {host: "No route to host" for host in hosts if host in down}
    )
    return down


def hosts_run(folder: Path, **launch: Any) -> RunDir:
    (folder / "hosts").write_text("h0 slots=2\nh1 slots=2  # the second\n")
    run = new_run(folder, parallel={"data": 4}, launch={"hostfile": str(folder / "hosts")} | launch)
    ending(run, "host_lost")
    return run


def test_a_run_waits_for_a_host_that_does_not_answer_and_then_ends(
    tmp_path: Path, silent: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hosts_run(tmp_path, host_wait_s=0.3)
    silent.add("h1")
    monkeypatch.setattr(readiness, "HOST_POLL_S", 0.05)
    began_at = time.monotonic()
    said = r"1 host does not answer: h1 \(No route to host\); waited for 0.3 s \(launch.host_wait_s\); bring them back"
    with pytest.raises(RuntimeUnavailable, match=said):
        wait_until_ready(run)
    assert 0.3 < time.monotonic() - began_at < 20


def test_a_host_that_is_back_or_is_taken_out_of_the_file_is_not_waited_for(
    tmp_path: Path, silent: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = hosts_run(tmp_path)
    silent.add("h1")
    monkeypatch.setattr("onward.tasks.attempts.retry_policy.FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(readiness.time, "sleep", lambda pause_s: pause_s and silent.clear())
    ending(run, "host_lost")
    wait_until_ready(run)
    assert caplog.text.count("h1 (No route to host); waiting up to 600 s (launch.host_wait_s)") == 1
    assert not run.adjusted.exists()
    silent.add("h1")
    monkeypatch.setattr(
        readiness.time, "sleep", lambda pause_s: pause_s and (tmp_path / "hosts").write_text("h0 slots=3\n")
    )
    with pytest.raises(RuntimeUnavailable, match=r"hosts has 3 slots, and the run has 4 ranks; .* take no layout"):
        wait_until_ready(run)


def test_a_run_that_may_goes_on_with_the_hosts_that_answer_and_takes_the_others_back(
    tmp_path: Path, quick: list[float], silent: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = hosts_run(tmp_path, on_host_lost="fewer")
    silent.add("h1")
    wait_until_ready(run)
    config = read_config(run)
    assert (config.world_size, config.micro_batch_size, config.train.gradient_accumulation_steps) == (2, 2, 2)
    assert Path(config.launch.hostfile).read_text() == "h0 slots=2\n"
    assert quick == [pytest.approx(0.5, abs=0.5)], "without a further pause"
    layout = "2 of 4 replicas, each with 2 micro-batches of 2 samples in a step on h0 (launch.on_host_lost)"
    assert f"going on with {layout}" in caplog.text
    silent.clear()
    caplog.clear()
    wait_until_ready(run)
    assert read_config(run) == read_config(
        new_run(
            tmp_path,
            parallel={"data": 4},
            launch=dict(config.launch) | {"num_ranks": 0, "hostfile": str(tmp_path / "hosts")},
        )
    )
    assert adjustments(run).data == 0


def test_hosts_that_were_silent_at_the_end_of_an_attempt_are_not_asked_again(
    tmp_path: Path, quick: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host without power answers nothing for 10 s."""
    run = hosts_run(tmp_path, on_host_lost="fewer")
    ending(run, "host_lost", silent_hosts={"h1": "Connection timed out"})
    asked: list[str] = []
    monkeypatch.setattr(readiness, "unready_hosts", lambda run, hosts: asked.extend(hosts) or {})
    wait_until_ready(run)
    assert (asked, read_config(run).world_size) == (["h0"], 2)
    monkeypatch.setattr(readiness, "KNOWN_S", -1.0)
    wait_until_ready(run)
    assert (asked, read_config(run).world_size) == (["h0", "h0", "h1"], 4)


def test_hosts_that_take_no_layout_end_the_run_with_the_numbers(
    tmp_path: Path, quick: list[float], silent: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # which opens the model, and finds nothing either
    monkeypatch.setattr("onward.tasks.attempts.layout_for_hosts._other_layout", lambda *_: None)
    (tmp_path / "hosts").write_text("h0 slots=1\nh1 slots=1\n")
    run = new_run(
        tmp_path,
        train={"gradient_accumulation_steps": 2},
        parallel={"data": 1, "pipeline": 2},
        launch={"hostfile": str(tmp_path / "hosts"), "on_host_lost": "fewer"},
    )
    ending(run, "host_lost")
    silent.add("h1")
    with pytest.raises(RuntimeUnavailable, match=r"the 1 slots that are left take no layout .* it needs 2 ranks"):
        wait_until_ready(run)
