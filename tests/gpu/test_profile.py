"""Profiled steps on the device: the kernels count for the nodes that launch them, and the rows add up to the step."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from onward.trainer.run.recorded.step_profile import read_profiles, trace_of
from tests.gpu import ranks
from tests.gpu.device import DEVICE, REASON, REHEARSAL, available
from tests.support import graphs
from tests.support.runs import assert_equal_bits, final_tensors, make_run, tiny_images

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason=REASON)]

Record = Callable[[str, object], None]
SIZE = 16 if REHEARSAL else 128


def test_kernels_count_for_the_nodes_that_launch_them(tmp_path: Path, record_property: Record) -> None:
    proto = graphs.tiny_conv_net(image_size=SIZE)
    train = {"num_steps": 6, "global_batch_size": 16, "deterministic": True}
    runs = [
        make_run(
            tmp_path / name, proto, tiny_images(40, size=SIZE), train=train, launch={"device": DEVICE.type}, **more
        )
        for name, more in (("plain", {}), ("profiled", {"monitor": {"profile_steps": [4, 5]}}))
    ]
    for run in runs:
        ranks.train(run)
    assert_equal_bits(*(final_tensors(run) for run in runs))
    (profile,) = read_profiles(runs[1])
    rows = {row.name: row for row in profile.rows}
    record_property("step_ms", round(profile.step_ms, 3))
    record_property("ms", {name: round(row.ms, 3) for name, row in rows.items()})
    assert sum(row.ms for row in profile.rows) == pytest.approx(profile.step_ms, rel=0.05)
    convolutions = [row for row in profile.rows if row.operator == "Conv"]
    assert len(convolutions) == 2
    assert all(row.forward_ms > 0 and row.backward_ms > 0 for row in convolutions)
    assert rows["optimizer"].ms > 0
    assert ("device idle" in rows) == (DEVICE.type == "cuda")
    with gzip.open(trace_of(runs[1], 0)) as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert ("kernel" in kinds) == (DEVICE.type == "cuda")
