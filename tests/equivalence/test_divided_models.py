"""Promise 3 for graphs whose regions go through joined, repeated, gathered and stacked values, by the loop itself:
checkpoints, ZeRO, stages, and the file that comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.equivalence.layouts import ALONE, MODELS, TOLERANCE, Case, differences, trained
from tests.equivalence.test_layouts import assert_exported_alike
from tests.support.runs import Array
from tests.trainer.parallel.tensor.test_joined_and_stacked import GRAPHS

NAMES = (
    "disentangled attention",
    "latent attention",
    "stacked experts",
    "stacked experts, transposed",
    "joined with its input",
    "equal biases",
    "cross attention",
    "einsum attention",
    "einsum experts",
    "upsampled to lengths",
    "depthwise and pointwise",
)
DIVIDED = ("tp2", 0), ("tp3", 0), ("dp2 x tp2", 3), ("2x2x2", 1)


def classifier(name: str) -> onnx.ModelProto:
    """One of these graphs with a head over the mean of its positions: `x` -> `logits` [batch, 5]."""
    model = GRAPHS[name]()
    graph, random = model.graph, np.random.default_rng(1)
    output = graph.output.pop()
    rank = len(output.type.tensor_type.shape.dim)
    positions = [1] if rank == 3 else [2, 3]
    features = 4 if name.startswith("upsampled") else 8
    head = numpy_helper.from_array(random.normal(size=(features, 5)).astype(np.float32), "head")
    graph.initializer.append(head)
    pooled = output.name
    if rank > 2:
        graph.initializer.append(numpy_helper.from_array(np.array(positions), "pooled_dims"))
        pooled = "pooled"
        graph.node.append(helper.make_node("ReduceMean", [output.name, "pooled_dims"], [pooled], keepdims=0))
    graph.node.append(helper.make_node("MatMul", [pooled, "head"], ["logits"]))
    graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 5]))
    onnx.checker.check_model(model, full_check=True)
    return model


def rows_of(name: str) -> Callable[[int], dict[str, Array]]:
    dims = [dim.dim_value for dim in GRAPHS[name]().graph.input[0].type.tensor_type.shape.dim][1:]

    def columns(rows: int) -> dict[str, Array]:
        random = np.random.default_rng(0)
        return {"x": random.normal(size=(rows, *dims)).astype(np.float32), "label": random.integers(0, 5, rows)}

    return columns


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_tensor_parallelism_divides_trains_as_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setitem(MODELS, name, (lambda name=name: classifier(name), rows_of(name)))
    cases = [Case(name, *layout) for name in NAMES for layout in DIVIDED]
    runs = trained([*cases, *(Case(name, ALONE) for name in NAMES)], tmp_path)
    found = {case.name: differences(runs[case], runs[Case(case.model, ALONE)]) for case in cases}
    assert {name: each for name, each in found.items() if max(each.values()) > TOLERANCE} == {}
    assert_exported_alike(runs, cases)
