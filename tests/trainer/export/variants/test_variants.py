"""Each variant of an exported file is measured beside it, runs under onnxruntime, is refused if it lost too much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from torch import Tensor

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.model_file import ModelFile
from onward.trainer.export.variants import variants
from onward.trainer.export.variants.variants import make_variant, too_much
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.onnx_graph.files.whole_models import write_whole
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.run.records import Variant
from tests.support import graphs
from tests.support.losses import metrics_of
from tests.support.trained_models import model_with_weights


@dataclass(frozen=True)
class Rows:
    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    size: int


def new_metrics(names: Iterable[str]) -> EvaluationMetrics:
    return metrics_of(ModelConfig(path=Path("-")), names)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluationData]:
    """A convolution net that knows the digits, as a file, and what to judge it by."""
    data = load_digits()
    images = torch.from_numpy(data.images[:, None] / 16).float()
    labels = torch.from_numpy(data.target)
    model = graphs.tiny_conv_net(num_classes=10, channels=1)
    module = to_module(model)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(module.parameters(), 5e-3)
    for step in range(120):
        rows = slice(step * 64 % 1280, step * 64 % 1280 + 64)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(images[rows]), labels[rows]).backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("digits") / "digits.onnx"
    path.write_bytes(model_with_weights(module, model).SerializeToString())
    held_out = [
        Rows((images[start : start + 64],), (labels[start : start + 64],), len(labels[start : start + 64]))
        for start in range(1344, len(labels), 64)
    ]
    return path, EvaluationData(batches=lambda: held_out, new_metrics=new_metrics)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluationData]:
    """A small transformer and sequences to judge it by."""
    model = graphs.tiny_transformer(vocab_size=64, width=32)
    path = tmp_path_factory.mktemp("text") / "text.onnx"
    path.write_bytes(model.SerializeToString())
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(64, (4, 8, 17), generator=generator)
    batches = [Rows((rows[:, :-1],), (rows[:, 1:],), 8) for rows in ids]
    return path, EvaluationData(batches=lambda: batches, new_metrics=new_metrics)


CASES = [
    ("digits", "optimized", 0.9, 1.6),
    ("digits", "fp16", 0.5, 0.8),
    ("digits", "bf16", 0.5, 0.8),
    ("digits", "fp16_compute", 0.5, 0.9),
    ("digits", "int8_static", 0.3, 1.5),
    ("text", "optimized", 0.5, 1.6),
    ("text", "fp16", 0.5, 0.8),
    ("text", "bf16", 0.5, 0.8),
    ("text", "fp16_compute", 0.5, 0.8),
    ("text", "int8_dynamic", 0.2, 0.8),
    ("text", "int8_static", 0.2, 1.0),
]


@pytest.mark.parametrize(("case", "kind", "least", "most"), CASES)
def test_a_variant_runs_keeps_its_ends_and_loses_little(
    case: str, kind: str, least: float, most: float, request: pytest.FixtureRequest
) -> None:
    path, data = request.getfixturevalue(case)
    variant = make_variant(kind, path, data=data, tolerance=0.02)
    assert not variant.refused
    assert variant.path is not None
    assert least < variant.size_ratio < most
    assert variant.bytes == variant.path.stat().st_size
    assert not variant.latency_ratio <= 0, "NaN where the machine is too busy to tell"
    if case == "digits":
        assert variant.metrics["evaluation/accuracy"] > 0.85
    onnx.checker.check_model(str(variant.path))
    sessions = [
        onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]) for file in (path, variant.path)
    ]
    ends = [[(end.name, end.type, end.shape) for end in (*s.get_inputs(), *s.get_outputs())] for s in sessions]
    assert ends[0] == ends[1]


SPLIT_BYTES = 20_000
"""Less than the network of texts has."""


@pytest.mark.parametrize("kind", ["optimized", "fp16", "bf16", "fp16_compute", "int8_dynamic", "int8_static"])
def test_a_variant_that_is_too_large_for_one_file_has_its_weights_beside_it(
    kind: str, text: tuple[Path, EvaluationData], tmp_path: Path
) -> None:
    path, data = text
    exported = tmp_path / "text.onnx"
    # as a file that is too large has them
    own_data = write_whole(onnx.load(path), exported, most=SPLIT_BYTES)
    assert own_data is not None
    variant = make_variant(kind, exported, data=data, tolerance=0.02, most=SPLIT_BYTES)
    assert not variant.refused
    assert variant.path == tmp_path / f"text.{kind}.onnx"
    assert variant.data == tmp_path / f"text.{kind}.onnx.data"
    assert variant.bytes == variant.path.stat().st_size + variant.data.stat().st_size
    names = {"text.onnx", "text.onnx.data", variant.path.name, variant.data.name}
    assert {file.name for file in tmp_path.iterdir()} == names
    # without the file that it was made of
    exported.unlink()
    own_data.unlink()
    session = onnxruntime.InferenceSession(str(variant.path), providers=["CPUExecutionProvider"])
    rows = next(iter(data.batches())).inputs[0].numpy()
    assert np.isfinite(session.run(None, {session.get_inputs()[0].name: rows})[0]).all()


def test_the_optimized_variant_of_a_file_with_external_data_holds_its_weights(
    text: tuple[Path, EvaluationData], tmp_path: Path
) -> None:
    path, data = text
    own_data = write_whole(onnx.load(path), tmp_path / "text.onnx", most=SPLIT_BYTES)
    assert own_data is not None
    variant = make_variant("optimized", tmp_path / "text.onnx", data=data, tolerance=0.02)
    assert (variant.refused, variant.data) == ("", None)
    own_data.unlink()
    onnxruntime.InferenceSession(str(variant.path), providers=["CPUExecutionProvider"])


def test_a_large_variant_that_is_refused_leaves_no_data_file(text: tuple[Path, EvaluationData], tmp_path: Path) -> None:
    path, data = text
    exported = tmp_path / "text.onnx"
    exported.write_bytes(path.read_bytes())
    variant = make_variant("int8_static", exported, data=data, tolerance=-1.0, most=SPLIT_BYTES)
    assert "above export.variant_tolerance" in variant.refused
    assert [file.name for file in tmp_path.iterdir()] == ["text.onnx"]


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_the_weights_of_a_half_precision_variant_are_the_files_rounded_once(
    kind: str, digits: tuple[Path, EvaluationData]
) -> None:
    path, data = digits
    variant = make_variant(kind, path, data=data, tolerance=0.02)
    assert variant.path is not None
    before = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    halves = {
        t.name: numpy_helper.to_array(t) for t in onnx.load(variant.path).graph.initializer if t.name not in before
    }
    assert halves
    relative = 2.0**-8 if kind == "bf16" else 2.0**-10
    for name, half in halves.items():
        original = before[name.removesuffix(".half")]
        np.testing.assert_allclose(half.astype(np.float32), original, rtol=relative, atol=1e-7)


def test_a_broken_variant_is_refused_with_its_figures(
    digits: tuple[Path, EvaluationData], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = digits

    def broken(exported: ModelFile, target: Path, *_: object) -> None:
        model = exported.with_external_data()
        tensor = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
        tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), tensor.name))
        target.write_bytes(model.SerializeToString())

    monkeypatch.setitem(variants.MAKERS, "optimized", broken)
    (path.parent / "digits.optimized.onnx").unlink(missing_ok=True)
    variant = make_variant("optimized", path, data=data, tolerance=0.02)
    assert "evaluation/accuracy 0." in variant.refused
    assert variant.path is None
    assert not (path.parent / "digits.optimized.onnx").exists()


def test_the_metrics_of_a_variant_are_those_of_its_own_weights(
    digits: tuple[Path, EvaluationData], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = digits

    def changed(exported: ModelFile, target: Path, *_: object) -> None:
        model = exported.with_external_data()
        bias = next(tensor for tensor in model.graph.initializer if tensor.name == "classifier.bias")
        values = numpy_helper.to_array(bias) + 4.0 * (np.arange(10) == 3)
        bias.CopyFrom(numpy_helper.from_array(values.astype(np.float32), bias.name))
        target.write_bytes(model.SerializeToString())

    as_it_is = make_variant("optimized", path, data=data, tolerance=1.0)
    monkeypatch.setitem(variants.MAKERS, "optimized", changed)
    variant = make_variant("optimized", path, data=data, tolerance=1.0)
    assert variant.path is not None
    session = onnxruntime.InferenceSession(str(variant.path), providers=["CPUExecutionProvider"])
    batches = list(data.batches())
    right = sum(
        int((session.run(None, {"image": batch.inputs[0].numpy()})[0].argmax(1) == batch.labels[0].numpy()).sum())
        for batch in batches
    )
    assert variant.metrics["evaluation/accuracy"] == pytest.approx(right / sum(batch.size for batch in batches))
    assert variant.metrics["evaluation/accuracy"] < as_it_is.metrics["evaluation/accuracy"] - 0.1


@pytest.mark.parametrize("what", ["a fixed batch", "inputs in half precision"])
def test_a_variant_is_measured_on_what_the_file_itself_takes(what: str, tmp_path: Path) -> None:
    model = graphs.tiny_conv_net(num_classes=10, channels=1)
    for value in (*model.graph.input, *model.graph.output):
        if what == "a fixed batch":
            value.type.tensor_type.shape.dim[0].dim_value = 4
        else:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in model.graph.initializer if what != "a fixed batch" else ():
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    batches = [Rows((torch.rand(6, 1, 8, 8),), (torch.arange(6),), 6)]
    data = EvaluationData(batches=lambda: batches, new_metrics=new_metrics)
    for kind in ("optimized", "int8_static") if what == "a fixed batch" else ("optimized",):
        variant = make_variant(kind, path, data=data, tolerance=0.5)
        assert not variant.refused
        assert not variant.latency_ratio <= 0, "NaN where the machine is too busy to tell"


@pytest.mark.parametrize("kind", ["fp16", "int8_dynamic", "int8_static"])
def test_weights_in_constant_nodes_are_made_smaller_too(kind: str, tmp_path: Path) -> None:
    model = graphs.tiny_conv_net(num_classes=10, channels=1)
    for tensor in list(model.graph.initializer):
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
        model.graph.initializer.remove(tensor)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    batches = [Rows((torch.rand(6, 1, 8, 8),), (torch.arange(6),), 6)]
    data = EvaluationData(batches=lambda: batches, new_metrics=new_metrics)
    variant = make_variant(kind, path, data=data, tolerance=1.0)
    assert not variant.refused
    assert {tensor.name.split("_")[0].removesuffix(".half") for tensor in _small(onnx.load(variant.path))} >= {
        "classifier.weight"
    }


def _small(model: onnx.ModelProto) -> list[TensorProto]:
    return [
        t for t in model.graph.initializer if t.data_type in (TensorProto.FLOAT16, TensorProto.INT8, TensorProto.UINT8)
    ]


def test_a_model_with_nothing_to_quantize_is_refused_with_the_reason(tmp_path: Path) -> None:
    g = GraphWriter("plain")
    x = g.op("Relu", g.input("image", ("batch", 3, 8, 8)))
    g.op("Flatten", g.op("GlobalAveragePool", x), outputs="logits")
    g.output("logits", ("batch", 3))
    path = tmp_path / "plain.onnx"
    path.write_bytes(g.model().SerializeToString())
    batches = [Rows((torch.rand(4, 3, 8, 8),), (torch.zeros(4, dtype=torch.int64),), 4)]
    data = EvaluationData(batches=lambda: batches, new_metrics=new_metrics)
    for kind, reason in {
        "int8_dynamic": "nothing was quantized: no MatMul",
        "fp16": "no fp32 weight has 1024 elements or more",
    }.items():
        variant = make_variant(kind, path, data=data, tolerance=0.02)
        assert reason in variant.refused
    assert [file.name for file in tmp_path.iterdir()] == ["plain.onnx"]


def test_weights_beyond_the_range_of_fp16_are_refused(digits: tuple[Path, EvaluationData]) -> None:
    path, data = digits
    model = onnx.load(path)
    tensor = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = numpy_helper.to_array(tensor).copy()
    values.reshape(-1)[0] = 1e6
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    great = path.with_name("great.onnx")
    great.write_bytes(model.SerializeToString())
    assert "beyond fp16's 65504; bf16 holds them" in make_variant("fp16", great, data=data, tolerance=1).refused
    assert tensor.data_type == TensorProto.FLOAT


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        (
            {"evaluation/accuracy": 0.9, "evaluation/loss": 1.0},
            {"evaluation/accuracy": 0.89, "evaluation/loss": 9.0},
            False,
        ),
        ({"evaluation/accuracy": 0.9}, {"evaluation/accuracy": 0.87}, True),
        ({"evaluation/accuracy": 0.9}, {"evaluation/accuracy": 0.95}, False),
        ({"evaluation/loss": 1.0}, {"evaluation/loss": 1.01}, False),
        ({"evaluation/loss": 1.0}, {"evaluation/loss": 1.03}, True),
        ({"evaluation/loss": -1.0}, {"evaluation/loss": -0.9}, True),
        ({"evaluation/loss": 1.0}, {"evaluation/loss": float("nan")}, True),
        ({"evaluation/loss": 0.0}, {"evaluation/loss": 0.01}, False),
        ({"evaluation/loss": 0.0}, {"evaluation/loss": 0.1}, True),
        ({}, {}, True),
    ],
)
def test_what_is_too_great_a_loss(before: dict[str, float], after: dict[str, float], refused: bool) -> None:
    assert bool(too_much(before, after, 0.02)) == refused


def test_a_graph_with_its_own_loss_is_written_without_it_and_without_labels(tmp_path: Path) -> None:
    model = graphs.tiny_loss_model()
    rows = [Rows((torch.randn(6, 4), torch.randint(0, 3, (6,))), (None,), 6)]  # type: ignore[arg-type]
    own = ModelConfig(path=Path("-"), loss="output", output="loss")
    data = EvaluationData(batches=lambda: rows, new_metrics=lambda names: metrics_of(own, names))

    def without(losses: list[str]) -> Variant:
        onnx.save(model, tmp_path / "m.onnx")
        return make_variant("without_loss", tmp_path / "m.onnx", data=data, tolerance=0.1, losses=losses)

    assert "the loss is its only output; nothing would be left" in without(["loss"]).refused
    scores = model.graph.node[-1].input[0]
    model.graph.output.append(helper.make_tensor_value_info(scores, TensorProto.FLOAT, ["batch", 3]))
    assert "has no output with a loss of its own" in without([]).refused
    found = without(["loss"])
    assert (found.refused, found.metrics) == ("", {})
    assert found.path is not None
    session = onnxruntime.InferenceSession(found.path)
    assert [value.name for value in session.get_inputs()] == ["features"]
    assert [value.name for value in session.get_outputs()] == [scores]
