"""Write the trained weights back into the original ONNX file, verify the result, and give it its final name.

    original.onnx --surgery, inference form--> graph --write_model(weights)--> FOLDER/.verifying-*/model.onnx
                                                                                   |  verification.verify
                                                                                   v
                                                                          FOLDER/model.onnx  (or ExportRefused)

Names, opset, inputs, outputs, dynamic axes and metadata stay. What only training needs is removed: Dropout and
stochastic depth (the identity at inference), and in BatchNormalization the update of the running statistics.

External data is written back range by range: a file beside the model is copied, and only the bytes of changed weights
are overwritten, so memory does not grow with the model:

    weights.bin   | embed.weight | fc.weight | fc.bias |         copy of the original's file
                                 ^^^^^^^^^^^^^                    overwritten if fc.weight was trained

onnxruntime can crash its process, so exporting has one of its own: `python -m onward.trainer export`.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.images.image_inputs import image_inputs
from onward.trainer.data.losses_from_data import with_class_axes
from onward.trainer.data.schema.signature import digest_of_files
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.recipe import recipe_of
from onward.trainer.data.storage.row_origins import row_origins
from onward.trainer.data.storage.shards import Shards
from onward.trainer.diagnostics.diff import compare
from onward.trainer.errors import OnwardError
from onward.trainer.export.file_verification import PARITY_BATCHES, ROUNDED, Expected, changed_tensors, verify
from onward.trainer.export.measuring.baselines import Baselines
from onward.trainer.export.measuring.cuda_provider import check_on_cuda
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.file_precision import file_precision, objects_of
from onward.trainer.export.measuring.helper_nodes import costly_helpers
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.measuring.samples import WorstSamples
from onward.trainer.export.model_file import ModelFile, beside_its_data, trained_part
from onward.trainer.export.preprocessing.given_form import GivenFile, difference_of_forms
from onward.trainer.export.preprocessing.preprocessing_file import class_names
from onward.trainer.export.run_as_read import RunAsRead
from onward.trainer.export.variants.quantize_aware import integer_kernels
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.trainable import load_weights, merged_module, open_trainable
from onward.trainer.onnx_graph.files.index import all_names
from onward.trainer.onnx_graph.inner_tensors import all_stored_protos
from onward.trainer.onnx_graph.surgery.metadata_names import write_class_names
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import begin_at_numbers
from onward.trainer.onnx_graph.surgery.quantizing import store_integers
from onward.trainer.onnx_graph.surgery.row_layout import rows_first
from onward.trainer.onnx_graph.surgery.strip_training import TrainingForm, strip_training, training_form
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph, trains_subgraph
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights, stored_weights
from onward.trainer.onnx_import.write_back import write_model
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import fsync, write_durably
from onward.trainer.run.export_folder import changes_in, example_in, samples_in
from onward.trainer.run.kept_settings import refuse_left_out
from onward.trainer.run.records import ExportedModel, write_record

log = logging.getLogger(__name__)

ORIGINS_S = 5.0
"""Longest time in which the source is read again for the places of the worst samples."""
MOST_COMPARED_BYTES = 1 << 30
"""A larger file is not compared with the original for the report, which takes some seconds for each GB."""


@dataclass(frozen=True)
class Checkpoint:
    """The step and the weights to export."""

    step: int
    weights: Mapping[str, Tensor]
    """Initializer name -> tensor, running statistics included."""


def export(
    run: RunDir,
    checkpoint: Checkpoint,
    *,
    data: EvaluationData,
    test: EvaluationData | None = None,
    folder: Path | None = None,
    opened: RunAsRead | None = None,
) -> ExportedModel:
    """Write the trained ONNX file, its record and an example row into `folder` (the run's own if None).

    test: the rows of `data.test_source`, on which the written file is evaluated once; nothing depends on it. opened:
    the run as it was read, whose source is changed here; None = it is read here. Raises ExportRefused with a sentence
    for each check that failed; no file is written then.
    """
    opened = opened or RunAsRead.of(run)
    config, source = opened.config, opened.source.path
    folder = folder or run.export
    examines = config.monitor.report and folder == run.export  # an export elsewhere is no result of the run
    trainable = open_trainable(config, source=opened.source)
    original = _with_class_names(trainable.model, config.losses, config.model.num_classes, data)
    kept = tuple(filter(None, (*begin_at_numbers(original, config.model).start, *config.model.outputs)))
    # the tensors between which is trained must keep their names, so that this part can be cut out of the result
    if not config.export.strip_training:
        kept = tuple(all_names(original.graph))
    form = training_form(original, source.parent)
    given = onnx.ModelProto()  # a copy of the training form: surgery changes the graph in place
    if form:
        given.CopyFrom(original)
    removed = strip_training(original, keep=kept, base=source.parent)
    log.info("step %d; removed from the graph: %s", checkpoint.step, dict(removed) or "nothing")
    if config.quantize.aware:
        store_integers(original)
    with _staging_directory(folder) as staging:
        untrained = OnnxRunner(trained_part(original, source, staging / "before", config.model), data)
        baselines = Baselines(config.data, data, untrained.outputs)
        before = untrained.evaluate(baselines.count)  # which counts the labels in the same pass
        given_file = beside_its_data(original, source, staging / "whole")
        before |= file_precision(given_file, untrained, data, config.metrics)[0]
        load_weights(trainable.module, checkpoint.weights)
        merged = merged_module(trainable)
        path, *beside = write_model(merged, original, source, staging / source.name, content=opened.content)
        written = ModelFile.read(path)
        compared = _rounded_as_stored(trainable.module, merged, original)  # in place, so after writing
        expected = Expected(
            ModelFile(source, original),
            {name: tensor.detach() for name, tensor in stored_weights(merged).items()},
            compared.eval(),
            config.model,
        )
        runner = verify(written, expected, data=data, config=config.export)
        as_given = 0.0
        if form and not config.quantize.aware:
            as_given = _compare_as_given(given, form, merged, compared, staging / "given", opened, data)
        cuda = check_on_cuda(runner, batches=PARITY_BATCHES, tolerance=config.export.tolerance)
        losses = data.new_metrics(runner.outputs).losses
        samples = _worst_samples(opened, losses, data.rows) if examines and data.rows is not None else None
        after = runner.evaluate(baselines.measure, *((samples.add,) if samples else ()))
        of_file, not_measured = file_precision(written, runner, data, config.metrics)
        objects = objects_of(written, runner, data)
        fp32 = _metrics_of_floats(run, data, staging / "fp32", config.model) if config.quantize.aware else {}
        kernels = integer_kernels(path) if config.quantize.aware else {}
        tested = metrics_of_file(written, test, staging / "test", config.model, config.metrics) if test else {}
        helpers = _cost_of_helpers(written, runner)
        changed = len(changed_tensors(written, expected.original, expected.weights))
        # the model is moved last: it names the other files, so it must not appear before them
        files = [_move(path, staging, folder) for path in (*beside, path)]
    write_durably(example_in(folder), runner.example())
    exported = ExportedModel(
        path=files[-1],
        sha256=digest_of_files([files[-1], *files[:-1]]),
        beside=tuple(files[:-1]),
        step=checkpoint.step,
        parity=runner.parity,
        as_given=as_given,
        neighbours=runner.neighbours,
        rounding=runner.rounding,
        before=before,
        after=after | of_file,
        file_not_measured=not_measured,
        objects=objects,
        baselines=baselines.compute(),
        fp32=fp32,
        kernels=kernels,
        helpers=helpers,
        test=tested,
        changed=changed,
        removed=dict(removed),
        judged_by=runner.runtime,
        cuda=cuda,
    )
    write_record(folder / "model.json", exported)
    if examines:
        examine(opened, data, exported, samples, (untrained, runner), written.proto, folder)
    return exported


def _with_class_names(
    model: onnx.ModelProto, losses: Sequence[LossConfig], replaced: int, data: EvaluationData
) -> onnx.ModelProto:
    """Write the class names of the data into the metadata, in place, where all losses of classes have the same ones."""
    fitted = data.rows.fitted if data.rows else {}
    of_classes = [loss for loss in losses if loss.has_classes]
    of_objects = [loss for loss in losses if loss.rule.labels == "objects"]
    found = {class_names(loss, fitted) for loss in (*of_classes, *of_objects)}
    # several heads may have classes of their own
    names = found.pop() if len(found) == 1 else ()
    if all(name.isdecimal() for name in names):
        names = ()  # of numbers the data has no names
    write_class_names(model, names, replaced=replaced)
    return model


def _cost_of_helpers(written: ModelFile, runner: OnnxRunner) -> str:
    try:
        found = costly_helpers(written, next(runner.feeds()))
    except Exception as error:  # onnxruntime's errors have no common base class; the file is exported
        log.info("what helper nodes cost is not known: %s", error)
        return ""
    if found:
        log.warning("%s; the variant `optimized`, beside the file, is the one to serve", found)
    return str(found or "")


def _worst_samples(opened: RunAsRead, losses: Losses, rows: Shards) -> WorstSamples:
    inputs = [info.name for info in opened.signature.inputs]
    return WorstSamples(losses, rows, image_inputs(opened.config.data, opened.signature), inputs)


def _origins(opened: RunAsRead, data: EvaluationData, wanted: Sequence[int]) -> Mapping[int, str]:
    """Return row -> its place in the source; {} if that cannot be read again."""
    assert data.rows is not None
    try:
        return row_origins(recipe_of(opened.config, opened.signature), data.rows, data.split, wanted, limit_s=ORIGINS_S)
    except OnwardError as error:
        log.info("the report names no files of samples: %s", error)
        return {}


def _compare_as_given(
    given: onnx.ModelProto,
    form: TrainingForm,
    merged: ImportedGraph,
    module: ImportedGraph,
    folder: Path,
    opened: RunAsRead,
    data: EvaluationData,
) -> float:
    """Compare the graph in the form in which it was given, with the trained weights, with the trained module.

    Returns how far its training form is off its inference form. Raises ExportRefused (given_form.py).
    """

    model = opened.config.model

    def written(norms: bool | None) -> ModelFile | onnx.ModelProto:
        graph = onnx.ModelProto()
        place = folder / str(norms)
        graph.CopyFrom(given)
        # None: as it was given, in training form
        if norms is not None:
            kept = tuple(filter(None, (*begin_at_numbers(graph, model).start, *model.outputs)))
            strip_training(graph, keep=kept, base=model.path.parent, norms=norms)
        place.mkdir(parents=True, exist_ok=True)
        written_to, *_ = write_model(merged, graph, model.path, place / model.path.name, content=opened.content)
        file = ModelFile.read(written_to)
        if not trains_subgraph(graph, model):
            return file
        (place / "part").mkdir()
        return trained_part(file.proto, written_to, place / "part", model)

    as_given = written(None)
    file = GivenFile(as_given, form, written(False) if form.draws else as_given)
    return difference_of_forms(file, module, data, tolerance=opened.config.export.tolerance)


def examine(
    opened: RunAsRead,
    data: EvaluationData,
    exported: ExportedModel,
    samples: WorstSamples | None,
    runners: tuple[OnnxRunner, OnnxRunner],
    written: onnx.ModelProto,
    folder: Path,
) -> None:
    """Write what the report shows of an exported file beside its record: samples.json and changes.json.

    runners: of the file that came in and of the exported one. written: what the file holds. An error is logged: the
    file is exported.
    """
    try:
        if samples is not None:
            origins = _origins(opened, data, samples.shown_rows)
            before, after = (each.outputs_of for each in runners)
            found = samples.record(exported.judged_by, origins, before=before, after=after)
            write_record(samples_in(folder), found)
        # the original has about as many bytes
        if sum(file.stat().st_size for file in (exported.path, *exported.beside)) <= MOST_COMPARED_BYTES:
            write_record(changes_in(folder), compare(opened.source.path, exported.path, parsed_b=written))
    except Exception as error:
        log.warning("the report will lack samples or changes of weights: %s: %s", type(error).__name__, error)


def export_training(run: RunDir, checkpoint: Checkpoint, *, folder: Path, opened: RunAsRead) -> None:
    """Write the files that continue training without torch into `folder`: the graph in its training form.

    opened: as in `export`. Raises UnsupportedModel, ExportRefused or ConfigError; no file is written then.
    """
    from onward.trainer.export.training.files import write_artifacts

    refuse_left_out(read_config(run, "given").left_out, "optimizer.")  # optimizer.onnx would make other steps
    config, source = opened.config, opened.source.path
    trainable = open_trainable(config, source=opened.source)
    load_weights(trainable.module, checkpoint.weights)
    folder.mkdir(parents=True, exist_ok=True)
    with _staging_directory(folder) as staging:
        target = staging / source.name
        path, *_ = write_model(merged_module(trainable), trainable.model, source, target, content=opened.content)
        written = ModelFile.read(path).proto
        settings = begin_at_numbers(written, config.model)
        part = rows_first(extract_subgraph(written, settings), settings)
        rows = open_shards(run.shards, "train")
        losses = with_class_axes(config.losses, rows.columns, opened.signature)
        write_artifacts(folder, part, config.model_copy(update={"loss": losses}), base=staging)


@contextlib.contextmanager
def _staging_directory(folder: Path) -> Iterator[Path]:
    """Make a directory in `folder` for files that are not verified yet, and remove it afterwards.

    One process at a time exports into a folder, so staging directories of killed processes are removed, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".verifying-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".verifying-") as staging:
        yield Path(staging)


def _move(path: Path, staging: Path, folder: Path) -> Path:
    """Move a verified file to its final name, at the same relative path."""
    target = folder / path.relative_to(staging)
    target.parent.mkdir(parents=True, exist_ok=True)
    path.replace(target)
    fsync(target.parent)
    return target


def _rounded_as_stored(trained: ImportedGraph, merged: ImportedGraph, model: onnx.ModelProto) -> ImportedGraph:
    """Return the module whose results the file must have, its weights rounded in place as a half-precision file does.

    Without rounding that is the module with its adapters. A rounded sum W + BA differs from rounded W and BA, so a
    half-precision file is compared with the merged module.
    """
    halves = {
        name: ROUNDED[tensor.data_type]
        for name, tensor in all_stored_protos(model).items()
        if tensor.data_type in ROUNDED
    }
    module = merged if halves else trained
    with torch.no_grad():
        for name, weight in named_weights(module).items():
            weight.copy_(weight.to(halves.get(name, weight.dtype)))
    return module


def metrics_of_file(
    file: ModelFile, data: EvaluationData, folder: Path, model: ModelConfig, metrics: Sequence[MetricConfig] = ()
) -> dict[str, float]:
    """Return the metrics of a file, whose losses may read tensors inside its graph.

    metrics: those of the run, to measure also what a detector's file itself returns.
    """
    part = OnnxRunner(trained_part(file.proto, file.path, folder, model), data)
    return part.evaluate() | file_precision(file, part, data, metrics)[0]


def _metrics_of_floats(run: RunDir, data: EvaluationData, folder: Path, model: ModelConfig) -> dict[str, float]:
    """Return the metrics of the file whose weights are trained as integers; {} if it is gone."""
    floats = read_config(run, "local").model.path
    return metrics_of_file(ModelFile.read(floats), data, folder, model) if floats.is_file() else {}
