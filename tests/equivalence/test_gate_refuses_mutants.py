"""The gate lets the trained file through and none of its mutants, however small the change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.errors import ExportRefused
from onward.trainer.export.file_verification import Expected, verify
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.onnx_graph.surgery.strip_training import strip_training
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from tests.support import graphs
from tests.support.losses import metrics_of
from tests.support.trained_models import model_with_weights

MODELS = ("tiny_conv_net_with_batch_norm", "tiny_resnet", "tiny_transformer", "tiny_bert")


@dataclass(frozen=True)
class Rows:
    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor | None, ...]
    size: int


@dataclass(frozen=True)
class Case:
    """A trained module, the file that came in, and the file that goes out."""

    original: onnx.ModelProto
    trained: onnx.ModelProto
    module: ImportedGraph
    data: EvaluationData

    def refused(self, model: onnx.ModelProto, folder: Path) -> str:
        """Why the gate refuses a file; "" if it does not."""
        file, source = folder / "file.onnx", folder / "source.onnx"
        file.write_bytes(model.SerializeToString())
        source.write_bytes(self.original.SerializeToString())
        weights = {name: weight.detach() for name, weight in named_weights(self.module).items()}
        expected = Expected(ModelFile(source, self.original), weights, self.module, ModelConfig(path=source))
        try:
            verify(ModelFile.read(file), expected, data=self.data, config=ExportConfig())
        except ExportRefused as error:
            return str(error)
        return ""


@functools.cache
def case(name: str) -> Case:
    """A model whose weights were moved as by training."""
    original = graphs.MODELS[name]()
    module = to_module(original).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in named_weights(module).values():
            weight.add_(0.05 * torch.rand_like(weight))
    trained = model_with_weights(module, original)
    strip_training(trained), strip_training(original)
    rows = [Rows(tuple(map(torch.from_numpy, graphs.feed(original, 5, seed).values())), (None,), 5) for seed in (0, 1)]

    def new_metrics(names: Iterable[str]) -> EvaluationMetrics:
        config = ModelConfig(path=Path("-"), loss="output")
        return metrics_of(config, names)

    return Case(original, trained, module, EvaluationData(batches=lambda: rows, new_metrics=new_metrics))


# -- mutations: each changes a copy of the model at one place after another


def copy(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(model.SerializeToString())


def set_tensor(tensor: TensorProto, array: graphs.Array) -> None:
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))


def drop_each_transpose(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Transpose nodes go; so does the transposition that a Gemm does itself."""
    for number, node in enumerate(model.graph.node):
        mutant = copy(model)
        if node.op_type == "Transpose":
            gone = mutant.graph.node[number]
            for reader in mutant.graph.node:
                for place, read in enumerate(reader.input):
                    if read == gone.output[0]:
                        reader.input[place] = gone.input[0]
            del mutant.graph.node[number]
            yield mutant
        for attribute in mutant.graph.node[number].attribute if node.op_type == "Gemm" else ():
            if attribute.name == "transB" and attribute.i:
                attribute.i = 0
                yield mutant


def swap_weights_of_one_shape(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    floats = [t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT and np.prod(t.dims) > 1]
    for first in floats:
        for second in floats:
            if first.name < second.name and first.dims == second.dims:
                mutant = copy(model)
                found = {tensor.name: tensor for tensor in mutant.graph.initializer}
                set_tensor(found[first.name], numpy_helper.to_array(second))
                set_tensor(found[second.name], numpy_helper.to_array(first))
                yield mutant
                break  # one partner for each is enough


def perturb_each_initializer(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """By the least that its type can tell, in one element, frozen tensors and shapes included."""
    for number, tensor in enumerate(model.graph.initializer):
        array = numpy_helper.to_array(tensor).copy()
        flat = array.reshape(-1)
        flat[-1] = np.nextafter(flat[-1], np.float32(np.inf)) if array.dtype == np.float32 else flat[-1] + 1
        mutant = copy(model)
        set_tensor(mutant.graph.initializer[number], array)
        yield mutant


def change_each_attribute(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Each epsilon and every other number, by little."""
    for place, node in enumerate(model.graph.node):
        for number, attribute in enumerate(node.attribute):
            mutant = copy(model)
            changed = mutant.graph.node[place].attribute[number]
            if attribute.type == AttributeProto.FLOAT:
                changed.f = attribute.f * 1.01
            elif attribute.type == AttributeProto.INT:
                changed.i = attribute.i + 1
            elif attribute.type == AttributeProto.INTS and attribute.ints:
                changed.ints[0] = attribute.ints[0] + 1
            else:
                continue
            yield mutant


def swap_operands(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    for place, node in enumerate(model.graph.node):
        if node.op_type in ("Sub", "Div", "MatMul") and node.input[0] != node.input[1]:
            mutant = copy(model)
            mutant.graph.node[place].input[:] = [node.input[1], node.input[0]]
            yield mutant


def skip_each_activation(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    for place, node in enumerate(model.graph.node):
        if node.op_type in ("Relu", "Gelu", "Softmax", "Tanh", "Erf"):
            mutant = copy(model)
            mutant.graph.node[place].CopyFrom(NodeProto(op_type="Identity", input=node.input[:1], output=node.output))
            yield mutant


def change_what_surrounds_the_graph(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    changes: list[Callable[[onnx.ModelProto], object]] = [
        lambda m: m.opset_import[0].__setattr__("version", m.opset_import[0].version - 1),
        lambda m: m.opset_import.append(helper.make_opsetid("acme", 1)),
        lambda m: m.metadata_props.add(key="author", value="nobody"),
        lambda m: m.__setattr__("ir_version", m.ir_version - 1),
        lambda m: m.graph.__setattr__("name", "another"),
        lambda m: m.graph.input[0].type.tensor_type.shape.dim[0].__setattr__("dim_value", 5),
        lambda m: m.graph.output[0].type.tensor_type.shape.dim[0].__setattr__("dim_param", "N"),
        lambda m: m.graph.initializer.add().CopyFrom(numpy_helper.from_array(np.zeros(1, np.float32), "unread")),
    ]
    for change in changes:
        mutant = copy(model)
        change(mutant)
        yield mutant


MUTATIONS = (
    drop_each_transpose,
    swap_weights_of_one_shape,
    perturb_each_initializer,
    change_each_attribute,
    swap_operands,
    skip_each_activation,
    change_what_surrounds_the_graph,
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "tiny_resnet" else name for name in MODELS]
)
def test_the_trained_file_passes_and_every_mutant_is_refused(name: str, tmp_path: Path) -> None:
    subject = case(name)
    assert subject.refused(subject.trained, tmp_path) == ""
    mutants = 0
    for mutate in MUTATIONS:
        for mutant in mutate(subject.trained):
            mutants += 1
            assert subject.refused(mutant, tmp_path), f"mutant {mutants}, {mutate.__name__}, is let through"
    assert mutants >= 30


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mutate", [drop_each_transpose, swap_weights_of_one_shape, skip_each_activation])
def test_onnxruntime_alone_tells_a_mutant_of_the_arithmetic(
    name: str, mutate: Callable[[onnx.ModelProto], Iterator[onnx.ModelProto]]
) -> None:
    """As if nothing but the outputs were compared: each sentence says which output, how far, on which rows."""
    subject = case(name)
    for mutant in mutate(subject.trained):
        try:
            runner = OnnxRunner(mutant, subject.data)
            problems = runner.compare(subject.module, batches=2, tolerance=1e-6)
        except ExportRefused as error:  # its shapes fit no more
            problems = [str(error)]
        assert problems
        assert "cannot" in problems[0] or ("output '" in problems[0] and "greatest difference" in problems[0])
