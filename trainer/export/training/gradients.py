"""Make training.onnx: the loss and the gradient of every trained weight as one ONNX graph.

    inputs, labels, weights, statistics
        -> imported fx graph -> loss -> torch.func.grad_and_value          one Python function (`_Recorder`)
        -> make_fx with `DECOMPOSITIONS`                                   a list of ATen calls
        -> torch.onnx.export                                               an ONNX graph
    loss, gradients, new statistics

Dynamic sizes of the file stay dynamic. Weights are inputs, named as their initializers.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from onward.trainer.config.losses import LossConfig
from onward.trainer.errors import UnsupportedModel
from onward.trainer.export.training.decompositions import DECOMPOSITIONS, DecomposedCalls
from onward.trainer.export.training.loss_graph import LossNames
from onward.trainer.model.losses.loss import Loss
from onward.trainer.onnx_graph.element_types import torch_dtype
from onward.trainer.onnx_graph.index import subgraphs
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.trial_sizes import trial_sizes

OPSET = 20
"""Opset of the training graph: 18 adds Scatter with reduction, 20 adds Gelu."""


@dataclass(frozen=True)
class Example:
    """One input of the graph at the size that recording uses, and which of its dimensions are dynamic."""

    name: str
    tensor: Tensor
    second: tuple[int, ...]
    """Another shape it may have."""
    dynamic: Mapping[int, str]
    """Dimension -> its name in the file; these differ between the two shapes."""


@dataclass(frozen=True)
class TrainingModel:
    """The graph, and the names of its weights and statistics. Inputs: inputs, labels, weights, statistics."""

    model: onnx.ModelProto
    weights: tuple[str, ...]
    statistics: tuple[str, ...]


def gradient_of(weight: str) -> str:
    """Return the name of the gradient of a weight."""
    return f"{weight}_grad"


def updated(name: str) -> str:
    """Return the name of the new value of a weight, a moment or a running statistic."""
    return f"{name}_new"


def training_model(
    module: ImportedGraph, model: onnx.ModelProto, config: LossConfig, *, names: LossNames
) -> TrainingModel:
    """Make the training graph of `module`, which is `model` imported with `fuse=False` and its weights selected.

    The loss is the mean over the targets that count, and the gradients are those of this mean. Dropout draws a new mask
    at every run. BatchNormalization uses the statistics of the batch and returns new running statistics. The graph
    computes in fp32. Raises UnsupportedModel when recording or translating fails, with what could not be translated.
    """
    problems = []
    # as the importer does: recording may fail at one size and work at another
    for examples in _examples(model):
        try:
            return _translate(_Recorder(module, config, examples, names), examples)
        except _REFUSALS as error:
            problems.append(_sentence(error))
    raise UnsupportedModel(
        f"no training.onnx can be made of this model: {problem}" for problem in dict.fromkeys(problems)
    )


_REFUSALS = (
    RuntimeError,
    NotImplementedError,
    IndexError,
    ValueError,
    TypeError,
    KeyError,
    torch.onnx.OnnxExporterError,
)


def _sentence(error: BaseException) -> str:
    """Return the first lines of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split("\n\n")[0].split())[:400] or type(error).__name__


def _examples(model: onnx.ModelProto) -> Iterator[list[Example]]:
    """Yield inputs of the sizes that the importer tries, each set of sizes once."""
    tried: list[list[tuple[int, ...]]] = []
    stored = {tensor.name for tensor in model.graph.initializer}
    for lengths, _ in trial_sizes(model.graph, stored):
        examples = []
        for value in model.graph.input:
            if value.name in stored:
                continue
            dims = value.type.tensor_type.shape.dim
            pairs = [lengths[value.name, dim] for dim in range(len(dims))]
            names = {
                dim: dims[dim].dim_param or (f"{value.name}_{dim}" if dim else "batch")
                # a dimension without a name in the file gets one, because torch.onnx.export names dynamic dimensions
                for dim, (first, second) in enumerate(pairs)
                if first != second
            }
            tensor = torch.zeros([first for first, _ in pairs], dtype=torch_dtype(value.type.tensor_type.elem_type))
            examples.append(Example(value.name, tensor, tuple(second for _, second in pairs), names))
        shapes = [tuple(each.tensor.shape) for each in examples]
        if shapes not in tried:
            tried.append(shapes)
            yield examples


# -- recording


class _Recorder:
    """One call of the graph, its loss and its gradients as a function of tensors alone."""

    def __init__(
        self, module: ImportedGraph, config: LossConfig, examples: Sequence[Example], names: LossNames
    ) -> None:
        self._module = module.train()
        self._loss, self._ignored = Loss(config, module.output_names), config.ignored
        named = dict((*module.named_parameters(), *module.named_buffers()))
        paths = {path: name for path, name in module.onnx_names.items() if path in named}
        self.trained = {path: n for path, n in paths.items() if named[path].requires_grad}
        self.statistics = {path: n for path, n in paths.items() if not isinstance(named[path], nn.Parameter)}
        self.frozen = {path: n for path, n in paths.items() if path not in self.trained | self.statistics}
        self.tensors = {path: named[path].detach() for path in (*self.trained, *self.statistics, *self.frozen)}
        self.names = names
        self.labels = self._labels(examples)

    def _labels(self, examples: Sequence[Example]) -> Example | None:
        """Return example labels of the shape that the loss expects."""
        if self._loss.name == "output":
            return None
        classes = self._loss.name == "cross_entropy"
        tensors = [each.tensor for each in examples]
        others = [each.tensor.new_zeros(each.second) for each in examples]
        shapes = [list(self._output_shape(each)) for each in (tensors, others)]
        for shape in shapes if classes else ():
            del shape[-1 if self._loss.config.class_axis is None else self._loss.config.class_axis]
        first, second = shapes
        named = {
            (each.tensor.shape[dim], each.second[dim]): name for each in examples for dim, name in each.dynamic.items()
        }
        pairs = list(zip(first, second, strict=True))
        dynamic = {dim: named.get(pair, f"labels_{dim}") for dim, pair in enumerate(pairs) if pair[0] != pair[1]}
        zeros = torch.zeros(first, dtype=torch.int64 if classes else torch.float32)
        return Example(self.names.labels, zeros, tuple(second), dynamic)

    def _output_shape(self, inputs: Sequence[Tensor]) -> torch.Size:
        """Return the shape of the output that the loss reads, computed on fake tensors."""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            output = self._loss.output(self._module.eval()(*(tensor.clone() for tensor in inputs)))
        self._module.train()  # the gradients are those of training mode
        return output.shape

    def __call__(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Compute loss, gradients and new statistics from tensors in the order of the graph's inputs."""
        number = len(flat) - len(self.tensors)
        tensors = dict(zip(self.tensors, flat[number:], strict=True))
        inputs = flat[: number - 1] if self.labels else flat[:number]
        labels = flat[number - 1] if self.labels else None

        def objective(trained: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
            every = tensors | trained
            with DecomposedCalls() as calls:
                outputs = _Running(self._module, every).run(*inputs)
                statistics = [calls.statistics.get(id(every[path]), every[path]) for path in self.statistics]
            return self._mean(outputs, labels), statistics

        trained = {path: tensors[path] for path in self.trained}
        gradients, (loss, statistics) = torch.func.grad_and_value(objective, has_aux=True)(trained)
        return (loss, *(gradients[path] for path in self.trained), *statistics)

    def _mean(self, outputs: Tensor | Sequence[Tensor], labels: Tensor | None) -> Tensor:
        if labels is None:
            return self._loss(outputs, None, 1)
        counted = labels != self._ignored if self._loss.name == "cross_entropy" else torch.ones_like(labels)
        # the losses of Onward are sums over targets (model/losses/loss.py); a step without torch needs the mean
        count = self._loss.count(labels, 1) if self._loss.config.class_weights else counted.sum().clamp(min=1)
        return self._loss(outputs, labels, 1) / count


class _Running(fx.Interpreter):
    """Run the graph with other tensors in place of the module's weights."""

    def __init__(self, module: fx.GraphModule, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(module)
        self._tensors = tensors

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._tensors[target] if target in self._tensors else super().get_attr(target, args, kwargs)


def _record(recorder: _Recorder, examples: Sequence[Example]) -> fx.GraphModule:
    """Record the calls, with dynamic sizes as symbols."""
    # fake tensors have shapes and no data, so recording needs no memory for activations and no arithmetic
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(tensor: Tensor, dynamic: Mapping[int, str]) -> Tensor:
        # DUCK: equal sizes get one symbol, such as the batch size of all inputs
        sizes = [DimDynamic.DUCK if dim in dynamic else DimDynamic.STATIC for dim in range(tensor.ndim)]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(tensor, symbolic_context=context)

    tensors = [fake(each.tensor, each.dynamic) for each in examples]
    tensors += [fake(tensor, {}) for tensor in recorder.tensors.values()]
    traced = make_fx(
        # replaces in-place calls by functions, because the values of an ONNX graph do not change
        torch.func.functionalize(recorder),
        decomposition_table=DECOMPOSITIONS,
        tracing_mode="symbolic",
        _allow_non_fake_inputs=True,
    )(*tensors)
    assert isinstance(traced, fx.GraphModule)
    # calls whose results nothing reads would be translated otherwise
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


# -- translating


class _Flat(nn.Module):
    """A recorded function as a module of a fixed number of tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, tensors: list[Tensor]) -> Any:
        return self.function(*tensors)


def _translate(recorder: _Recorder, examples: Sequence[Example]) -> TrainingModel:
    examples = [*examples, *([recorder.labels] if recorder.labels else [])]
    weights, statistics = tuple(recorder.trained.values()), tuple(recorder.statistics.values())
    tensors = [*(each.tensor for each in examples), *recorder.tensors.values()]
    dynamic = [*(dict(each.dynamic) or None for each in examples), *[None] * len(recorder.tensors)]
    with _quiet():
        program = torch.onnx.export(
            _Flat(_record(recorder, examples)).eval(),
            (tensors,),
            dynamic_shapes=(dynamic,),
            opset_version=OPSET,
            dynamo=True,
            optimize=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    inputs = [*(each.name for each in examples), *weights, *statistics, *recorder.frozen.values()]
    outputs = [recorder.names.loss, *map(gradient_of, weights), *map(updated, statistics)]
    # a weight in the file may be called `loss`, or `x_grad` beside a weight `x`
    if twice := [name for name, number in Counter([*inputs, *outputs]).items() if number > 1]:
        raise ValueError(f"{', '.join(map(repr, twice))} would name two of its inputs and outputs; rename in the file")
    _name(model, inputs, outputs)
    _store(model, {name: recorder.tensors[path] for path, name in recorder.frozen.items()})
    return TrainingModel(model, weights, statistics)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and log lines of torch.onnx that are about itself."""
    logger, level = logging.getLogger("torch.onnx"), logging.getLogger("torch.onnx").level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
            warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
            yield
    finally:
        logger.setLevel(level)


def _store(model: onnx.ModelProto, tensors: Mapping[str, Tensor]) -> None:
    """Make inputs that never change initializers."""
    for value in [value for value in model.graph.input if value.name in tensors]:
        model.graph.input.remove(value)
        model.graph.initializer.append(numpy_helper.from_array(tensors[value.name].numpy(), value.name))


def _name(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name inputs and outputs as given and every other value onward.<name>, and remove metadata.

    The metadata holds paths of this machine. An output that is an unchanged input gets an Identity node.
    """
    graph = model.graph
    named = dict(zip((value.name for value in graph.input), inputs, strict=True))
    for value, name in zip(graph.output, outputs, strict=True):
        if value.name in named:
            # an ONNX value has one name, so an output cannot be an input under another one
            graph.node.append(helper.make_node("Identity", [value.name], [name]))
            value.name = name
        named[value.name] = name
    _rename(graph, named)
    model.producer_name, model.producer_version, model.doc_string, graph.name = "onward", "", "", "training"
    del model.metadata_props[:]


def _rename(graph: onnx.GraphProto, named: Mapping[str, str]) -> None:
    def new(name: str) -> str:
        return named.get(name, f"onward.{name}") if name else ""

    del graph.metadata_props[:], graph.value_info[:]
    graph.doc_string = ""
    for part in (*graph.input, *graph.output, *graph.initializer):
        part.name, part.doc_string = new(part.name), ""
        del part.metadata_props[:]
    for node in graph.node:
        node.input[:], node.output[:] = map(new, node.input), map(new, node.output)
        node.name, node.doc_string = f"onward.{node.name or node.output[0]}", ""
        del node.metadata_props[:]
        for inner in subgraphs(node):
            _rename(inner, named)
