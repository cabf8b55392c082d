"""Read the inputs and outputs of an ONNX file, and its digest. External data is not loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import onnx

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.schema.label_axes import Dims
from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.beyond_onnx import put_right, refused
from onward.trainer.onnx_graph.files.external_ranges import external_problems, load_external
from onward.trainer.onnx_graph.files.index import all_tensors, inputs_of, known_types, length_of
from onward.trainer.onnx_graph.files.model_files import opset_problems
from onward.trainer.onnx_graph.files.source_model import SourceModel
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import (
    begin_at_numbers,
    find_preprocessing,
    preprocessing_model,
)
from onward.trainer.onnx_graph.surgery.row_layout import BoundInput, read_layout, rows_first
from onward.trainer.onnx_graph.surgery.stochastic_depth import draws_noise
from onward.trainer.onnx_graph.surgery.surgery import apply_surgery, extract_subgraph, trains_subgraph
from onward.trainer.run.durable_files import sha256

FLOAT_NAMES = ("float32", "float64", "float16", "bfloat16", "undefined")


@dataclass(frozen=True)
class TensorInfo:
    """Name, type and shape of a graph input or output."""

    name: str
    dtype: str
    """The ONNX type in lower case, as numpy writes it: float32, int64, bfloat16, string."""
    shape: Dims | None
    """None if the file declares no shape; a dimension is None if it is dynamic."""
    sequence: bool = False
    """Whether it is a sequence with one tensor for each sample; type and shape are those of a tensor then."""

    @property
    def sample_shape(self) -> Dims | None:
        """Return the shape without the batch dimension, which a sequence does not have."""
        return self.shape if self.shape is None or self.sequence else self.shape[1:]


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a graph, in the order of the graph."""

    inputs: tuple[TensorInfo, ...]
    """Without initializers, which old files list as inputs too."""
    outputs: tuple[TensorInfo, ...]
    computed: tuple[str, ...] = ()
    """The inputs that pre-processing computes from inputs of the file, when the data is read."""
    file_inputs: tuple[TensorInfo, ...] = ()
    """With pre-processing: the inputs of the file itself; else empty, as they are `inputs`."""
    draws: bool = False
    """Whether the graph draws random numbers: the trained part then has a further input NOISE behind these."""
    bound: Mapping[str, BoundInput] = field(default_factory=dict, compare=False)
    """The other inputs of the file, which have the values of `model.bind`."""

    @property
    def fed(self) -> tuple[TensorInfo, ...]:
        """Return the inputs that columns of the data feed."""
        return self.file_inputs or self.inputs

    def output(self, name: str) -> TensorInfo | None:
        """Return the output of this name (the first if `name` is empty), or None."""
        return next((output for output in self.outputs if name in ("", output.name)), None)


def read_signature(path: Path) -> Signature:
    """Read the inputs and outputs of an ONNX file.

    Raises UnsupportedModel for a file that is not ONNX, or that has no inputs or no outputs.
    """
    return _signature(_loaded(read_source(path)), path)


def read_source(path: Path, *, by_parts: bool = False) -> SourceModel:
    """Read the file of a model, once in a process that needs both its signature and its graph.

    by_parts: see `SourceModel.read`. Raises UnsupportedModel for a file that is not ONNX.
    """
    try:
        return SourceModel.read(path, by_parts=by_parts)
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read as an ONNX file: {error}") from error


def read_training_signature(model: ModelConfig) -> Signature:
    """Read the inputs and outputs of the part of the graph that is trained, after the surgery that [model] asks for.

    Raises UnsupportedModel as `read_signature` does and for pre-processing that cannot stay in front, and ConfigError
    for surgery that this graph does not allow.
    """
    return _training_signature(_loaded(read_source(model.path)), model)


def training_signature(source: SourceModel, model: ModelConfig) -> Signature:
    """Return what `read_training_signature` reads, of a file that was read already. Raises its errors."""
    return _training_signature(_loaded(replace(source, proto=deepcopy(source.proto))), model)


def _training_signature(proto: onnx.ModelProto, model: ModelConfig) -> Signature:
    """Return the signature of what is trained. Changes the model."""
    part = proto
    signature = _signature(proto, model.path)
    read = [signature.output(name) for name in model.outputs]
    trainable = all(output is None or output.dtype in FLOAT_NAMES for output in read)
    changes_weights = bool(model.num_classes or model.untie)
    changes_inputs = bool(model.bind or model.batch_axes)
    needs_surgery = not trainable or changes_weights or changes_inputs
    if needs_surgery or trains_subgraph(proto, model):
        # the seed only decides the values of a new head, which a signature does not contain
        apply_surgery(proto, model, seed=0)
        part = extract_subgraph(proto, model)
    draws = draws_noise(part, model.path.parent)
    bound = read_layout(part.graph, model).bound
    signature = replace(_signature(rows_first(part, model), model.path), draws=draws, bound=bound)
    # strings cannot be trained on: the trained part begins behind the nodes that read them
    behind = begin_at_numbers(proto, model)
    if behind.start == model.start:
        return signature
    part = extract_subgraph(proto, behind)
    trained = _signature(rows_first(part, behind), model.path)
    draws = draws_noise(part, model.path.parent)
    return replace(trained, computed=behind.start, file_inputs=signature.inputs, draws=draws, bound=bound)


def read_preprocessing(model: ModelConfig) -> onnx.ModelProto | None:
    """Return the pre-processing in front of the trained part as a model that holds all of its tensors, or None.

    Raises the errors of `read_training_signature`.
    """
    proto = _loaded(read_source(model.path))
    apply_surgery(proto, model, seed=0)
    if (found := find_preprocessing(proto, model)) is None:
        return None
    front = rows_first(preprocessing_model(proto, found), model)
    if problems := external_problems(front, model.path.parent):
        raise UnsupportedModel(problems)
    load_external(all_tensors(front), model.path.parent)
    return front


def model_digest(path: Path) -> str:
    """Return the digest of a model: of its file and of its external data files (see `digest_of_files`)."""
    return digest_of_files(model_files(path))


class ModelFacts(NamedTuple):
    """What is asked of a file before it is trained, in every process that opens it."""

    signature: Signature
    """Of the trained part."""
    size_bytes: int
    """Of the file and of its external data."""


def facts_of(source: SourceModel, model: ModelConfig) -> ModelFacts:
    """Return the facts of a file that was read, whose graph stays as it is. Raises as `training_signature`."""
    return ModelFacts(training_signature(source, model), sum(file.stat().st_size for file in source.files))


def model_bytes(path: Path) -> int:
    """Return the size of a model: of its file and of its external data files."""
    return sum(file.stat().st_size for file in model_files(path))


def model_files(path: Path) -> list[Path]:
    """Return a model's file and its external data files."""
    try:
        return SourceModel.read(path).files
    except UnsupportedModel:
        return [path]  # not an ONNX file: whoever reads it reports that


def digest_of_files(files: Sequence[Path]) -> str:
    """Return the SHA-256 of a file; of several, the SHA-256 of their digests in this order."""
    digests = list(map(sha256, files))
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _loaded(source: SourceModel) -> onnx.ModelProto:
    """Return the graph of a file, put right in place."""
    model = source.proto
    if problems := [*opset_problems(model), *refused(model)]:
        raise UnsupportedModel(f"{source.path}: {problem}" for problem in problems)
    put_right(model)
    return model


def _signature(model: onnx.ModelProto, path: Path) -> Signature:
    graph = model.graph
    inputs = tuple(map(_info, inputs_of(graph)))
    outputs = tuple(_info(value) for value in graph.output)
    if any(info.shape is None for info in outputs):  # what the file does not declare may be inferred
        types = known_types(model)
        outputs = tuple(_info(types.get(info.name, value)) for info, value in zip(outputs, graph.output, strict=True))
    if not inputs or not outputs:
        raise UnsupportedModel(f"{path} has {len(inputs)} inputs and {len(outputs)} outputs; both need at least one")
    return Signature(inputs, outputs)


def _info(value: onnx.ValueInfoProto) -> TensorInfo:
    sequence = value.type.HasField("sequence_type")
    tensor = (value.type.sequence_type.elem_type if sequence else value.type).tensor_type
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    dtype = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    known = tensor.HasField("shape")
    dims = [length_of(dim) for dim in tensor.shape.dim]
    return TensorInfo(value.name, dtype, tuple(dims) if known else None, sequence)
