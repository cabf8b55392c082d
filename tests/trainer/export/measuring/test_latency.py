"""Times are processor times in turns: other programs do not change them, and noise is no figure."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onward.trainer.export.measuring import helper_nodes
from onward.trainer.export.measuring import latency as module
from onward.trainer.export.measuring.helper_nodes import costly_helpers, without_helpers
from onward.trainer.export.measuring.latency import latency_ratio
from onward.trainer.export.model_file import ModelFile
from tests.support.graphs import with_helpers


class Busy:
    """A session that computes for so many microseconds by a clock of its own."""

    def __init__(self, clock: list[float], *microseconds: float) -> None:
        self._clock, self._next = clock, cycle(microseconds)

    def run(self, _: None, feed: Mapping[str, Any]) -> None:
        self._clock[0] += next(self._next) * 1e-6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    return now


def test_the_median_of_the_ratios_of_pairs_is_told(clock: list[float]) -> None:
    assert latency_ratio([Busy(clock, 10), Busy(clock, 14)], [{}, {}]) == pytest.approx(1.4)
    # a tenth of all runs meets another program's memory
    disturbed = Busy(clock, *[14.0] * 9, 90.0)
    assert 1.4 <= latency_ratio([Busy(clock, 10), disturbed], [{}, {}]) < 2.5


def test_ratios_that_do_not_agree_are_no_figure(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TIMES", 1)
    assert math.isnan(latency_ratio([Busy(clock, 10), Busy(clock, 5, 10, 20, 40)], [{}, {}]))


def test_what_another_thread_computes_is_not_counted() -> None:
    def spin(until_s: float) -> None:
        began_at = time.thread_time()
        while time.thread_time() - began_at < until_s:
            pass

    class Spins:
        def __init__(self, until_s: float) -> None:
            self._until_s = until_s

        def run(self, _: None, feed: Mapping[str, Any]) -> None:
            time.sleep(self._until_s)  # as where the processor is another program's
            spin(self._until_s)

    assert latency_ratio([Spins(0.002), Spins(0.004)], [{}, {}]) == pytest.approx(2.0, rel=0.2)


def test_helper_nodes_are_counted_by_kind_and_the_file_without_them_computes_the_same(tmp_path: Path) -> None:
    onnx.save(with_helpers(6), tmp_path / "model.onnx")
    file, feed = ModelFile.read(tmp_path / "model.onnx"), {"x": np.ones((2, 64), np.float32)}
    plain = without_helpers(file, tmp_path)
    assert plain is not None
    left = {node.op_type for node in plain.proto.graph.node}
    assert "CastLike" not in left
    one, two = (onnxruntime.InferenceSession(each.path).run(None, feed)[0] for each in (file, plain))
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_what_costs_more_than_a_tenth_is_told_with_its_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(with_helpers(6), tmp_path / "model.onnx")
    monkeypatch.setattr(helper_nodes, "latency_ratio", lambda *_: 0.62)
    found = costly_helpers(ModelFile.read(tmp_path / "model.onnx"), {"x": np.ones((2, 64), np.float32)})
    assert found is not None
    assert str(found) == (
        f"{found.count} nodes only compute constants and shapes ({found.kinds}): without them the file runs in 62% of "
        "its time"
    )
    assert found.kinds.startswith("6 CastLike")


def test_a_file_without_helper_nodes_has_none(tmp_path: Path) -> None:
    model = with_helpers(1)
    del model.graph.node[1:4]
    model.graph.node[1].input[0] = "p0"
    del model.graph.initializer[1:]
    onnx.save(model, tmp_path / "model.onnx")
    assert costly_helpers(ModelFile.read(tmp_path / "model.onnx"), {"x": np.ones((2, 64), np.float32)}) is None
