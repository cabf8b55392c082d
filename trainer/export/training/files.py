"""Write training as four files of standard ONNX that stock onnxruntime runs without torch.

    model_with_loss.onnx   the graph as the file has it, and the loss on it
    eval.onnx              in inference form: loss, outputs, accuracy; its weights are optional inputs
    training.onnx          inputs, labels and weights -> loss, gradients, new running statistics
    optimizer.onnx         weights, gradients, state, step, learning rate -> new weights, new state
    weights.npz            where to start: weights and running statistics, as training.onnx takes them
    training.json          `TrainingArtifacts`: every name, and what it is

One step without torch, `names` being training.json (tests/equivalence/test_trained_by_onnxruntime_alone.py):

    results = training.run(feed | weights | statistics)
    statistics = {name: results[new] for name, new in names.statistics.items()}
    results = optimizer.run(weights | gradients | state | step | learning_rate)

training.onnx computes in fp32 whatever the file stores. Its Dropout draws a new mask at every run; the regulariser
of [graph] dropout and the adapters of [lora] are Onward's own and not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
from pydantic import BaseModel, ConfigDict

from onward.trainer.config.losses import LossConfig, export_problems
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.update_rules import training_files_problems
from onward.trainer.data.formats.npz_files import npz_content
from onward.trainer.errors import ExportRefused
from onward.trainer.export.training.gradients import gradient_of, training_model, updated
from onward.trainer.export.training.loss_graph import (
    LossModel,
    LossNames,
    evaluation_model,
    loss_names,
    model_with_loss,
)
from onward.trainer.export.training.optimizer_graph import optimizer_model
from onward.trainer.model.layer_scales import layer_scales
from onward.trainer.onnx_graph.files.external_ranges import load_external
from onward.trainer.onnx_graph.files.index import all_tensors, length_of
from onward.trainer.onnx_graph.files.whole_models import MOST_BYTES
from onward.trainer.onnx_graph.inner_tensors import lift_inner_tensors
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.onnx_import.quantization.quantized_weights import integer_names
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.quantities import gib
from onward.trainer.run.durable_files import durable_file, sha256, write_durably
from onward.trainer.run.records import write_record


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Value(_Record):
    """An input or an output of one of the files."""

    name: str
    element_type: str
    """As ONNX calls it: FLOAT, INT64 ..."""
    dims: tuple[int | str, ...]
    """A string is a dynamic dimension."""


class Artifact(_Record):
    """One file."""

    file: str
    sha256: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class WeightNames(_Record):
    """The names that belong to one trained weight, which itself is named as its initializer."""

    gradient: str
    """Output of training.onnx, input of optimizer.onnx."""
    updated: str
    """Output of optimizer.onnx."""
    state: dict[str, str]
    """Inputs of optimizer.onnx -> its outputs that are their next values; zeros before the first step."""


class LossRecord(_Record):
    """One loss, and the names that belong to it."""

    title: str
    """What its metrics are named after in a run with several losses."""
    labels: str
    """Input of the first three files, whose element type and shape are in `files`; empty when the loss takes none."""
    mean: str
    """Output of the first three: the mean over the targets that count, before the weight."""
    weight: float
    count: str
    correct: str
    """Outputs of eval.onnx: targets that count, and the right ones among them; empty where there is no accuracy."""


class TrainingArtifacts(_Record):
    """training.json: the files and every name in them."""

    files: dict[str, Artifact]
    """`model_with_loss`, `eval`, `training` and `optimizer`."""
    start: str
    """The file with the initial weights and running statistics."""
    loss: str
    """Output of the first three: the sum over the losses of weight x mean."""
    losses: tuple[LossRecord, ...]
    """In the order of the configuration."""
    labels: str
    count: str
    correct: str
    """As in `losses`, of a run with one loss; else empty."""
    weights: dict[str, WeightNames]
    statistics: dict[str, str]
    """Running statistics: inputs of training.onnx -> its outputs that are their next values."""
    copies: dict[str, tuple[str, bool]]
    """Initializer of the inference file -> the weight it is a copy of, and whether transposed."""
    step: str = "step"
    """Input of optimizer.onnx: the number of the update, from 1."""
    learning_rate: str = "learning_rate"
    """Input of optimizer.onnx."""
    gradient_norm: str = "gradient_norm"
    """Output of optimizer.onnx: the global norm before clipping; nothing is usable when it is not finite."""


def _loss_records(losses: Sequence[LossConfig], names: LossNames, evaluation: LossModel) -> tuple[LossRecord, ...]:
    columns = zip(names.titles, names.labels, names.means, losses, evaluation.counts, evaluation.corrects, strict=True)
    return tuple(
        LossRecord(title=title, labels=labels, mean=mean, weight=loss.weight, count=count, correct=correct)
        for title, labels, mean, loss, count, correct in columns
    )


def _imported(model: onnx.ModelProto, config: ModelConfig, *, fuse: bool) -> ImportedGraph:
    module = to_module(model, fuse=fuse, tie=config.tie, train=config.train, widen=not config.keeps_batch)
    select_trained(module, train=config.train, freeze=config.freeze)
    return module


def _layer_scales(model: onnx.ModelProto, config: ModelConfig, layer_decay: float, *, fuse: bool) -> dict[str, float]:
    """Return name -> factor on the learning rate, by the layers of the graph as training imports it."""
    if layer_decay == 1.0:
        return {}
    return layer_scales(_imported(model, config, fuse=fuse), layer_decay)


def write_artifacts(folder: Path, model: onnx.ModelProto, config: RunConfig, *, base: Path) -> TrainingArtifacts:
    """Write the four files, the initial weights and training.json into `folder`; each is complete or absent.

    `model`: the trained file; `base`: its directory. Raises UnsupportedModel when it cannot be differentiated or
    translated, ExportRefused when a loss or the optimizer has no ONNX form, a file would pass 2 GB or onnx.checker
    refuses one; nothing is written then.
    """
    if problems := [
        *export_problems(config.losses),
        *training_files_problems(config.optimizer.name),
    ]:  # `onward export --variant training` of a run that does not say so
        raise ExportRefused(problems)
    # each file must load without others beside it
    # what inner graphs and functions store would be renamed where functions are inlined
    model = lift_inner_tensors(_whole(model, base))
    # without fusion: the fused kernels would be decomposed into these calls again (decompositions.py)
    module = _imported(model, config.model, fuse=False)
    if integers := sorted(integer_names(model.graph) & set(named_weights(module))):
        raise ExportRefused(
            f"{len(integers)} trained weights are stored as integers ({integers[0]}, ...), and training.onnx would "
            "need them as floats: leave the variant 'training' out"
        )
    losses = config.losses
    names = loss_names(model, losses)
    training = training_model(module, model, losses, names=names)
    tensors = {name: tensor.detach() for name, tensor in named_weights(module).items()}
    trained = {name: tensors[name] for name in training.weights}
    update = optimizer_model(
        config.optimizer,
        trained,
        clip_norm=config.train.clip_norm,
        layer_scales=_layer_scales(model, config.model, config.optimizer.layer_decay, fuse=config.graph.fuse),
    )
    own = [*training.weights, *training.statistics]
    evaluation = evaluation_model(model, losses, names=names, weights=own, copies=module.copies)
    files = {
        "model_with_loss.onnx": model_with_loss(model, losses, names=names),
        "eval.onnx": evaluation.model,
        "training.onnx": training.model,
        "optimizer.onnx": update.model,
    }
    # all of them are serialized and checked before the first is written, so an error leaves no file
    contents = {name: _content(name, proto) for name, proto in files.items()}
    for name, content in contents.items():
        with durable_file(folder / name) as file:
            file.write_bytes(content)
    write_durably(folder / "weights.npz", npz_content({name: tensors[name].numpy() for name in own}))
    artifacts = {name.removesuffix(".onnx"): _artifact(folder / name, proto) for name, proto in files.items()}
    records = _loss_records(losses, names, evaluation)
    labels = count = correct = ""
    if len(records) == 1:  # the names of a single loss stand at the top of the record, too
        labels, count, correct = records[0].labels, records[0].count, records[0].correct
    record = TrainingArtifacts(
        files=artifacts,
        start="weights.npz",
        loss=names.loss,
        losses=records,
        labels=labels,
        count=count,
        correct=correct,
        weights={name: _weight_names(name, update.state[name]) for name in training.weights},
        statistics={name: updated(name) for name in training.statistics},
        copies=module.copies,
    )
    write_record(folder / "training.json", record)
    return record


def _whole(model: onnx.ModelProto, base: Path) -> onnx.ModelProto:
    """Return a copy of the model that contains its external data."""
    size = sum(int(np.prod(t.dims)) * _itemsize(t) for t in all_tensors(model))
    if size > MOST_BYTES:
        raise ExportRefused(
            f"the weights are {gib(size)}; model_with_loss.onnx and eval.onnx hold at most 2 GB: "
            "leave the variant 'training' out"
        )
    copy = deepcopy(model)
    load_external(all_tensors(copy), base)
    return copy


def _itemsize(tensor: onnx.TensorProto) -> float:
    try:
        return float(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except KeyError:
        return 1.0


def _content(name: str, model: onnx.ModelProto) -> bytes:
    """Serialize a model. Raises ExportRefused when it is too large or onnx.checker refuses it."""
    if (size := model.ByteSize()) > MOST_BYTES:
        raise ExportRefused(f"{name} would be {gib(size)}; one ONNX file holds at most 2 GB")
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # the checker's, and shape inference's own: they share no base
        raise ExportRefused(f"{name}: onnx.checker: {error}") from error
    return bytes(model.SerializeToString())


def _weight_names(weight: str, state: Mapping[str, str]) -> WeightNames:
    following = {name: updated(name) for name in state.values()}
    return WeightNames(gradient=gradient_of(weight), updated=updated(weight), state=following)


def _artifact(path: Path, model: onnx.ModelProto) -> Artifact:
    inputs = tuple(map(_value, model.graph.input))
    outputs = tuple(map(_value, model.graph.output))
    return Artifact(file=path.name, sha256=sha256(path), inputs=inputs, outputs=outputs)


def _value(value: onnx.ValueInfoProto) -> Value:
    kind = value.type.tensor_type
    dims: list[int | str] = []
    for dim in kind.shape.dim:
        length = length_of(dim)
        dims.append(dim.dim_param or ("?" if length is None else length))
    return Value(name=value.name, element_type=onnx.TensorProto.DataType.Name(kind.elem_type), dims=tuple(dims))
