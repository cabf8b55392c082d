"""A loss or gradient that is not finite is traced to the node that made it, and to the row. Real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer import loop
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import Diverged
from onward.trainer.events import Heartbeat
from onward.trainer.run.directory import RunDir, read_config
from tests.support.quotes import assert_quoted
from tests.support.ranks import run_ranks
from tests.support.runs import Array, events, make_run

pytestmark = pytest.mark.mpi

ROWS = 80
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "data": {"parallel": {"data": 2}},
    "tensor": {"parallel": {"tensor": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "gpipe": {"parallel": {"pipeline": 2, "schedule": "gpipe"}},
    "ZeRO 1": {"parallel": {"data": 2, "zero": 1}},
    "ZeRO 2": {"parallel": {"data": 2, "zero": 2}},
    "ZeRO 3": {"parallel": {"data": 2, "zero": 3}},
    "bf16": {"precision": {"compute": "bf16"}},
    "fp16": {"precision": {"compute": "fp16"}},
    "recomputed": {"recompute": {"mode": "whole"}},
    "compiled": {"graph": {"compile": True}},
    "compiled ZeRO": {"graph": {"compile": True}, "parallel": {"data": 2, "zero": 2}},
}


def model(operator: str = "Relu") -> onnx.ModelProto:
    """x -> fc1 -> operator -> fc2 -> y."""
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(random.normal(0, 0.3, shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="fc1"),
        helper.make_node(operator, ["h"], ["a"], name="between"),
        helper.make_node("Gemm", ["a", "w2", "b2"], ["y"], name="fc2"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [weight("w1", 4, 8), weight("b1", 8), weight("w2", 8, 3), weight("b2", 3)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def columns() -> dict[str, Array]:
    random = np.random.default_rng(1)
    return {"x": random.normal(0, 1, (ROWS, 4)).astype(np.float32), "label": random.integers(0, 3, ROWS)}


def a_run(folder: Path, proto: onnx.ModelProto, data: dict[str, Array], /, **sections: Any) -> RunDir:
    train = {"global_batch_size": 8, "gradient_accumulation_steps": 2, "num_steps": 12, "clip_norm": 0.0}
    optimizer = {"name": "sgd", "learning_rate": 0.1, **sections.pop("optimizer", {})}
    loss = {"name": "cross_entropy", "label": "label"}
    return make_run(folder, proto, data, **{"train": train, "optimizer": optimizer, "loss": loss, **sections})


def message(run: RunDir, lost: str = "") -> str:
    """What training says when it diverges; the same on all ranks. lost: a file that is gone by then."""
    size = read_config(run).world_size
    found = run_ranks(size, "tests.trainer.test_bad_values:diverge", str(run.root), lost, timeout_s=300)
    assert found == found[:1] * size
    return str(found[0])


def diverge(mpi: MPIContext, root: str, lost: str) -> str:
    """Train until it diverges; the replay must leave weights and statistics as they were."""
    run, held = RunDir(Path(root)), []
    build, explain = loop.build_rank_model, loop.BadValues.explain_step

    def kept(*args: Any, **options: Any) -> Any:
        held.append(build(*args, **options))
        return held[0]

    def state() -> list[torch.Tensor]:
        return [weight.tensor.detach().clone() for weight in held[0].reducer.weights] + [torch.get_rng_state()]

    def compared(self: Any, *args: Any, **options: Any) -> str:
        before = state()
        if lost and mpi.rank == 0:
            Path(lost).unlink()
        told = explain(self, *args, **options)
        after = state()
        assert all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in zip(before, after, strict=True))
        return told

    if mpi.rank == 0:
        run.begin_attempt()
    torch.distributed.barrier()
    loop.build_rank_model, loop.BadValues.explain_step = kept, compared  # type: ignore[method-assign]
    try:
        with pytest.raises(Diverged) as diverged:
            loop.train(run, mpi, attempt=1, heartbeat=Heartbeat(run.heartbeat), stop_requested=lambda: False)
    finally:
        loop.build_rank_model, loop.BadValues.explain_step = build, explain  # type: ignore[method-assign]
    return str(diverged.value)


@pytest.mark.parametrize(
    "layout", [name if name == "data" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_the_row_whose_logarithm_is_not_finite_is_named_among_many_with_its_node(tmp_path: Path, layout: str) -> None:
    """h is positive but for one row, of which every value is negative."""
    data, proto = columns(), model("Log")
    for tensor in proto.graph.initializer:
        if tensor.name in ("w1", "b1"):
            value = np.full(tuple(tensor.dims), 0.5, np.float32)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    data["x"] = np.abs(data["x"]) + 0.1
    data["x"][20] = -3.0
    sections = {"optimizer": {"learning_rate": 1e-3}, **LAYOUTS[layout]}
    told = message(a_run(tmp_path, proto, data, data={"evaluation_fraction": 0.1}, **sections))
    assert "the first bad value of the forward pass is in node 'between' (Log), output 'a': " in told
    assert re.search(r"It is bad for 1 of \d samples: row \d+ of the training data \(\S+data\.npz, row 21\)", told), (
        told
    )
    assert re.search(r"Its inputs: h \[\d, \d\]: -5", told), told
    assert "The weights have grown" not in told
    if layout == "data":
        assert_quoted(told, "Replayed, the first bad value")


def test_a_huge_row_is_named_also_where_it_has_ruined_the_weights_before(tmp_path: Path) -> None:
    data = columns()
    data["x"][20], data["label"][20] = 3e38, (data["label"][20] + 1) % 3
    told = message(a_run(tmp_path, model("LeakyRelu"), data, data={"evaluation_fraction": 0.1}))
    assert "The weights have grown: the largest magnitude in " in told
    assert re.search(r"row \d+ of the training data \(\S+data\.npz, row 21\) has 3e\+38 in column 'x'", told), told
    assert_quoted(told, "In that step row ")


def test_without_the_file_of_the_model_the_end_is_still_that_of_a_bad_value(tmp_path: Path) -> None:
    data = columns()
    data["x"] = -np.abs(data["x"])
    run = a_run(tmp_path, model("Log"), data, parallel={"data": 2})
    told = message(run, str(read_config(run).model.path))
    assert re.search(r"The findings of the replay could not be described: \w+: .*model", told), told


def test_a_learning_rate_that_ruins_the_weights_is_not_blamed_on_a_row(tmp_path: Path) -> None:
    told = message(a_run(tmp_path, model(), columns(), optimizer={"learning_rate": 1e30}))
    assert re.search(r"The weights have grown: .* after step 0 and is \S+ now; .* in step 1\.", told), told
    assert "The updates are the cause, and not a row of the data" in told
    assert "of the training data" not in told
    assert_quoted(told, "The weights have grown")


def test_a_bad_gradient_is_traced_to_the_node_whose_backward_pass_makes_it(tmp_path: Path) -> None:
    """The square root of 0 is 0, and its derivative infinite."""
    proto = model("Sqrt")
    for tensor in proto.graph.initializer:
        if tensor.name in ("w1", "b1"):
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(tuple(tensor.dims), np.float32), tensor.name))
    told = message(a_run(tmp_path, proto, columns()))
    assert "the forward pass is finite; the backward pass of node 'between' (Sqrt), output 'a' makes the first" in told


def test_an_evaluation_loss_that_is_not_finite_is_explained_once_and_training_goes_on(tmp_path: Path) -> None:
    data, proto = columns(), model("Log")
    for tensor in proto.graph.initializer:
        if tensor.name in ("w1", "b1"):
            value = np.full(tuple(tensor.dims), 0.5, np.float32)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    data["x"] = np.abs(data["x"]) + 0.1
    held_out = {name: values[:6].copy() for name, values in data.items()}
    held_out["x"][3] = -3.0
    np.savez(tmp_path / "held.npz", **held_out)
    settings = {"evaluation_fraction": 0.0, "evaluation_source": str(tmp_path / "held.npz")}
    run = a_run(tmp_path, proto, data, data=settings, optimizer={"learning_rate": 1e-3}, parallel={"data": 2})
    run_ranks(2, "tests.equivalence.layouts:train_all", [str(run.root)])
    told = [event.text for event in events(run, "bad_values")]
    assert len(told) == 1
    assert "node 'between' (Log), output 'a'" in told[0]
    assert re.search(r"row \d of the evaluation data \(\S+held\.npz, row 4\)", told[0]), told[0]
    assert events(run, "end")[0].status == "done"
