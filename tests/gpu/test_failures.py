"""What goes wrong on the device ends the job in time, with a record that names the cause."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onward.trainer.errors import ConfigError
from onward.trainer.parallel.observing.memory_snapshot import snapshot_path
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RankError
from tests.gpu import ranks
from tests.gpu.device import DEVICE, REASON, REHEARSAL, available
from tests.support import graphs
from tests.support.runs import make_run, tiny_images, tiny_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason=REASON)]

Record = Callable[[str, object], None]
LAUNCH = {"device": DEVICE.type}


def failed(run: RunDir, record: Record, *, timeout_s: float = 200) -> RankError:
    """The first error of an attempt that must fail; its class, message and exit statuses are recorded."""
    _, processes = ranks.start(run)
    started_at = time.monotonic()
    statuses = ranks.wait(processes, timeout_s)
    assert not run.result(1).exists()
    error = run.first_error(1)
    record("exit_status", statuses)
    record("ended_after_s", round(time.monotonic() - started_at, 1))
    assert error is not None, f"{statuses}, no record:\n{run.log(1).read_text(errors='replace')[-4000:]}"
    record("cause", error.cause[:500])
    record("step", error.step)
    assert not error.secondary
    assert all(status not in (0, ranks.STOPPED) for status in statuses)
    return error


def test_out_of_memory_leaves_a_record_that_says_so(
    tmp_path: Path, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    if REHEARSAL:
        pytest.skip("torch cannot limit the memory of the CPU")
    monkeypatch.setenv(ranks.MEMORY_LIMIT, str(256 << 20))
    train = {"num_steps": 2, "global_batch_size": 8192}
    build = graphs.tiny_transformer(vocab_size=512, width=64)
    monitor = {"memory_snapshot": True}
    run = make_run(tmp_path, build, tiny_text(10240, vocabulary=512), train=train, launch=LAUNCH, monitor=monitor)
    error = failed(run, record_property)
    assert "out of memory" in error.cause
    path = snapshot_path(run, 1, 0)
    assert error.cause.endswith(f"What was in the memory of the rank is in {path}")
    assert path.stat().st_size > 0


def test_a_killed_rank_ends_the_others_within_their_limit(tmp_path: Path, record_property: Record) -> None:
    run = make_run(
        tmp_path,
        graphs.tiny_transformer(),
        tiny_text(40),
        train={"num_steps": 100_000, "global_batch_size": 8},
        parallel={"data": 2},
        launch=LAUNCH | {"heartbeat_timeout_s": 30},
    )
    started_at = time.monotonic()
    ranks.train_until(run, lambda event: event.step >= 3, signal.SIGKILL, rank=1)
    record_property("ended_after_s", round(time.monotonic() - started_at, 1))
    error = run.first_error(1)
    assert error is not None, run.log(1).read_text(errors="replace")[-4000:]
    record_property("cause", error.cause[:500])
    assert (error.rank, error.secondary) == (0, True)


def test_a_label_out_of_range_is_refused_by_the_data_and_named_by_the_rank(
    tmp_path: Path, record_property: Record
) -> None:
    sections = {"train": {"num_steps": 2, "global_batch_size": 8}, "launch": LAUNCH}
    with pytest.raises(ConfigError) as refusal:
        make_run(tmp_path / "refused", graphs.tiny_conv_net(num_classes=4), tiny_images(40, classes=8), **sections)
    record_property("refusal", str(refusal.value))
    columns = tiny_images(40) | {"label": np.arange(40) % 8}
    run = make_run(tmp_path / "asserted", graphs.tiny_conv_net(num_classes=8), columns, **sections)
    # the check of the data is past; a file with fewer classes takes the place of the one that it was made for
    (tmp_path / "asserted" / "model.onnx").write_bytes(graphs.tiny_conv_net(num_classes=4).SerializeToString())
    error = failed(run, record_property)
    assert "are not classes: the output that the loss reads has 4 of them" in error.cause


def test_a_token_id_out_of_range_is_named_by_the_rank(tmp_path: Path, record_property: Record) -> None:
    """On a GPU by a device-side assert, which comes long after the kernel was started."""
    sections = {"train": {"num_steps": 2, "global_batch_size": 8}, "launch": LAUNCH}
    run = make_run(tmp_path, graphs.tiny_transformer(vocab_size=32), tiny_text(40, vocabulary=32), **sections)
    (tmp_path / "model.onnx").write_bytes(graphs.tiny_transformer(vocab_size=16).SerializeToString())
    error = failed(run, record_property)
    assert any(word in error.cause for word in ("out of range", "DeviceAssertion"))


def test_a_kernel_that_never_ends_is_ended_by_the_watchdog(
    tmp_path: Path, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a rehearsal the thread waits in the kernel's place."""
    monkeypatch.setenv(ranks.HANG_AT_STEP, "2")
    train = {"num_steps": 4, "global_batch_size": 8}
    run = make_run(tmp_path, graphs.tiny_transformer(), tiny_text(40), train=train, launch=LAUNCH)
    log, processes = ranks.start(run)
    started_at = time.monotonic()
    statuses = ranks.wait(processes, 120)
    record_property("ended_after_s", round(time.monotonic() - started_at, 1))
    record_property("exit_status", statuses)
    said = log.read_text(errors="replace")
    assert not run.result(1).exists()
    assert statuses == [1], said[-4000:]
    traceback = run.traceback(1, 0).read_text(errors="replace")
    assert "Timeout (0:00:03)!" in traceback
    assert "_hang" in traceback  # it names where it waits
