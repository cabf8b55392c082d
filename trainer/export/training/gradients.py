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
from onward.trainer.export.training.loss_graph import LossNames, label_dims
from onward.trainer.model.losses.loss import Loss, Losses
from onward.trainer.onnx_graph.files.element_types import torch_dtype
from onward.trainer.onnx_graph.files.index import inputs_of, subgraphs
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.tracing.trial_sizes import trial_sizes

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
    module: ImportedGraph, model: onnx.ModelProto, losses: Sequence[LossConfig], *, names: LossNames
) -> TrainingModel:
    """Make the training graph of `module`, which is `model` imported with `fuse=False` and its weights selected.

    The loss is the sum of weight x mean over the targets that count, and the gradients are those of this sum. Dropout
    draws a new mask at every run. BatchNormalization uses the statistics of the batch and returns new running
    statistics. The graph computes in fp32. Raises UnsupportedModel when recording or translating fails, with what could
    not be translated.
    """
    problems = []
    # as the importer does: recording may fail at one size and work at another
    for examples in _examples(model):
        try:
            return _translate(_Recorder(module, losses, examples, names), examples)
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
    for lengths, _ in trial_sizes(model.graph):
        examples = []
        for value in inputs_of(model.graph):
            dims = value.type.tensor_type.shape.dim
            pairs = [lengths[value.name, dim] for dim in range(len(dims))]
            names = {}
            for dim, (first, second) in enumerate(pairs):
                if first != second:
                    # a dimension without a name in the file gets one, because torch.onnx.export names dynamic ones
                    names[dim] = dims[dim].dim_param or (f"{value.name}_{dim}" if dim else "batch")
            tensor = torch.zeros([first for first, _ in pairs], dtype=torch_dtype(value.type.tensor_type.elem_type))
            examples.append(Example(value.name, tensor, tuple(second for _, second in pairs), names))
        # several trial sizes may give the inputs the same shapes
        shapes = [tuple(each.tensor.shape) for each in examples]
        if shapes not in tried:
            tried.append(shapes)
            yield examples


# -- recording


class _Recorder:
    """One call of the graph, its loss and its gradients as a function of tensors alone."""

    def __init__(
        self, module: ImportedGraph, losses: Sequence[LossConfig], examples: Sequence[Example], names: LossNames
    ) -> None:
        self._module = module.train()
        self._losses = Losses([_with_axis(loss) for loss in losses], module.output_names)
        named = dict((*module.named_parameters(), *module.named_buffers()))
        paths = {path: name for path, name in module.onnx_names.items() if path in named}
        self.trained = {path: n for path, n in paths.items() if named[path].requires_grad}
        self.statistics = {path: n for path, n in paths.items() if not isinstance(named[path], nn.Parameter)}
        self.frozen = {path: n for path, n in paths.items() if path not in self.trained | self.statistics}
        # these are the last inputs of the graph, in this order
        self.tensors = {path: named[path].detach() for path in (*self.trained, *self.statistics, *self.frozen)}
        self.names = names
        self.labels = self._labels(examples)

    def _labels(self, examples: Sequence[Example]) -> list[Example]:
        """Return example labels of each loss that takes any, of the shape that it expects."""
        if not any(self.names.labels):
            return []
        tensors = [each.tensor for each in examples]
        # at both sizes: a length that differs is dynamic, in the labels as well
        shapes = (
            self._output_shapes(tensors),
            self._output_shapes([each.tensor.new_zeros(each.second) for each in examples]),
        )
        named = {
            (each.tensor.shape[dim], each.second[dim]): name for each in examples for dim, name in each.dynamic.items()
        }
        found = []
        for loss, labels, first, second in zip(self._losses.each, self.names.labels, *shapes, strict=True):
            if labels:
                sizes = [label_dims(loss.config, shape) for shape in (first, second)]
                pairs = list(zip(*sizes, strict=True))
                dynamic = {
                    dim: named.get(pair, f"{labels}_{dim}") for dim, pair in enumerate(pairs) if pair[0] != pair[1]
                }
                zeros = torch.zeros(sizes[0], dtype=getattr(torch, loss.config.label_dtype))
                found.append(Example(labels, zeros, tuple(sizes[1]), dynamic))
        return found

    def _output_shapes(self, inputs: Sequence[Tensor]) -> list[list[int]]:
        """Return the shape of the first output that each loss reads, computed on fake tensors."""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            outputs = self._module.eval()(*(tensor.clone() for tensor in inputs))
        self._module.train()  # the gradients are those of training mode
        return [list(loss.output(outputs).shape) for loss in self._losses.each]

    def __call__(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Compute losses, gradients and new statistics from tensors in the order of the graph's inputs."""
        # inputs, labels, then stored tensors
        number = len(flat) - len(self.tensors)
        tensors = dict(zip(self.tensors, flat[number:], strict=True))
        inputs = flat[: number - len(self.labels)]
        given = iter(flat[number - len(self.labels) : number])
        labels = [next(given) if name else None for name in self.names.labels]

        def objective(trained: dict[str, Tensor]) -> tuple[Tensor, tuple[list[Tensor], list[Tensor]]]:
            # torch.func differentiates by `trained` alone
            every = tensors | trained
            with DecomposedCalls() as calls:
                outputs = _Running(self._module, every).run(*inputs)
                # a statistic that no node updates in training stays as it is
                statistics = [calls.statistics.get(id(every[path]), every[path]) for path in self.statistics]
            means = [self._mean(loss, outputs, own) for loss, own in zip(self._losses.each, labels, strict=True)]
            return self._losses.weighted(means), (means, statistics)

        trained = {path: tensors[path] for path in self.trained}
        gradients, (loss, (means, statistics)) = torch.func.grad_and_value(objective, has_aux=True)(trained)
        # a single loss of weight 1 is its own mean, and has one output
        values = [loss] if self.names.means == (self.names.loss,) else [loss, *means]
        return (*values, *(gradients[path] for path in self.trained), *statistics)

    def _mean(self, loss: Loss, outputs: Tensor | Sequence[Tensor], labels: Tensor | None) -> Tensor:
        # the losses of Onward are sums over targets (model/losses/loss.py); a step without torch needs the mean
        own = outputs if isinstance(outputs, Tensor) else outputs[loss.index]
        size = 1 if loss.config.rule.by_graph else own.shape[0]
        total = loss(outputs, labels, size)
        count = loss.count(labels, size)
        if isinstance(count, Tensor):  # of no targets the sum is 0, and so is the mean, not 0 / 0
            count = torch.where(count > 0, count, 1).float()
        return total / count


def _with_axis(loss: LossConfig) -> LossConfig:
    """Return the loss with its axis of classes, the last one where the data did not say which."""
    unknown = loss.has_class_axis and loss.class_axis is None
    return loss.model_copy(update={"class_axis": -1}) if unknown else loss


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
    examples = [*examples, *recorder.labels]
    weights = tuple(recorder.trained.values())
    statistics = tuple(recorder.statistics.values())
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
    outputs = [*recorder.names.outputs, *map(gradient_of, weights), *map(updated, statistics)]
    # a weight in the file may be called `loss`, or `x_grad` beside a weight `x`
    if twice := [name for name, number in Counter([*inputs, *outputs]).items() if number > 1]:
        raise ValueError(f"{', '.join(map(repr, twice))} would name two of its inputs and outputs; rename in the file")
    _name(model, inputs, outputs)
    _store(model, {name: recorder.tensors[path] for path, name in recorder.frozen.items()})
    return TrainingModel(model, weights, statistics)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and log lines of torch.onnx that are about itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
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
    # frozen tensors are recorded as inputs like all others
    for value in [value for value in model.graph.input if value.name in tensors]:
        model.graph.input.remove(value)
        model.graph.initializer.append(numpy_helper.from_array(tensors[value.name].numpy(), value.name))


def _name(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name inputs and outputs as given and every other value onward.<name>, and remove metadata.

    The metadata holds paths of this machine. An output that is an unchanged input gets an Identity node.
    """
    graph = model.graph
    # the exporter has its own names, in the same order
    named = dict(zip((value.name for value in graph.input), inputs, strict=True))
    for value, name in zip(graph.output, outputs, strict=True):
        if value.name in named:
            # an ONNX value has one name, so an output cannot be an input under another one
            graph.node.append(helper.make_node("Identity", [value.name], [name]))
            value.name = name
        named[value.name] = name
    _rename(graph, named)
    model.producer_name = "onward"
    model.producer_version = ""
    model.doc_string = ""
    graph.name = "training"
    del model.metadata_props[:]


def _rename(graph: onnx.GraphProto, named: Mapping[str, str]) -> None:
    def new(name: str) -> str:
        return named.get(name, f"onward.{name}") if name else ""

    del graph.metadata_props[:], graph.value_info[:]
    graph.doc_string = ""
    for part in (*graph.input, *graph.output, *graph.initializer):
        part.name = new(part.name)
        part.doc_string = ""
        del part.metadata_props[:]
    for node in graph.node:
        node.input[:], node.output[:] = map(new, node.input), map(new, node.output)
        node.name = f"onward.{node.name or node.output[0]}"
        node.doc_string = ""
        del node.metadata_props[:]
        for inner in subgraphs(node):
            _rename(inner, named)
