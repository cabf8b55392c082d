"""Files run under onnxruntime; where it cannot run them, as an fp32 copy, row by row, or under onnx.reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile, fp32_copy, in_half_precision
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.lowering import converters
from tests.support import graphs


@dataclass(frozen=True)
class Rows:
    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor | None, ...]
    size: int


def data(*rows: Rows) -> EvaluationData:
    def new_metrics(names: object) -> object:
        raise AssertionError("not asked for")

    return EvaluationData(batches=lambda: rows, new_metrics=new_metrics)  # type: ignore[arg-type]


def one_node(operator: str, *, domain: str = "", opset: int = 20) -> onnx.ModelProto:
    node = helper.make_node(operator, ["x"], ["y"], domain=domain)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    inner = helper.make_graph([node], "one", ends[:1], ends[1:])
    return helper.make_model(inner, opset_imports=opsets, ir_version=10)


def test_a_file_of_a_newer_ir_version_runs_as_a_copy_of_an_older_one() -> None:
    model = one_node("Relu")
    model.ir_version = 15  # onnxruntime 1.32 supports 14
    runner = OnnxRunner(model, data(Rows((torch.randn(3, 4),), (None,), 3)))
    assert runner.compare(to_module(model), batches=1, tolerance=1e-6) == []
    assert runner.runtime.startswith("onnxruntime, on a copy of IR version 1")
    assert model.ir_version == 15


@pytest.mark.parametrize("half", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_file_in_half_precision_is_judged_as_its_fp32_copy(half: int, tmp_path: Path) -> None:
    model = graphs.tiny_mlp()
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(half))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = half
    path = tmp_path / "half.onnx"
    path.write_bytes(model.SerializeToString())
    runner = OnnxRunner(ModelFile.read(path), data(Rows((torch.randn(6, 4),), (None,), 6)))
    assert runner.compare(to_module(model), batches=1, tolerance=1e-5) == []
    assert runner.runtime.endswith("fp32 copy of the file")
    assert in_half_precision(onnx.load(path)), "the file itself is untouched"


def test_the_fp32_copy_widens_casts_constants_and_inner_graphs() -> None:
    g = GraphWriter("mixed", opset=20)
    x = g.op("Cast", g.input("x", ("batch", 4)), to=TensorProto.FLOAT16)
    x = g.op("Add", x, g.weight("bias", np.ones(4, np.float16)))
    g.op("Cast", x, to=TensorProto.FLOAT, outputs="y")
    g.output("y", ("batch", 4))
    shadow = fp32_copy(g.model())
    onnx.checker.check_model(shadow, full_check=True)
    assert not in_half_precision(shadow)


def one_row() -> onnx.ModelProto:
    """A Reshape to exactly one row, in the way of every batch."""
    g = GraphWriter("one_row", opset=20)
    g.op("Reshape", g.input("x", ("batch", 4)), g.weight("shape", [1, 4]), outputs="y")
    g.output("y", ("batch", 4))
    return g.model()


class Same(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def test_a_file_that_takes_only_single_rows_runs_row_by_row(caplog: pytest.LogCaptureFixture) -> None:
    runner = OnnxRunner(one_row(), data(Rows((torch.randn(3, 4),), (None,), 3)))
    assert runner.compare(Same(), batches=1, tolerance=1e-6) == []
    assert runner.runtime == "onnxruntime, row by row"
    assert "its batches are not verified" in caplog.text
    (problem,) = runner.compare(torch.nn.ReLU(), batches=1, tolerance=1e-6)
    assert problem.startswith("output 'y', ")


def with_ends(node: onnx.NodeProto, batch: int | str, *ends: onnx.ValueInfoProto) -> onnx.ModelProto:
    """x [batch, 4] -> MatMul, Relu -> y [batch, 3] -> a node -> outputs."""
    weight = numpy_helper.from_array(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 4])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"]), node]
    inner = helper.make_graph(nodes, "g", [x], ends, [weight])
    return helper.make_model(inner, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


Y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)


@pytest.mark.parametrize(
    ("node", "end"),
    [
        (
            helper.make_node("ArgMax", ["y"], ["z"], axis=-1),
            helper.make_tensor_value_info("z", TensorProto.INT64, None),
        ),
        (
            helper.make_node("Cast", ["y"], ["z"], to=TensorProto.BOOL),
            helper.make_tensor_value_info("z", TensorProto.BOOL, None),
        ),
        (helper.make_node("NonZero", ["y"], ["z"]), helper.make_tensor_value_info("z", TensorProto.INT64, None)),
        (helper.make_node("Identity", ["w"], ["z"]), helper.make_tensor_value_info("z", TensorProto.FLOAT, None)),
        (
            helper.make_node("SplitToSequence", ["y"], ["z"], axis=1),
            helper.make_tensor_sequence_value_info("z", TensorProto.FLOAT, None),
        ),
    ],
    ids=["integers", "booleans", "as many as the data says", "a weight", "a sequence"],
)
@pytest.mark.parametrize("others", [(Y,), ()], ids=["beside others", "alone"])
def test_an_output_of_any_kind_is_compared(
    node: onnx.NodeProto, end: onnx.ValueInfoProto, others: tuple[onnx.ValueInfoProto, ...]
) -> None:
    torch.manual_seed(0)  # some rows have outputs near zero, whose relative difference is above the tolerance
    model = with_ends(node, "batch", *others, end)
    runner = OnnxRunner(model, data(Rows((torch.randn(6, 4),), (None,), 6)))
    module = to_module(model).eval()
    assert runner.compare(module, batches=1, tolerance=1e-6) == []
    with torch.no_grad():
        next(iter(module.parameters())).mul_(-1)
    assert runner.compare(module, batches=1, tolerance=1e-6) != []


@pytest.mark.parametrize(
    ("node", "dims"),
    [
        (helper.make_node("ReduceMean", ["y"], ["z"], keepdims=0), []),
        (helper.make_node("Transpose", ["y"], ["z"], perm=[1, 0]), [3, 4]),
    ],
    ids=["its loss", "the batch is not the first axis"],
)
def test_a_file_with_a_fixed_batch_is_compared_on_batches_of_that_size(node: onnx.NodeProto, dims: list[int]) -> None:
    model = with_ends(node, 4, helper.make_tensor_value_info("z", TensorProto.FLOAT, dims))
    runner = OnnxRunner(model, data(*(Rows((torch.randn(size, 4),), (None,), size) for size in (6, 4, 1))))
    assert runner.compare(to_module(model).eval(), batches=3, tolerance=1e-6) == []


def test_a_fixed_batch_is_evaluated_row_for_row_and_repeated_rows_do_not_count() -> None:
    class Seen:
        rows: ClassVar[list[tuple[int, int, int]]] = []

        def update(self, outputs: Sequence[Tensor], labels: Sequence[Tensor], size: int) -> None:
            self.rows.append((len(outputs[0]), len(labels[0]), size))
            assert torch.allclose(outputs[0].squeeze(1), labels[0])

        def compute(self) -> dict[str, float]:
            return {"rows": float(sum(size for *_, size in self.rows))}

    model = one_node("Identity")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value, value.type.tensor_type.shape.dim[1].dim_value = 4, 1
    x = torch.randn(6, 1)
    runner = OnnxRunner(
        model, EvaluationData(batches=lambda: [Rows((x,), (x[:, 0],), 6)], new_metrics=lambda names: Seen())
    )
    assert runner.evaluate() == {"evaluation/rows": 6.0}
    assert Seen.rows == [(4, 4, 4), (2, 2, 2)]


def test_repeated_rows_do_not_count_where_each_row_has_several_results() -> None:
    class Seen:
        results: ClassVar[list[Tensor]] = []

        def update(self, outputs: Sequence[Tensor], labels: Sequence[Tensor | None], size: int) -> None:
            self.results.append(outputs[0])

        def compute(self) -> dict[str, float]:
            return {}

    g = GraphWriter("merged", opset=17)  # [4, 6] -> [4 x 2, 3]
    g.op("Reshape", g.input("x", (4, 6)), g.weight("shape", [8, 3]), outputs="y")
    g.output("y", (8, 3))
    x = torch.randn(5, 6)
    rows = EvaluationData(batches=lambda: [Rows((x,), (None,), 5)], new_metrics=lambda names: Seen())
    OnnxRunner(g.model(), rows).evaluate()
    assert torch.equal(torch.cat(Seen.results), x.reshape(10, 3))


def rotary(width: int = 8) -> onnx.ModelProto:
    """RotaryEmbedding with the cos and sin of one row, as exporters write it: onnxruntime wants those of every row."""
    node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin"], ["y"])
    angles = np.linspace(0, 1, 3 * width // 2, dtype=np.float32).reshape(1, 3, width // 2)
    stored = [numpy_helper.from_array(f(angles), name) for name, f in (("cos", np.cos), ("sin", np.sin))]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2, 3, width]) for name in "xy"]
    inner = helper.make_graph([node], "rotary", ends[:1], ends[1:], stored)
    return helper.make_model(inner, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def test_rotary_embedding_is_verified_row_by_row_and_as_a_batch_by_onnx_reference() -> None:
    model = rotary()
    runner = OnnxRunner(model, data(Rows((torch.randn(3, 2, 3, 8),), (None,), 3)))
    assert runner.compare(to_module(model), batches=1, tolerance=1e-6) == []
    assert runner.runtime == "onnxruntime, row by row"


def masked_attention() -> onnx.ModelProto:
    """Attention whose mask is the same for all queries, which onnxruntime does not broadcast."""
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"])
    shape = ["batch", 2, 3, 4]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "qkvy"]
    mask = helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", 1, 1, 3])
    inner = helper.make_graph([node], "attention", [*ends[:3], mask], ends[3:])
    return helper.make_model(inner, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def test_a_file_that_onnxruntime_loads_but_cannot_run_runs_under_onnx_reference() -> None:
    model = masked_attention()
    inputs = (*(torch.randn(2, 2, 3, 4) for _ in range(3)), torch.zeros(2, 1, 1, 3))
    runner = OnnxRunner(model, data(Rows(inputs, (None,), 2)))
    assert runner.compare(to_module(model), batches=1, tolerance=1e-5) == []
    assert runner.runtime == "onnx.reference"


CONVERTERS = """
import torch
from onnx.reference.op_run import OpRun
from onnx2torch.node_converters.registry import add_converter
from onnx2torch.utils.common import OperationConverterResult, onnx_mapping_from_node


class Doubled(torch.nn.Module):
    def forward(self, x):
        return twice(x)


def twice(x):
    return 2 * x


@add_converter("Double", 1, domain="judged")
def double(node, graph):
    return OperationConverterResult(torch_module=Doubled(), onnx_mapping=onnx_mapping_from_node(node))


class Double(OpRun):
    op_domain = "judged"

    def _run(self, x):
        return (2 * x,)
"""


def test_a_custom_operator_is_imported_and_run_by_the_users_file(tmp_path: Path) -> None:
    model = one_node("Double", domain="judged")
    rows = data(Rows((torch.randn(3, 4),), (None,), 3))
    with pytest.raises(ExportRefused, match=r"in a file of model\.converters"):
        OnnxRunner(model, rows)
    file = tmp_path / "my_operators.py"
    file.write_text(CONVERTERS)
    converters.load_converters([file])
    runner = OnnxRunner(model, rows)
    assert runner.compare(to_module(model), batches=1, tolerance=1e-6) == []
    assert runner.runtime == "onnx.reference"
    (problem,) = runner.compare(Same(), batches=1, tolerance=1e-6)
    assert problem.startswith("output 'y'")


def test_a_converter_file_that_does_not_run_is_named(tmp_path: Path) -> None:
    from onward.trainer.errors import ConfigError

    files = [tmp_path / "broken.py", tmp_path / "absent.py"]
    files[0].write_text("1 / 0")
    with pytest.raises(ConfigError) as refused:
        converters.load_converters(files)
    assert len(refused.value.problems) == 2
    assert "broken.py: ZeroDivisionError" in refused.value.problems[0]
