"""Make the module that a configuration trains from its ONNX file, and turn it back into one that can be written.

model.onnx
    -> surgery: untie weights, replace the head
    -> nodes that give an output its label's units   (loss.standardise_label)
    -> adapters beside quantized weights             `TrainableModel.model`, the whole graph that is written back
    -> cut from model.start, or the end of the pre-processing, to model.output
    -> rows on axis 0, constants for bound inputs    (model.bind, model.batch_axes)
    -> import as a torch.fx graph
    -> add the input of its noise, if it draws any
    -> add dropout (graph.dropout)
    -> add adapters (lora.weights)                   `TrainableModel.module`, what is trained

merged_module: adapters added into the weights, the graph as it was before them -> write_back.write_model
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import torch
from torch import Tensor, fx

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.model import LoraConfig, ModelConfig
from onward.trainer.distributed.weights import check_fit
from onward.trainer.errors import ConfigError
from onward.trainer.model.adapters import Adapter, add_adapters, merge_adapters
from onward.trainer.model.choose_fixed_batch import use_of_part
from onward.trainer.model.teacher.teacher_model import with_teacher
from onward.trainer.onnx_graph.files.source_model import SourceModel
from onward.trainer.onnx_graph.surgery import surgery
from onward.trainer.onnx_graph.surgery.output_units import add_output_units
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import begin_at_numbers
from onward.trainer.onnx_graph.surgery.quantized_adapters import add_quantized_adapters
from onward.trainer.onnx_graph.surgery.row_layout import rows_first
from onward.trainer.onnx_graph.surgery.stochastic_depth import draws_noise
from onward.trainer.onnx_import.driver import checked_model, load_model, to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.onnx_import.lowering.converters import load_converters
from onward.trainer.onnx_import.passes.dropout import add_dropout
from onward.trainer.onnx_import.passes.noise import add_noise_input
from onward.trainer.onnx_import.tracing.trial_sizes import declared_batch
from onward.trainer.onnx_import.train_selection import select_trained

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainableModel:
    """A module to train, and the ONNX graph that its weights are written into."""

    module: ImportedGraph
    """On the CPU. Its weights, frozen ones and adapters included, are `named_weights(module)`."""
    model: onnx.ModelProto
    """The whole graph after surgery, with untrained weights: those of the file, and those of a new head."""
    base: Path
    """The directory of the model's external data."""
    adapters: tuple[Adapter, ...]
    graph_without_adapters: fx.Graph
    dropout: tuple[str, ...]
    """The nodes after which `graph.dropout` was added."""


def open_with_teacher(
    config: RunConfig, *, source: SourceModel | None = None, cached: bool = False, by_parts: bool = False
) -> TrainableModel:
    """Return what `open_trainable` does, with the teacher in the module if there is one; the same bits on every rank.

    With a teacher the result is for training only: it cannot be written back. source: as in `open_trainable`. cached,
    by_parts: as in `with_teacher`. Not collective. Raises the errors of `open_trainable` and `with_teacher`.
    """
    students = tuple(loss.student for loss in config.soft_losses if loss.student)
    trainable = open_trainable(config, source=source, also=students, by_parts=by_parts)
    if not config.teacher.path:
        return trainable
    return replace(trainable, module=with_teacher(trainable.module, config, cached=cached, by_parts=by_parts))


def open_trainable(
    config: RunConfig, *, source: SourceModel | None = None, also: Sequence[str] = (), by_parts: bool = False
) -> TrainableModel:
    """Load the ONNX file and make the module that the configuration trains; the same bits on every rank.

    source: the file as it was read, whose graph is changed in place and becomes `model`; None = it is read here. also:
    tensors of the file that the module returns behind those that the losses read, if they are not among them. by_parts:
    the module is only divided, and never computes: large weights stay in their file, mapped, until then, and `model`
    must not be written. Not collective. Raises ConfigError when file and configuration contradict each other,
    UnsupportedModel when the file cannot be trained.
    """
    load_converters(config.model.converters)
    model = checked_model(source) if source else load_model(config.model.path, by_parts=by_parts)
    base = config.model.path.parent
    # on the whole graph, which is written back at the end; what is cut out of it below is trained
    surgery.apply_surgery(model, config.model, seed=config.train.seed)
    add_output_units(model, config.losses)
    beside = add_quantized_adapters(model, config.lora, seed=config.train.seed)
    settings = begin_at_numbers(model, config.model)
    if also:
        returned = tuple(dict.fromkeys((*settings.named_outputs(model.graph.output[0].name), *also)))
        settings = settings.model_copy(update={"output": returned})
    part = rows_first(surgery.extract_subgraph(model, settings), settings)
    # adapters beside quantized weights are trained, whatever the analysis of roles makes of them
    chosen = (*config.model.train, *config.lora.also_train, *beside)
    widen = _widen(part, config.model, config.lora)
    module = to_module(
        part,
        base=base,
        fuse=config.graph.fuse,
        tie=config.model.tie,
        train=chosen,
        widen=widen,
        scales=config.quantize.scales,
        by_parts=by_parts,
    )
    if config.quantize.scales == "train" and not module.quantizers:
        raise ConfigError(
            "quantize.scales = 'train': no scale of this graph can be trained; it needs QuantizeLinear and "
            "DequantizeLinear, or Cast and Mul of stored integers, with positive scales that are stored in fp32"
        )
    if draws_noise(part, base):
        add_noise_input(module)
    dropout = _add_dropout(module, config.graph.dropout)
    # `merged_module` needs the graph as it is here; adapters are inserted into the other one
    plain = copy.deepcopy(module.graph)
    # without adapters the weights of the file are trained, with them only the adapters and lora.also_train
    if not config.lora.weights:
        select_trained(module, train=config.model.train, freeze=settings.freeze)
        return TrainableModel(module, model, base, (), plain, dropout)
    adapters = add_adapters(module, config.lora, beside=beside, seed=config.train.seed)
    own = tuple(name for adapter in adapters for name in (adapter.a, adapter.b))
    # the weights of the file are not named, so that they stay as they are
    select_trained(module, train=(*own, *beside, *config.lora.also_train), freeze=settings.freeze)
    return TrainableModel(module, model, base, adapters, plain, dropout)


def _widen(part: onnx.ModelProto, model: ModelConfig, lora: LoraConfig) -> bool:
    """Return whether the graph is imported for every batch size, as `model.fixed_batch` says.

    The flow has replaced "auto"; a rank that is started by hand proves it again.
    """
    if model.fixed_batch == "auto" and declared_batch(part.graph):
        use = use_of_part(part, model, lora)
        if use.kind != "any":
            raise ConfigError(
                f"the file declares a batch of {use.declared}, and no other is proved right: {use.reason}; set "
                f"model.fixed_batch = {use.kind!r}"
            )
    return not model.keeps_batch


def _add_dropout(module: ImportedGraph, ratio: float) -> tuple[str, ...]:
    if not ratio:
        return ()
    places = tuple(add_dropout(module, ratio))
    if not places:
        raise ConfigError(
            f"graph.dropout {ratio:g}: the graph has no embedding, residual branch or attention to put it on; remove it"
        )
    log.info("dropout of %g was added after: %s", ratio, ", ".join(places))
    return places


def merged_module(trainable: TrainableModel) -> ImportedGraph:
    """Return a module whose weights are those of the file: the trained module with its adapters merged.

    It computes the same results and shares all tensors with the trained module, except the merged ones.
    """
    if not trainable.adapters:
        return trainable.module
    return merge_adapters(trainable.module, trainable.graph_without_adapters, trainable.adapters)


def load_weights(module: ImportedGraph, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors, by initializer name, into the module. Raises CheckpointError unless all names and shapes match."""
    own = named_weights(module)
    expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
    check_fit("the checkpoint", {name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
