"""Make what the guard compares: of a run, on the user's rows, or of a file alone with a loss that is made up."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.data.batches.batches import Batch, one_batch
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.diagnostics.doctor import Diagnosis
from onward.trainer.errors import ConfigError, reason_of
from onward.trainer.export.measuring.helper_nodes import costly_helpers
from onward.trainer.export.measuring.kernel_rounding import exact_form
from onward.trainer.export.model_file import ModelFile, full_copy, proto_of
from onward.trainer.model.first_output_units import with_first_units
from onward.trainer.model.trainable import TrainableModel, merged_module, open_trainable
from onward.trainer.onnx_graph.outputs import readable_output
from onward.trainer.onnx_graph.surgery.row_layout import rows_first
from onward.trainer.onnx_graph.surgery.stochastic_depth import random_nodes
from onward.trainer.onnx_import.driver import load_model
from onward.trainer.onnx_import.fixed_batch.fixed_batch import made_up_rows
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights, stored_weights
from onward.trainer.onnx_import.quantization.quantized_weights import integer_names
from onward.trainer.onnx_import.tracing.trial_sizes import declared_batch
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.rehearsal.guards.guard import Guarded, GuardError, guard
from onward.trainer.rehearsal.parity import NotCompared, part_in_inference_form
from onward.trainer.rehearsal.rehearsed_graph import RehearsedGraph
from onward.trainer.run.records import ExporterWarning, Guard

ROWS = 2
"""Rows on which a file is compared: the second path may be slow."""
Written = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def guarded_file(
    file: ModelFile | onnx.ModelProto,
    module: ImportedGraph,
    inputs: tuple[Tensor, ...],
    *,
    rows: Sequence[int] = (),
    tolerance: float = 1e-3,
) -> Guarded:
    """Return a file and its module with a made-up loss: a fixed random combination of all float outputs."""

    def loss(outputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        total = torch.zeros((), dtype=dtype)
        for output in outputs:
            if isinstance(output, Tensor) and output.is_floating_point():
                # random factors: a plain sum would not see two outputs exchanged
                factors = torch.randn(output.shape, generator=generator, dtype=torch.float64)
                total = total + (output.to(dtype) * factors.to(dtype)).sum() / max(output.numel(), 1) ** 0.5
        return total

    def gradients() -> Mapping[str, Tensor | None]:
        module.eval().zero_grad(set_to_none=True)
        results = module(*inputs)
        value = loss([results] if isinstance(results, Tensor) else list(results), torch.float32)
        # the outputs of a graph without trained weights have no gradient
        if value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]
        found = gradients_of(module)
        module.zero_grad(set_to_none=True)
        return found

    proto = proto_of(file)
    why = why_not_derived(proto, module)
    batch = len(inputs[0]) if inputs and inputs[0].ndim else 1
    # a batch and a single row: a node that mixes rows gives other results for one of them
    sizes = tuple(rows) or tuple(dict.fromkeys((batch, 1)))
    written = None if why else written_as_trained(module)
    return Guarded(file, module, inputs, sizes, tolerance, loss, gradients, written, why)


def guarded_run(
    file: ModelFile | onnx.ModelProto, trainable: TrainableModel, graph: RehearsedGraph, batch: Batch, tolerance: float
) -> Guarded:
    """Return a run's file and module, with the run's losses on a batch of its rows.

    Raises ConfigError if the loss fits neither output nor labels.
    """
    module = trainable.module
    # without autocast: the derivative of the file is compared in full precision
    exact = replace(graph, autocast=contextlib.nullcontext, metrics=())

    def loss(outputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        labels = list(batch.labels)
        for position, label in enumerate(labels):
            if label is not None and label.is_floating_point():
                # in the type of the outputs, so that the labels do not round the loss
                labels[position] = label.to(dtype)
        try:
            return graph.loss_of(batch.own_rows(outputs), replace(batch, labels=tuple(labels)))
        except ConfigError as error:
            raise RuntimeError(f"the loss is not computed in {str(dtype).removeprefix('torch.')}: {error}") from error

    def gradients() -> Mapping[str, Tensor | None]:
        # the mode of a padding micro-batch: forward and backward without any change of running statistics
        exact.run("padding", batch)
        found = gradients_of(module)
        module.zero_grad(set_to_none=True)
        return found

    assigns = any(each.rule.has_grid for each in [loss.config for loss in graph.losses.each])
    proto = proto_of(file)
    why = why_not_derived(proto, module)
    if graph.module is not module:
        why = "with a teacher, the loss depends on a second model"
    elif not any(batch.num_targets):
        why = f"the first {batch.size} rows have no label that counts"
    written = None if why else written_with_adapters(trainable) if trainable.adapters else written_as_trained(module)
    # a file with a fixed batch, or rows that fill one up, runs at that size alone
    rows = len(batch.inputs[0])
    sizes = (rows,) if batch.filled_to or declared_batch(proto.graph) else tuple(dict.fromkeys((rows, 1)))
    compared = _linear_loss(exact, batch) if assigns and not why else loss
    return Guarded(file, module, batch.inputs, sizes, tolerance, compared, gradients, written, why)


def _linear_loss(graph: RehearsedGraph, batch: Batch) -> Callable[[Sequence[Tensor], torch.dtype], Tensor]:
    """Return a loss with the gradient that the run's loss has at the outputs of this batch: sum of gradient x output.

    Its targets depend on the outputs, and no gradient goes through them: its difference is not what its gradient says.
    """
    with torch.enable_grad():
        outputs = [each.detach().requires_grad_() for each in graph.outputs(batch)]
        factors = torch.autograd.grad(graph.loss_of(outputs, batch), outputs)

    def loss(found: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        rows = batch.own_rows(found)
        parts = [(each.to(dtype) * own.to(dtype)).sum() for each, own in zip(rows, factors, strict=True)]
        return torch.stack(parts).sum()

    return loss


def guard_run(
    model: ModelConfig,
    losses: Sequence[LossConfig],
    export: ExportConfig,
    trainable: TrainableModel,
    graph: RehearsedGraph,
    batch: Callable[[], Batch],
    findings: Findings,
) -> None:
    """Compare values at other sizes, and one derivative of the loss (guard.py)."""
    # what does not run at all is reported already
    if findings.failures or findings.errors or not findings.batches:
        return
    try:
        with tempfile.TemporaryDirectory(prefix="onward-guard-") as folder:
            part = part_in_inference_form(trainable, model, losses, Path(folder))
            file = _with_rows_first(part, model)
            findings.guard = guard(guarded_run(file, trainable, graph, batch(), export.tolerance))
    except GuardError as error:
        findings.refuse(str(error))
    except NotCompared as why:
        findings.not_rehearsed.append(f"the guard: {why}")
    except Exception as error:  # whatever torch, onnxruntime and onnx.reference raise: the passes before it have run
        findings.not_rehearsed.append(f"the guard: {reason_of(error)}")


def with_guard(found: Diagnosis, config: RunConfig | None = None) -> Diagnosis:
    """Return the diagnosis of a file with the comparison of the file and its module, if it can be imported."""
    if not (found.importable and found.totals["trained"].tensors):
        return found
    compared, warnings = guard_of_file(found.path, config)
    warnings += helper_warnings(found.path)
    return found.model_copy(update={"guard": compared, "warnings": (*found.warnings, *warnings)})


def helper_warnings(path: Path) -> tuple[ExporterWarning, ...]:
    """Return a warning if helper nodes take a good part of a file's time on made-up rows; () if that is not known."""
    try:
        file = ModelFile.read(path)
        rows = next(iter(made_up_rows(file.proto, declared_batch(file.proto.graph) or ROWS)))
        fed = [value.name for value in file.proto.graph.input]
        found = costly_helpers(file, {name: each.numpy() for name, each in zip(fed, rows, strict=True)})
    except Exception:  # whatever a file makes onnxruntime raise; the guard has said what does not run
        return ()
    remedy = "nothing to do: the export writes the variant `optimized` beside the file, which is the one to serve"
    return (ExporterWarning(key="helper_nodes", what=str(found), remedy=remedy),) if found else ()


def guard_of_file(path: Path, config: RunConfig | None = None) -> tuple[Guard | None, tuple[ExporterWarning, ...]]:
    """Compare a file with its module, on the first rows of a configuration's data, or on made-up rows without one.

    Returns the record, None if the file cannot be imported or run, and a warning for what is wrong or was not had.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="onward-guard-") as folder:
            return guard(_opened(path, config, Path(folder))), ()
    except GuardError as error:
        remedy = "do not train this file until it is fixed; a run of it is refused"
        return None, (ExporterWarning(key="guard", what=str(error), remedy=remedy),)
    except Exception as error:  # whatever a file makes torch, onnxruntime or onnx raise
        said = f"the file was not compared with its module: {reason_of(error)}"
        return None, (ExporterWarning(key="guard", what=said, remedy="give `onward doctor` rows of your data as well"),)


def _opened(path: Path, config: RunConfig | None, folder: Path) -> Guarded:
    if config is None:
        # a configuration with a loss of the outputs, only so that the file can be opened as for training
        model = load_model(path)
        output = readable_output(model)
        raw = {"model": {"path": path, "output": output}, "data": {"source": "made-up"}, "train": {"num_steps": 1}}
        config = RunConfig.model_validate(raw | {"loss": ({"name": "output"},)})
        inputs = None
    else:
        signature = read_training_signature(config.model)
        rows = read_first_rows(config, signature, ROWS)
        number = declared_batch(load_model(path).graph) or ROWS
        inputs = one_batch(rows, config, signature, np.arange(number), training=False).inputs
    trainable = open_trainable(with_first_units(config))
    file = _with_rows_first(part_in_inference_form(trainable, config.model, config.losses, folder), config.model)
    if inputs is None:
        inputs = _made_up(file, trainable.module)
    proto = proto_of(file)
    sizes = (len(inputs[0]),) if declared_batch(proto.graph) else ()
    return guarded_file(file, trainable.module, inputs, rows=sizes, tolerance=config.export.tolerance)


def _with_rows_first(file: ModelFile | onnx.ModelProto, model: ModelConfig) -> ModelFile | onnx.ModelProto:
    """Return a file that is fed the rows of the data alone: bound inputs are constants, and rows are on axis 0."""
    proto = proto_of(file)
    if rows_first(proto, model) is proto:
        return file
    return rows_first(full_copy(file), model)


def _made_up(file: ModelFile | onnx.ModelProto, module: ImportedGraph) -> tuple[Tensor, ...]:
    """Return the first made-up rows on which the module runs. Raises ValueError if there are none."""
    proto = proto_of(file)
    number = declared_batch(proto.graph) or ROWS
    for inputs in made_up_rows(proto, number):
        # made-up values may be out of range for some node: the next kind of values is tried
        with contextlib.suppress(Exception), torch.no_grad():
            module.eval()(*inputs)
            return tuple(inputs)
    raise ValueError("it runs on no rows that could be made up")


def gradients_of(module: ImportedGraph) -> dict[str, Tensor | None]:
    """Return the gradients of the trained weights, copied, by initializer name."""
    trained = {name: each for name, each in named_weights(module).items() if each.requires_grad}
    return {name: None if each.grad is None else each.grad.clone() for name, each in trained.items()}


def written_as_trained(module: ImportedGraph) -> Written:
    """Return what maps values of the trained weights to the tensors of the file: themselves, and tied copies."""
    copies = copy.copy(module.copies)

    def written(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # a tied weight is one parameter that the file stores twice, the copy perhaps transposed
        tied = {name: values[of].t() if transposed else values[of] for name, (of, transposed) in copies.items()}
        return {**values, **tied}

    return written


def written_with_adapters(trainable: TrainableModel) -> Written:
    """Return what adds adapters into the weights of the file, in float64."""
    # a copy in fp64: the sum of weight and adapter is compared, not its rounding
    exact = replace(trainable, module=copy.deepcopy(trainable.module).double())

    def written(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with torch.no_grad():
            for name, weight in named_weights(exact.module).items():
                weight.copy_(values[name])
        return {name: each.detach().clone() for name, each in stored_weights(merged_module(exact)).items()}

    return written


def why_not_derived(proto: onnx.ModelProto, module: ImportedGraph) -> str:
    """Return why the loss of the file has no derivative that could be compared; "" if it has."""
    if names := random_nodes(proto):
        return f"{len(names)} nodes draw random numbers ({', '.join(names[:3])})"
    # operators inside of functions count, too
    nodes = (*proto.graph.node, *(node for function in proto.functions for node in function.node))
    operators = {node.op_type for node in nodes}
    if any(part in operator for operator in operators for part in ("Quantize", "QLinear", "Integer")):
        return "the file rounds to integers, and training passes gradients through the rounding"
    trained = {name for name, role in module.roles.items() if role.kind == "trained"}
    if names := sorted(integer_names(proto.graph) & trained):
        return f"{len(names)} trained weights are stored as integers ({names[0]}, ...), so that the loss has steps"
    if form := exact_form(proto):
        return f"onnxruntime's kernels round inside the file ({form.kernels})"
    if module.quantizers:
        return "scales of quantization follow the weights"
    return ""
