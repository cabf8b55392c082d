"""List the checks of a rehearsal, in their order: warnings, micro-batches of each size with their gradients, parity."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.metrics import read_as_logits
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.data.batches.batches import Batch, one_batch
from onward.trainer.data.batches.step_shares import check_last_samples
from onward.trainer.data.file_rows import FileRows
from onward.trainer.data.resolve import resolve
from onward.trainer.data.schema.signature import ModelFacts, facts_of, read_source
from onward.trainer.data.storage.first_rows import FirstRows, read_first_rows
from onward.trainer.diagnostics.audit_input import audit_of_run
from onward.trainer.diagnostics.exporter_warnings import exporter_warnings, refused_warnings
from onward.trainer.diagnostics.output_warnings import output_warnings
from onward.trainer.distributed.arithmetic import resolve_precision
from onward.trainer.distributed.preflight import free_memory
from onward.trainer.errors import ConfigError, ExportRefused, Refused, few, reason_of
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.model.precision import autocast
from onward.trainer.model.trainable import TrainableModel
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import begin_at_numbers
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph
from onward.trainer.onnx_import.fixed_batch.fixed_batch import BatchUse
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.quantities import gib
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.rehearsal.guards.batch_checks import (
    check_cache,
    label_warnings,
    same_teacher,
    update_problems,
    update_warnings,
)
from onward.trainer.rehearsal.guards.guarded_files import ROWS, guard_run
from onward.trainer.rehearsal.guards.loss_checks import check_counts, check_empty_labels, check_sums
from onward.trainer.rehearsal.longest_rows import remedy_of_length
from onward.trainer.rehearsal.needs import least_needs
from onward.trainer.rehearsal.parity import NotCompared, compare_untrained
from onward.trainer.rehearsal.rehearsed_graph import RehearsedGraph
from onward.trainer.rehearsal.sizes import Kind, Size, sizes_of_run
from onward.trainer.rehearsal.trials.compile_trial import decide, not_compiled
from onward.trainer.rehearsal.trials.precision_trial import time_precisions

CPU = torch.device("cpu")
PARITY_ROWS = 8
"""Rows on which the untrained file is compared; export compares batches of all sizes."""
TIMED_S = 5.0
"""The precisions are compared if a micro-batch takes no longer."""

Check = tuple[str, Callable[[], None]]
"""What is checked, for the record if it is left out; and the check."""


def checks(
    config: RunConfig,
    trainable: TrainableModel,
    use: BatchUse,
    findings: Findings,
    begin_again: Callable[[float], None] = lambda limit_s: None,
    *,
    with_teacher: ImportedGraph | None = None,
    facts: ModelFacts | None = None,
) -> list[Check]:
    """Return the checks of a run. Each adds to `findings`, and raises no error of the graph.

    use: as `config.model.fixed_batch`. begin_again: sets another time limit, in seconds from now. with_teacher: what is
    trained, if it is another module. facts: None = the file is read for them. Raises DataError when there are no rows.
    """
    arithmetic = _arithmetic(config.precision, config.launch, findings)
    if config.graph.compile == "auto":
        findings.compile = not_compiled("the rehearsal ended before it was tried")
    elif config.graph.compile:
        findings.not_rehearsed.append("the compiled graph (graph.compile): compiling it takes long, so it ran eagerly")
    torch.manual_seed(config.train.seed)
    signature, size_bytes = facts or facts_of(read_source(config.model.path, by_parts=True), config.model)
    most = max(config.micro_batch_size, config.evaluation_batch_size, PARITY_ROWS)
    rows = read_first_rows(config, signature, most)
    config = resolve(config, rows, signature)
    trained = with_teacher or trainable.module
    graph = RehearsedGraph(
        trained,
        Losses(config.losses, trained.output_names, trained.output_shapes, soft=config.soft_losses),
        autocast=partial(autocast, arithmetic, CPU),
        metrics=config.metrics,
    )
    check_cache(config.teacher, config.soft_losses, rows, trained, findings)
    if rows.counts is None and (config.train.num_epochs or rows.num_rows > 1):
        findings.not_rehearsed.append(
            "the smaller micro-batches at the end of the data: its samples are counted only while it is sharded, "
            "because it is large, or because texts are made into windows"
        )
    of_batches = config.model, config.train, config.parallel
    if rows.counts:
        try:
            check_last_samples(*of_batches, rows.counts[0])
        except ConfigError as error:
            findings.errors.append(error)
    batch_of = partial(one_batch, rows, config, signature)

    def batch(number: int, kind: Kind = "evaluation") -> Batch:
        return batch_of(np.arange(number), training=kind != "evaluation")

    kept_bytes = graph.kept_bytes_per_row(batch(1))
    # the CPU may compute in another type than the run, which then keeps other numbers
    is_alike = arithmetic.compute == config.precision.compute or config.launch.device == "cpu"
    findings.needs = least_needs(trained, config, size_bytes=size_bytes, kept_bytes_per_row=kept_bytes * is_alike)
    sizes = _sizes_that_fit(kept_bytes, sizes_of_run(*of_batches, rows.counts), findings)
    first = next(size for size in sizes if size.kind == "training")
    # a graph of fixed batch is compared on batches of that size
    number = config.micro_batch_size if use.kind != "any" else min(config.evaluation_batch_size, PARITY_ROWS)
    compared = batch(number)
    guarded = number if use.kind != "any" else min(number, ROWS)
    file_rows = FileRows(rows, config, signature) if signature.computed else None

    def metrics(output_names: Sequence[str]) -> EvaluationMetrics:
        losses = Losses(config.losses, output_names, trainable.module.output_shapes)
        return EvaluationMetrics(losses, config.metrics, device=CPU)

    # the same rows are compared with onnxruntime as were computed before
    data = EvaluationData(batches=lambda: [compared], new_metrics=metrics, file_rows=file_rows, model=config.model)
    run = partial(_run, graph, batch=batch, findings=findings, too_long=partial(remedy_of_length, graph, config.data))
    evaluated = [size.rows for size in sizes if size.kind == "evaluation"]
    both: dict[Kind, int] = {"training": first.rows, "evaluation": (evaluated or [config.evaluation_batch_size])[0]}
    found: list[Check] = [
        ("the warnings of `onward doctor`", lambda: _warn(config, trainable, use, findings)),
        *((size.what, partial(run, size=size, gradients=size is first)) for size in sizes),
        ("the units of the labels", lambda: _warn_of_labels(config.losses, rows, findings)),
    ]
    if config.precision.compute in ("auto", "bf16") and not _is_on_gpu(config.launch):
        timed = partial(batch, first.rows, "training")
        time = partial(_time, graph, timed, config.precision, findings)
        found.append(("the time of a micro-batch in fp32 and bf16", time))
    if any(loss.count or loss.rule.by_level for loss in config.losses):
        count = partial(check_counts, graph, compared, findings)
        found.append(("that targets are counted row by row", count))
    if any(loss.is_own for loss in config.losses):
        found += [
            ("that a loss of a file is a sum over rows", lambda: check_sums(graph, compared, findings)),
            ("rows without labels", lambda: check_empty_labels(graph, rows, batch_of, findings)),
        ]
    of_file = config.model, config.losses, config.export
    found += [
        ("the comparison with onnxruntime", lambda: _compare(*of_file, trainable, data, findings)),
        ("the guard", lambda: guard_run(*of_file, trainable, graph, lambda: batch(guarded), findings)),
    ]
    if config.graph.compile == "auto":
        # the last one, since it changes the graph
        compiled = partial(_compile, graph, config, lambda kind: batch(both[kind], kind), rows, findings, begin_again)
        found.append(("whether compiling pays", compiled))
    return found


def _arithmetic(precision: PrecisionConfig, launch: LaunchConfig, findings: Findings) -> PrecisionConfig:
    """Return the precision in which the CPU rehearses: that of the run where it computes on CPUs, else fp32."""
    compute = precision.compute
    if not _is_on_gpu(launch):
        return resolve_precision(precision, (0, 0))
    if compute != "fp32":
        findings.not_rehearsed.append(f"precision.compute {compute!r}, that of GPUs: the CPU computed in fp32")
    return precision.model_copy(update={"compute": "fp32"})


def _is_on_gpu(launch: LaunchConfig) -> bool:
    # the ranks of a hostfile may have GPUs that this machine lacks
    may_be = launch.device == "auto" and (torch.cuda.is_available() or bool(launch.hostfile))
    return launch.device == "cuda" or may_be


def _sizes_that_fit(bytes_of_row: float, sizes: Sequence[Size], findings: Findings) -> list[Size]:
    """Return the sizes, smaller where the activations would take more than half of the free memory.

    bytes_of_row: measured on one. The rank of a GPU may hold micro-batches for which this machine has no memory.
    """
    most = int(free_memory(CPU) / 2 / max(2 * bytes_of_row, 1.0))  # gradients of activations are alive beside them
    fitting = []
    for size in sizes:
        rows = max(1, min(size.rows, most))
        if rows < size.rows:
            findings.not_rehearsed.append(
                f"{size.what}: its activations take about {gib(2 * bytes_of_row * size.rows)}, more than half of the "
                f"memory that is free here; {rows} were run in place of {size.rows}"
            )
        fitting.append(replace(size, rows=rows))
    return fitting


# -- the checks


def _warn(config: RunConfig, trainable: TrainableModel, use: BatchUse, findings: Findings) -> None:
    settings = begin_at_numbers(trainable.model, config.model)
    audit = audit_of_run(extract_subgraph(trainable.model, settings), trainable.module, trainable.base)
    audit.batch = use
    model, graph = trainable.model, audit.model.graph
    outputs = [w for name in config.model.outputs for w in output_warnings(model, graph, name, is_run=True)]
    updates = update_warnings(config.optimizer, trainable.module)
    findings.numbers = (_numbers_trained(trainable.module), audit.numbers())
    findings.warnings = (*exporter_warnings(audit), *outputs, *updates, *same_teacher(config.model, config.teacher))
    refused = refused_warnings(findings.warnings, config.model.accept)
    for problem in [*update_problems(config.optimizer, trainable.module), *refused]:
        findings.refuse(problem)
    for loss in [each for each in config.losses if each.is_own]:
        keys = [warning.key for warning in output_warnings(model, graph, loss.outputs[0], is_run=True)]
        if "probabilities" in keys:
            for problem in read_as_logits(loss, config.metrics):
                findings.refuse(problem)


def _warn_of_labels(losses: Sequence[LossConfig], rows: FirstRows, findings: Findings) -> None:
    if findings.batches:
        findings.warnings += tuple(label_warnings(losses, rows, findings.batches[0].loss))


def _numbers_trained(module: ImportedGraph) -> int:
    states = {each.state for each in module.quantizers}  # which the file does not hold
    weights = [weight for name, weight in named_weights(module).items() if name not in states]
    return sum(weight.numel() for weight in weights if weight.requires_grad)


def _run(
    graph: RehearsedGraph,
    size: Size,
    batch: Callable[[int, Kind], Batch],
    findings: Findings,
    *,
    gradients: bool,
    too_long: Callable[[Batch, str], str] = lambda batch, why: "",
) -> None:
    try:
        rows = batch(size.rows, size.kind)
    except Refused as error:  # such as labels that cannot be mixed
        if gradients or not findings.errors:
            findings.errors.append(error)
        return
    except Exception as error:  # torchvision raises errors of many types
        findings.refuse(f"{size.what} cannot be made of the data: {type(error).__name__}: {error}{_drawn(size)}")
        return
    try:
        result = graph.run(size.kind, rows)
    except ConfigError as error:  # the loss does not fit, at whatever size
        findings.misfit = True
        if gradients or not findings.errors:
            findings.errors.append(error)
        return
    except Exception as error:  # torch raises errors of many types
        if _is_out_of_memory(error):
            findings.not_rehearsed.append(f"{size.what}: it takes more memory than this machine has free")
        else:
            findings.add_failure(size, graph.error_of(size.kind, rows, error), too_long(rows, str(error)))
        return
    findings.batches.append(result)
    if gradients:
        _check_gradients(graph, rows, findings)


def _check_gradients(graph: RehearsedGraph, rows: Batch, findings: Findings) -> None:
    """Refuse a run in which no weight has a gradient, or a gradient is not finite."""
    trained = {name: weight.grad for name, weight in named_weights(graph.module).items() if weight.requires_grad}
    findings.trained = len(trained)
    if not any(rows.num_targets):
        findings.not_rehearsed.append(f"gradients: the first {rows.size} rows have no label that counts")
        return
    loss = f"the loss of the first {rows.size} rows is {findings.batches[-1].loss:g}"
    gradients = {name: gradient for name, gradient in trained.items() if gradient is not None}
    wrong = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    if wrong:
        loss += f" and the gradients of {len(wrong)} of {len(trained)} weights are not finite ({few(wrong)})"
    if wrong or not np.isfinite(findings.batches[-1].loss):
        findings.refuse(
            f"before any training, {loss}; look for NaN, zeros or unscaled values in the data, and for a loss that "
            "fits the output (model.loss)"
        )
        return
    findings.without_gradient = tuple(name for name, gradient in trained.items() if _is_zero(gradient))
    if len(findings.without_gradient) == len(trained):
        findings.refuse(
            f"nothing would be learnt: {loss}, and its gradient is zero for each of the {len(trained)} trained weights "
            f"({few(trained)}). The loss reads {graph.loss_outputs}; name another tensor in model.output, "
            "train other weights (model.train), or look at the data"
        )


def _time(graph: RehearsedGraph, rows: Callable[[], Batch], precision: PrecisionConfig, findings: Findings) -> None:
    """Choose precision.compute if it is "auto", or warn if bf16 is the slower one here."""
    # without a micro-batch that has run there is nothing to compare
    if findings.failures or findings.errors or not findings.batches:
        return
    took_s = max(each.elapsed_s for each in findings.batches)
    if took_s > TIMED_S:
        findings.not_rehearsed.append(f"the time in fp32 and bf16: a micro-batch takes {took_s:.0f} s")
        return
    try:
        times = time_precisions(graph, rows())
    except Exception as error:  # an operator that torch does not compute in bf16, or too little memory for both
        findings.not_rehearsed.append(f"the time in fp32 and bf16: {reason_of(error)}")
        return
    if precision.compute == "auto":
        findings.compute = times.faster
    else:
        findings.warnings += tuple(times.warnings())


def _compile(
    graph: RehearsedGraph,
    config: RunConfig,
    batch: Callable[[Kind], Batch],
    rows: FirstRows,
    findings: Findings,
    begin_again: Callable[[float], None],
) -> None:
    """Choose `graph.compile`, which is "auto". Setting a time limit of its own ends that of the other checks."""
    if findings.failures or findings.errors or not findings.batches:
        return
    precision = config.precision.model_copy(update={"compute": findings.compute or config.precision.compute})
    config = config.model_copy(update={"precision": precision})
    decide(graph, config, batch, rows, findings, begin_again, on_gpu=_is_on_gpu(config.launch))


def _compare(
    model: ModelConfig,
    losses: Sequence[LossConfig],
    export: ExportConfig,
    trainable: TrainableModel,
    data: EvaluationData,
    findings: Findings,
) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix="onward-rehearsal-") as folder:
            findings.parity = compare_untrained(trainable, model, losses, export, data, Path(folder))
        findings.warnings += findings.parity.said
    except NotCompared as why:
        findings.not_rehearsed.append(f"the comparison with onnxruntime: {why}")
    except ExportRefused as error:
        for problem in error.problems:
            findings.refuse(f"the untrained file: {problem}; the export would be refused for it")
    except Exception as error:  # of the module: onnxruntime's own errors are ExportRefused
        if not findings.failures:  # otherwise the reason is known already
            findings.refuse(f"the untrained file: one row of it does not run: {type(error).__name__}: {error}")


def _drawn(size: Size) -> str:
    return "" if size.kind == "evaluation" else "; look at data.image.augment, which evaluation leaves out"


def _is_zero(gradient: Tensor | None) -> bool:
    return gradient is None or not gradient.any()


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
