"""How an ONNX file becomes a torch module, from the first step to the last.

    model = load_model(path)                       # read and check the file
    module = to_module(model, base=path.parent)    # import it
    select_trained(module, freeze=("*.wpe.*",))    # train_selection.py
    ...                                            # train it like any torch module
    write_model(module, model, path, target)       # write_back.py: the same file with the module's weights

The steps of `to_module`:

    lifting             onnx_graph/inner_tensors.py  what inner graphs and functions store becomes initializers
    stored tensors      onnx_graph/initializers.py   read or mapped into memory
    roles               roles.py                     trained weight, running statistic or constant
    lowering            lowering.py, ops/            each ONNX node becomes torch calls, recorded by tracing.py
      at trial sizes    trial_sizes.py               until one attempt needs no assumption about lengths
    ties                ties.py                      copies of one weight become one parameter
    passes              passes/fuse.py               attention, norms, activations in torch's fused kernels

The result is an ImportedGraph (imported_graph.py). Its parameters are the initializers themselves: nothing is
transposed, scaled or folded on import, so writing them back is exact. Half-precision files are computed in fp32 and
rounded once, when they are written.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, inliner
from torch import fx, nn

import onward.trainer.onnx_import.ops  # noqa: F401  registers the operator rules
from onward.trainer.errors import ConfigError, UnsupportedModel, UnsupportedNode
from onward.trainer.onnx_graph.attribute_weights import with_operands
from onward.trainer.onnx_graph.beyond_onnx import check, put_right, refused
from onward.trainer.onnx_graph.files.attribute_bounds import passed_attribute_problems
from onward.trainer.onnx_graph.files.element_types import HALVES, PACKED, torch_dtype
from onward.trainer.onnx_graph.files.external_ranges import external_problems
from onward.trainer.onnx_graph.files.index import dims_of, inputs_of, opsets_of, without_large_tensors
from onward.trainer.onnx_graph.files.model_files import opset_problems
from onward.trainer.onnx_graph.files.operators import functions_of
from onward.trainer.onnx_graph.files.source_model import SourceModel
from onward.trainer.onnx_graph.files.stored_protos import load_small_tensors
from onward.trainer.onnx_graph.initializers import stored_tensors
from onward.trainer.onnx_graph.inner_tensors import inner_tensors, lift_inner_tensors
from onward.trainer.onnx_graph.operator_lengths import known_lengths, with_lengths
from onward.trainer.onnx_graph.outputs import with_numeric_outputs
from onward.trainer.onnx_graph.shape_inference import infer_probes
from onward.trainer.onnx_graph.surgery.blocked_layout import mark_blocks
from onward.trainer.onnx_graph.surgery.stochastic_depth import find_branches, mark_branches
from onward.trainer.onnx_graph.surgery.training_norms import mark_batch_statistics
from onward.trainer.onnx_import.imported_graph import ImportedGraph, mark_constants_nonpersistent
from onward.trainer.onnx_import.lowering.lowering import GraphLowering, unknown_operators
from onward.trainer.onnx_import.ops.cast import widen_half
from onward.trainer.onnx_import.passes.fuse import fuse_graph as fuse_graph
from onward.trainer.onnx_import.quantization.quantized_weights import (
    QuantizedWeight,
    quantized_weights,
    roles_of_quantized,
    scales_of,
)
from onward.trainer.onnx_import.quantization.quantizer_scales import FollowScales, Quantizer, ScaleMode, biases_last
from onward.trainer.onnx_import.quantization.quantizer_search import find_quantizers
from onward.trainer.onnx_import.roles.exporter_records import read_records
from onward.trainer.onnx_import.roles.roles import Role, find_roles, inner_roles, promote_to_trained
from onward.trainer.onnx_import.roles.ties import Copies, find_copies, roles_of_copies
from onward.trainer.onnx_import.roles.ties import tie_copies as tie_copies
from onward.trainer.onnx_import.tracing.shape_assumptions import check_rows, is_impure
from onward.trainer.onnx_import.tracing.tracing import Tracer
from onward.trainer.onnx_import.tracing.trial_sizes import Lengths, declared_batch, trial_sizes
from onward.trainer.onnx_import.tracing.values import FreedBatch, Traced, Value


def load_model(path: Path, *, by_parts: bool = False) -> onnx.ModelProto:
    """Read and check an ONNX file. External data stays in its files; `to_module(base=path.parent)` maps it.

    by_parts: leave large weights of the file itself there, too, as external data (mapped_model.py); such a model must
    not be written. Raises ConfigError when there is no readable file, UnsupportedModel when it is not valid ONNX, has
    no outputs, or when an external data file is absent, too short or outside the model's directory.
    """
    try:
        source = SourceModel.read(path, by_parts=by_parts)
    except OSError as error:
        raise ConfigError(f"cannot read the model {path}: {error.strerror}") from None
    return checked_model(source)


def checked_model(source: SourceModel) -> onnx.ModelProto:
    """Check a file that was read, and return its graph, put right in place for `to_module`.

    Raises UnsupportedModel as `load_model`.
    """
    path, model = source.path, source.proto
    # before the checker, which opens what the file names
    own = path.name if source.is_mapped else ""
    if problems := [*opset_problems(model), *external_problems(model, path.parent, own=own), *refused(model)]:
        raise UnsupportedModel(problems)
    try:
        if not source.is_mapped or not _is_valid(model):
            _check(path, model)
    except onnx.checker.ValidationError as error:
        raise UnsupportedModel(f"{path} is not valid ONNX: {error}") from None
    put_right(model)
    if not model.graph.output:  # which the checker allows
        raise UnsupportedModel(f"{path} has no outputs, so that there is nothing to train for")
    if problems := list(passed_attribute_problems(model)):
        raise UnsupportedModel(problems)
    return model


def _is_valid(model: onnx.ModelProto) -> bool:
    """Return whether the checker accepts a model without the values of its weights."""
    try:
        onnx.checker.check_model(without_large_tensors(model))
    except onnx.checker.ValidationError:
        return False
    return True


def _check(path: Path, model: onnx.ModelProto) -> None:
    # by path and not by model, because the checker reads external data relative to the file and has no limit of 2 GB
    # then
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError:
        check(model)


def to_module(
    model: onnx.ModelProto,
    *,
    base: Path | None = None,
    fuse: bool = True,
    tie: bool = True,
    train: Sequence[str] = (),
    widen: bool | None = None,
    scales: ScaleMode = "frozen",
    by_parts: bool = False,
) -> ImportedGraph:
    """Import a model as a torch module.

    The module takes the graph's inputs in order, without those that have an initializer, and returns the graph's
    outputs in order, without those of strings or maps: the tensor itself if there is one, else a tuple. Dropout,
    stochastic depth and BatchNormalization follow train() and eval().

    base: the directory of the model's external data, which is mapped copy-on-write. fuse: rewrite attention, norms and
    linear layers into single torch calls; results differ by rounding only. tie: make the copies that an exporter stored
    of one weight one parameter. train: names of stored tensors that are to be weights although the analysis of roles
    says otherwise. widen: rewrite the shapes of a file that declares a fixed batch for batches of any size (True), or
    import it for its own batch alone, which the module then checks (False); None: widen it where that succeeds.
    Whether the widened graph computes what the file does is proved by `fixed_batch.batch_use`, not here. scales: what
    becomes of the scales of QuantizeLinear and DequantizeLinear (quantizer_scales.py). by_parts: the module is divided
    before it computes, and its parameters may be unaligned views of the file until then (`map_external`). Raises
    UnsupportedModel with one sentence for every node that cannot be imported.
    """
    original = with_numeric_outputs(model)
    model = lift_inner_tensors(original)
    # before inlining, after which what stays in a function has no place of its own to be written back to
    stored = stored_tensors(model.graph, base, unaligned=by_parts)
    records = read_records(model, inner_tensors(original))
    quantized = quantized_weights(model.graph, stored)
    # what roles and ties look at: the numbers that integers mean
    floats = stored | {name: weight.dequantized() for name, weight in quantized.items()}
    quantizers = find_quantizers(model.graph, stored, floats, scales, quantized)
    depth = find_branches(model, base)
    # shape inference and converters read small tensors from the model itself; large ones stay mapped
    model = load_small_tensors(with_operands(model), base)
    if model.functions:
        model = inliner.inline_local_functions(model)
    model = mark_batch_statistics(model)
    roles = find_roles(model.graph, floats, records, scales_of(quantized)) | inner_roles(original)
    found = roles_of_quantized(promote_to_trained(roles, floats, train), quantized)
    trained = {name for name, role in found.items() if role.kind == "trained"}
    integers = {name: weight for name, weight in quantized.items() if name in trained}
    quantizers = tuple(quantizer for quantizer in quantizers if quantizer.follows(trained))
    model = biases_last(mark_blocks(mark_branches(model, depth), stored), quantizers)
    attempt, graph = import_graph(model, stored, found, base, quantized=integers, quantizers=quantizers, widen=widen)
    copies = find_copies(floats, found, records.originals) if tie else {}
    module = _finish(attempt, graph, copies, fuse=fuse)
    shapes = {value.name: dims_of(value) for value in model.graph.output}
    module.output_shapes = {name: None if dims is None else tuple(dims) for name, dims in shapes.items()}
    module.quantizers = quantizers
    return module


def _finish(attempt: ImportAttempt, graph: fx.Graph, copies: Copies, *, fuse: bool) -> ImportedGraph:
    """Tie copies, apply the passes and return the module."""
    root = attempt.tracer.root
    tie_copies(graph, root, {name: path for path, name in attempt.onnx_names.items()}, copies)
    if fuse:
        fuse_graph(graph, root)
    graph.eliminate_dead_code(is_impure_node=is_impure)
    graph.lint()
    module = ImportedGraph(root, graph, "ImportedGraph")
    # traced nodes refer to the tracer; through its root every rank would keep all weights of all stages alive
    attempt.tracer.root = nn.Module()
    paths = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    # without the copies, which have been removed, and what dead-code elimination left out
    module.onnx_names = {path: name for path, name in attempt.onnx_names.items() if path in paths}
    mark_constants_nonpersistent(module)
    module.input_names = tuple(value.name for value in attempt.inputs)
    module.output_names = tuple(value.name for value in attempt.model.graph.output)
    module.copies = {name: of for name, of in copies.items() if of[0] in module.onnx_names.values()}
    module.roles = roles_of_copies(attempt.roles, module.copies)
    return module


def import_graph(
    model: onnx.ModelProto,
    stored: Mapping[str, torch.Tensor],
    roles: Mapping[str, Role],
    base: Path | None,
    *,
    quantized: Mapping[str, QuantizedWeight],
    quantizers: tuple[Quantizer, ...],
    widen: bool | None,
) -> tuple[ImportAttempt, fx.Graph]:
    """Trace the graph at several sizes and return the attempt with the lowest cost.

    quantized: the trained ones of `stored` that are integers. quantizers: the scales that follow them. Raises
    UnsupportedModel with every problem of the best attempt.
    """
    # before tracing, because a node is not traced when one before it fails, and all of them are to be reported at once
    unknown = unknown_operators(model)
    attempts: list[tuple[ImportAttempt, fx.Graph]] = []
    model = with_lengths(model, known_lengths(model.graph))
    for lengths, batch in trial_sizes(model.graph, widen=widen):
        attempt = ImportAttempt(model, Tracer(), roles, batch, base, quantized, quantizers)
        attempts.append((attempt, attempt.build(stored, lengths)))
        # nothing was assumed and nothing is left to run time: a further size cannot be better
        if not any(attempt.cost):
            break
    # the first of equal ones: a dynamic batch is tried before the declared one
    best = min(attempts, key=lambda entry: entry[0].cost)
    if unknown or best[0].problems:
        raise UnsupportedModel(dict.fromkeys([*unknown, *best[0].problems]))
    return best


@dataclass
class ImportAttempt:
    """The whole graph, traced at one choice of sizes."""

    model: onnx.ModelProto
    tracer: Tracer
    roles: Mapping[str, Role]
    batch: int | None
    """The batch size that the file declares, if it is treated as dynamic."""
    base: Path | None
    """The directory of external data that was not loaded."""
    quantized: Mapping[str, QuantizedWeight]
    """The trained tensors that are stored as integers."""
    quantizers: tuple[Quantizer, ...]
    """The scales that follow what is trained."""
    problems: list[str] = field(default_factory=list)
    onnx_names: dict[str, str] = field(default_factory=dict)

    @property
    def cost(self) -> tuple[int, int, int]:
        """Return the numbers of refused nodes, assumptions about lengths and runtime nodes, compared in this order."""
        return len(self.problems), len(self.tracer.assumptions), len(self.tracer.runtime_nodes)

    @property
    def inputs(self) -> list[onnx.ValueInfoProto]:
        return inputs_of(self.model.graph)

    def build(self, stored: Mapping[str, torch.Tensor], lengths: Lengths) -> fx.Graph:
        """Lower all nodes onto the tracer's fx graph and return it."""
        values: dict[str, Value] = {"": None}
        for value in self.inputs:
            self._add_input(value, lengths, values)
        self._fix_or_free_batch(lengths, values)
        for value in self.inputs:  # after all placeholders, which must come first in fx
            if value.type.tensor_type.elem_type in HALVES and isinstance(values.get(value.name), Traced):
                values[value.name] = self.tracer.call(widen_half, values[value.name], self.tracer.anchor)
        scaled = {quantizer.weight for quantizer in self.quantizers}
        for name, tensor in stored.items():
            values[name] = self._add_stored(name, tensor, scaled)
        # after the stored tensors: scales are computed from the weights of now
        following = FollowScales(self.tracer, self.quantizers, self.quantized)
        following.before_all(values)
        self.onnx_names |= following.names
        graph = self.model.graph
        lowering = GraphLowering(
            self.tracer, graph, functions_of(self.model), self.base, self.problems, before=following.before
        )
        if self.batch is None:  # a dynamic batch contradicts the shapes that a file of fixed batch has as constants
            lowering.shapes = functools.cache(lambda: infer_probes(self.model, stored, lengths))
        lowering.run(graph, values, opsets_of(self.model))
        missing = [value.name for value in graph.output if value.name not in values]
        if not self.problems and missing:
            self.problems.append(f"no node computes the graph's output {', '.join(missing)}")
        if not self.problems:
            self.tracer.check_lengths()
            outputs = tuple(self._output(value, values[value.name]) for value in graph.output)
            nodes = self.tracer._nodes(outputs)
            self.tracer.graph.output(nodes[0] if len(nodes) == 1 else nodes)
        return self.tracer.graph

    def _add_input(self, value: onnx.ValueInfoProto, lengths: Lengths, values: dict[str, Value]) -> None:
        kind = value.type.tensor_type
        # fx generates Python code, so the placeholder's name must be a free identifier
        argument = re.sub(r"[^0-9A-Za-z]", "_", value.name)
        is_taken = keyword.iskeyword(argument) or argument in (*fx.graph._custom_builtins, "self")
        if is_taken or not argument.isidentifier():
            argument = f"input_{argument}"
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):  # a sequence, or of unknown rank
            values[value.name] = self.tracer.placeholder(argument, None)
            return
        try:
            dtype = torch_dtype(kind.elem_type)
        except UnsupportedNode as error:
            self.problems.append(f"input {value.name!r}: {error}")
            return
        shapes = [[lengths[value.name, dim][side] for dim in range(len(kind.shape.dim))] for side in (0, 1)]
        probes = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        values[value.name] = self.tracer.placeholder(argument, (probes[0], probes[1]))
        values[value.name].packed = kind.elem_type if kind.elem_type in PACKED else None

    def _fix_or_free_batch(self, lengths: Lengths, values: Mapping[str, Value]) -> None:
        """Note the length of a batch that is treated as dynamic; let the graph check one that is not."""
        declared = declared_batch(self.model.graph)
        if not declared:
            return
        for value in self.inputs:
            traced = values.get(value.name)
            if not isinstance(traced, Traced) or not traced.known or not traced.ndim:
                continue
            # the first input with rows is enough: all inputs declare the same batch
            if self.batch is not None:
                self.tracer.batch = FreedBatch(declared, lengths[value.name, 0], self.tracer.size(traced, 0))
                return
            # a node of its own, since the tracer takes a static length for a number, and would check nothing
            rows = Traced(self.tracer, self.tracer.graph.call_method("size", (traced.node, 0)), (declared, declared))
            self.tracer.graph.call_function(check_rows, (rows.node, declared, value.name))

    def _output(self, declared: onnx.ValueInfoProto, value: Value) -> Value:
        """Return a result as a tensor. Shape arithmetic in int32 was done in Python ints and is cast back here."""
        result = self.tracer.to_tensor(value)
        known = isinstance(result, torch.Tensor) or (isinstance(result, Traced) and result.known)
        is_declared_int32 = declared.type.tensor_type.elem_type == TensorProto.INT32
        if known and result.dtype == torch.int64 and is_declared_int32:
            return self.tracer.call("to", result, torch.int32)
        return result

    def _add_stored(self, name: str, tensor: torch.Tensor, scaled: Collection[str]) -> Value:
        """Register a weight as a parameter and a running statistic as a buffer; any other tensor stays a constant.

        scaled: the tensors that are quantized later, with scales that follow them.
        """
        role = self.roles.get(name)
        if role is None or role.kind == "frozen":
            return tensor
        quantized = self.quantized.get(name)
        weight = tensor if quantized is None else quantized.dequantized()
        traced = self.tracer.tensor(name, nn.Parameter(weight) if role.kind == "trained" else weight)
        self.onnx_names[str(traced.node.target)] = name
        return traced if quantized is None or name in scaled else quantized.traced(self.tracer, traced)
