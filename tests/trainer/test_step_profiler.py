"""Where the time of chosen steps goes, by node of the ONNX file; and that profiling changes no bit. Real ranks."""

from __future__ import annotations

import csv
import gzip
import json
import signal
from pathlib import Path
from typing import Any

import onnx
import pytest

from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.recorded.step_profile import (
    COLUMNS,
    StepProfile,
    other_rows,
    read_profiles,
    record_of,
    slowest_nodes,
    trace_of,
)
from tests.support.graphs import tiny_conv_net, tiny_conv_net_with_batch_norm, tiny_transformer
from tests.support.runs import (
    Array,
    assert_equal_bits,
    events,
    final_tensors,
    make_run,
    start_attempt,
    tiny_images,
    tiny_text,
    train_run,
    train_until,
)

pytestmark = pytest.mark.mpi
STEPS, FIRST, LAST = 5, 3, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "replicas": {"parallel": {"data": 2}},
    "stages": {"parallel": {"pipeline": 2}},
    "tensor, recomputed": {"parallel": {"tensor": 2}, "recompute": {"mode": "whole"}},
    "ZeRO 3, recomputed": {"parallel": {"data": 2, "zero": 3}, "recompute": {"mode": "selective"}},
    "interleaved": {"parallel": {"pipeline": 2, "stages_per_rank": 2, "schedule": "interleaved"}},
    "fp16": {"precision": {"compute": "fp16"}},
}
LONG = ("ZeRO 3, recomputed", "interleaved", "fp16")


def a_run(folder: Path, proto: onnx.ModelProto, columns: dict[str, Array], /, **sections: Any) -> RunDir:
    train = {"global_batch_size": 16, "gradient_accumulation_steps": 2, "num_steps": STEPS}
    return make_run(folder, proto, columns, **{"train": train} | sections)


def both(folder: Path, proto: onnx.ModelProto, columns: dict[str, Array], /, **sections: Any) -> RunDir:
    """Train with and without a profile, compare every bit, and return the profiled run."""
    plain = a_run(folder / "plain", proto, columns, **sections)
    train_run(plain)
    assert not plain.profile.exists()
    run = a_run(folder / "profiled", proto, columns, **sections, monitor={"profile_steps": [FIRST, LAST]})
    train_run(run)
    assert_equal_bits(final_tensors(run), final_tensors(plain))
    return run


def check_table(profile: StepProfile, proto: onnx.ModelProto) -> dict[str, Any]:
    """Check what holds for every rank; return its rows by name."""
    operators = {node.name: node.op_type for node in proto.graph.node}
    nodes = {row.name: row for row in profile.rows if row.kind == "node"}
    assert nodes.keys() <= operators.keys()
    for row in nodes.values():
        own = row.operator.split(" + ")
        assert own[-1] == operators[row.name]
        assert sorted(own[:-1]) == sorted(operators[name] for name in row.fused)
        assert row.ms == pytest.approx(row.forward_ms + row.backward_ms)
    rows = {row.name: row for row in profile.rows}
    assert len(rows) == len(profile.rows)
    assert sum(row.share for row in profile.rows) == pytest.approx(1.0)
    # the rows are from the profiler's events; the step is measured by another clock
    assert sum(row.ms for row in profile.rows) == pytest.approx(profile.step_ms, rel=0.05)
    assert [row.ms for row in profile.rows] == sorted((row.ms for row in profile.rows), reverse=True)
    assert {"loss", "data wait", "gradient reduction", "optimizer", "other", "between nodes"} <= rows.keys()
    assert all(rows[name].ms > 0 for name in ("data wait", "gradient reduction", "optimizer", "other"))
    return rows


def check_files(run: RunDir, profile: StepProfile) -> None:
    """The table and the trace say the same as the record."""
    path = record_of(run, profile.rank).with_suffix(".csv")
    with path.open() as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == COLUMNS
    assert [(row["name"], float(row["ms"])) for row in table] == [
        (row.name, pytest.approx(row.ms, abs=1e-5)) for row in profile.rows
    ]
    with gzip.open(trace_of(run, profile.rank)) as file:
        trace = json.load(file)["traceEvents"]
    ranges = {event["name"] for event in trace if event.get("ph") == "X"}
    assert {f"step {step}" for step in range(FIRST, LAST + 1)} <= ranges
    assert f"step {FIRST - 1}" not in ranges
    assert {row.name for row in profile.rows if row.kind == "node" and row.forward_ms} <= ranges
    backward = {row.name for row in profile.rows if row.kind == "node" and row.backward_ms}
    named = {name for name in ranges if name.endswith((" (backward)", " (recomputed)"))}
    is_recomputed = read_config(run).recompute.mode != "none"
    assert any(name.endswith(" (recomputed)") for name in ranges) == is_recomputed
    assert {name.rpartition(" (")[0] for name in named} >= backward


def test_most_of_a_step_of_a_conv_net_is_attributed_to_the_nodes_of_its_file(tmp_path: Path) -> None:
    proto = tiny_conv_net(image_size=128)
    run = both(tmp_path, proto, tiny_images(60, size=128))
    (profile,) = read_profiles(run)
    rows = check_table(profile, proto)
    check_files(run, profile)
    nodes = [row for row in profile.rows if row.kind == "node"]
    assert {row.name for row in nodes} == {node.name for node in proto.graph.node}
    assert all(row.calls == 2 for row in nodes)
    assert sum(row.share for row in nodes) > 0.5
    convolutions = [row for row in nodes if row.operator == "Conv"]
    assert all(row.forward_ms > 0 and row.backward_ms > 0 for row in nodes if row.operator != "Flatten")
    assert rows[convolutions[0].name].output_bytes in (8 * 8 * 128 * 128 * 4, 8 * 8 * 64 * 64 * 4), "of a micro-batch"
    assert rows["loss"].forward_ms > 0
    assert rows["loss"].backward_ms > 0
    log = run.log(1).read_text()
    assert f"profiled step {FIRST} to {LAST}: " in log
    slowest = slowest_nodes([profile])
    assert len(slowest) == min(10, len(nodes))
    assert log.count(f"% {slowest[0].name} ({slowest[0].operator}): forward ") == 1
    record = json.loads(record_of(run, 0).read_text())
    assert (record["first_step"], record["last_step"], record["attempt"]) == (FIRST, LAST, 1)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in LAYOUTS if name != "one rank"],
)
def test_every_rank_has_the_nodes_that_it_computes_and_the_bits_are_the_same(tmp_path: Path, layout: str) -> None:
    is_conv = layout in ("replicas", "fp16")
    proto = tiny_conv_net_with_batch_norm() if is_conv else tiny_transformer()
    run = both(tmp_path, proto, tiny_images(60) if is_conv else tiny_text(60), **LAYOUTS[layout])
    profiles = read_profiles(run)
    assert [each.rank for each in profiles] == [*range(len(profiles))]
    found = []
    for profile in profiles:
        check_table(profile, proto)
        check_files(run, profile)
        assert (profile.first_step, profile.last_step) == (FIRST, LAST)
        found.append({row.name for row in profile.rows if row.kind == "node"})
        assert all(row.calls == 2 for row in profile.rows if row.kind == "node")
    if layout in ("stages", "interleaved"):
        assert not found[0] & found[1] - {"Shape_0"}, "each node is in one stage"
        assert [each.stage for each in profiles] == [0, 1]
    elif len(found) == 2:
        assert found[0] == found[1], "both ranks compute every node"
    names = {row.name for row in slowest_nodes(profiles, 1000)}
    assert names == set.union(*found)
    assert len([row for row in slowest_nodes(profiles, 1000) if row.operator.endswith("LayerNormalization")]) == (
        0 if is_conv else 5
    )
    assert "gathering weights" in {row.name for row in other_rows(profiles)} or "ZeRO" not in layout


@pytest.mark.slow
def test_a_step_that_is_tried_again_at_another_loss_scale_counts_as_another_one(tmp_path: Path) -> None:
    precision = {"compute": "fp16", "loss_scale": ("dynamic", 2.0**24)}
    run = a_run(tmp_path, tiny_conv_net(), tiny_images(60), precision=precision, monitor={"profile_steps": [1, 2]})
    train_run(run)
    overflows = [event for event in events(run, "scalars") if event.values.get("train/skipped")]
    assert overflows, "in step 1"
    (profile,) = read_profiles(run)
    assert (profile.first_step, profile.last_step) == (1, 2)
    assert sum(row.ms for row in profile.rows) == pytest.approx(profile.step_ms, rel=0.05)
    assert {row.calls for row in profile.rows if row.kind == "node"} == {2}


@pytest.mark.slow
def test_compiled_steps_have_a_trace_and_a_sentence_in_place_of_nodes(tmp_path: Path) -> None:
    run = both(tmp_path, tiny_conv_net(), tiny_images(60), graph={"compile": True})
    (profile,) = read_profiles(run)
    assert {row.kind for row in profile.rows} == {"other"}
    assert sum(row.ms for row in profile.rows) == pytest.approx(profile.step_ms, rel=0.05)
    assert profile.note.startswith("graph.compile fuses the nodes into other kernels")
    assert profile.note in run.log(1).read_text()
    assert trace_of(run, 0).stat().st_size == profile.trace_bytes > 0


@pytest.mark.slow
def test_an_attempt_that_resumes_within_the_steps_profiles_the_rest_of_them(tmp_path: Path) -> None:
    train = {"global_batch_size": 16, "num_steps": 60}
    monitor = {"profile_steps": [3, 50]}
    run = a_run(tmp_path, tiny_conv_net(image_size=128), tiny_images(60, size=128), train=train, monitor=monitor)
    train_until(run, lambda event: event.step >= 5, signal.SIGUSR1, rank=0)
    (first,) = read_profiles(run)
    assert (first.attempt, first.first_step) == (1, 3)
    assert 5 <= first.last_step < 50, "it was stopped, and has left what it had"
    train_run(run)
    (second,) = read_profiles(run)
    assert (second.attempt, second.first_step, second.last_step) == (2, first.last_step + 1, 50)


def test_steps_that_the_run_does_not_have_are_refused_by_the_ranks_where_epochs_decide(tmp_path: Path) -> None:
    train = {"global_batch_size": 16, "num_steps": 0, "num_epochs": 1.0}
    run = a_run(tmp_path, tiny_conv_net(), tiny_images(60), train=train, monitor={"profile_steps": [2, 9]})
    assert start_attempt(run).wait(120) != 0
    error = run.first_error(1)
    assert error is not None
    assert error.cause == "ConfigError: monitor.profile_steps [2, 9]: the run has 3 steps; choose some of these"
