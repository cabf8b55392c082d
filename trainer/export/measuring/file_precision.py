"""Measure the mean average precision of what a detector's file itself returns, with all that its own nodes do.

    evaluation rows --the file--> its outputs --file_detections--> boxes, scores, classes ---> file/map, file/map_50
                    --raw outputs--> our decoding and suppression (dense_detections) --------> map, map_50

The second one is what evaluations during the training measure. Images are run one by one: the outputs of a file
that chooses among its boxes have no rows for each image.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.metrics import OF_FILE, MetricConfig, metrics_of
from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.schema.columns import Array
from onward.trainer.errors import UnsupportedModel
from onward.trainer.export.detections.file_detections import recognise
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile, fp32_copy, in_half_precision
from onward.trainer.export.served.detections import BoxColumns, EachClass, FileDetections, Selection, Table
from onward.trainer.model.losses import set_prediction
from onward.trainer.model.metrics.mean_precision import MeanPrecision
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.graph_parts import part_between

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
OF_A_SET = BoxColumns(0, is_centred=True, in_shares=True)
"""The boxes of a set, as its losses read them."""
MOST_CHANNELS = 4
"""Of an image."""


def file_precision(
    file: ModelFile | onnx.ModelProto, part: OnnxRunner, data: EvaluationData, metrics: Sequence[MetricConfig]
) -> tuple[dict[str, float], str]:
    """Return the metrics of what a file itself has found in all rows, as `<split>/file/<name>`; else {} and why.

    part: the trained part of the same file. metrics: those of the run. Returns {} and "" where no detector with a grid
    is trained. Raises OSError of a disk alone: a file that is not understood is no error.
    """
    try:
        measures = file_measures(file, part, data, metrics)
    except OSError:
        raise  # a full disk, which is no fault of the file
    except Exception as error:  # onnxruntime's errors have no common base class, and the file is exported
        reason = str(error) if isinstance(error, UnsupportedModel) else f"{type(error).__name__}: {error}"
        log.warning("map is that of the raw outputs, and not that of the whole file: %s", reason)
        return {}, reason
    values = {name: measure.value((), measure.lists(), 1) for name, measure in measures.items()}
    return {f"{data.split}/{name}": value for name, value in values.items()}, ""


def file_measures(
    file: ModelFile | onnx.ModelProto, part: OnnxRunner, data: EvaluationData, metrics: Sequence[MetricConfig]
) -> dict[str, MeanPrecision]:
    """Return `file/<name>` -> the metric, which has seen all rows; {} where no detector with a grid is trained.

    The first one keeps what was found. Raises UnsupportedModel with the reason, and the errors of onnxruntime.
    """
    losses = data.new_metrics(part.outputs).losses
    dense = [place for place, loss in enumerate(losses.each) if loss.config.rule.has_grid]
    if not dense:
        return {}
    place = dense[0]
    loss = losses.each[place].config
    measures = [MeanPrecision(each, CPU) for each in metrics_of(loss, metrics)]
    if not measures:
        return {}
    for measure in measures:
        measure.first = measures[0]
    for found, labels in _found(WholeFile(file, part, data, loss), data, place):
        measures[0].add([found], labels, loss)
    title = f"{losses.titles[place]}/" if len(losses.each) > 1 else ""
    return {f"{title}{OF_FILE}/{measure.key}": measure for measure in measures}


def _found(whole: WholeFile, data: EvaluationData, place: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield of each image what the file has found [n, 6], and the labels [1, objects x 6]. place: of the loss."""
    detections: FileDetections | None = None
    for batch in data.batches():
        labels = batch.labels[place]
        assert labels is not None
        size = image_size(batch.inputs)
        detections = detections or whole.recognise(batch, size)
        for row in range(batch.size):
            yield torch.from_numpy(detections.read(whole.outputs(batch, row), size)), labels[row : row + 1]


def objects_of(file: ModelFile | onnx.ModelProto, part: OnnxRunner, data: EvaluationData) -> dict[str, Any] | None:
    """Return how what a file has found is read from its outputs, as `Objects` of preprocessing.json.

    part: the trained part of the same file. None where no loss is one of boxes.
    """
    losses = [each.config for each in data.new_metrics(part.outputs).losses.each]
    of_objects = [each for each in losses if each.rule.labels == "objects"]
    if not of_objects:
        return None
    # several losses of a set read the same outputs
    loss = of_objects[0]
    names = list(loss.outputs)
    form: FileDetections | None = None
    batch = next(iter(data.batches()))
    if loss.rule.has_grid:
        try:
            whole = WholeFile(file, part, data, loss)
            form = whole.recognise(batch, image_size(batch.inputs))
            names = whole.names
        except Exception as error:  # as file_precision, which says it
            log.info("boxes are decoded from the raw outputs: %s", error)
    else:
        results = part.run([tensor[:1] for tensor in part.inputs_of(batch)])
        scores = results[part.outputs.index(names[0])]
        form = _form_of_set(loss, scores.shape[-1])
    read = {"name", "output", "strides", "anchors", "scores", "num_queries"}
    settings = loss.model_dump(mode="json", include=read, exclude_defaults=True)
    return {"outputs": names, "form": asdict(form) if form else None, "loss": settings}


def _form_of_set(loss: LossConfig, num_scores: int) -> FileDetections:
    """Return how outputs of scores and boxes hold a set (set_prediction.detections)."""
    is_softmax = loss.scores == "softmax"
    scores = EachClass(Table(0, is_transposed=False), 0, f"logits of a {'softmax' if is_softmax else 'sigmoid'}")
    most = set_prediction.MOST_DETECTIONS
    selection = Selection(most, most, least_score=0.0, of_best_class=is_softmax)
    # without the last score of a softmax, which is that of no object
    boxes = Table(1, is_transposed=False), OF_A_SET
    return FileDetections(boxes, scores, num_scores - is_softmax, selection, with_boxes=(1,))


class WholeFile:
    """A file with all of its own outputs but the raw ones."""

    def __init__(
        self, file: ModelFile | onnx.ModelProto, part: OnnxRunner, data: EvaluationData, loss: LossConfig
    ) -> None:
        if data.model and data.model.start and not data.file_rows:
            raise UnsupportedModel("the data feeds a tensor inside the file, and not its inputs")
        self._part, self._loss = part, loss
        model = file.proto if isinstance(file, ModelFile) else file
        self._base = file.path.parent if isinstance(file, ModelFile) else None
        self._model = fp32_copy(file) if in_half_precision(model) else model
        outputs = [value.name for value in model.graph.output]
        self._places = [place for place, name in enumerate(outputs) if name not in loss.outputs]
        self.names = [outputs[place] for place in self._places]
        if not self.names:
            raise UnsupportedModel("the outputs of the file are the raw outputs, which its users decode")
        rows = data.file_rows
        if rows:
            # a row as the file takes it, for all of its outputs
            first = rows.signature.outputs[0]
            declared = tuple(replace(first, name=name) for name in outputs)
            rows = replace(rows, signature=replace(rows.signature, outputs=declared))
        self._runner = OnnxRunner(file, replace(data, file_rows=rows))

    def outputs(self, batch: Batch, row: int) -> list[Array]:
        """Return the outputs for one row of a batch."""
        found = self._runner.outputs_of(batch, row, row + 1)
        return [np.asarray(found[place]) for place in self._places]

    def recognise(self, batch: Batch, size: tuple[int, int]) -> FileDetections:
        """Return how the outputs hold what was found. Raises UnsupportedModel with the reason."""
        one = [tensor[:1] for tensor in self._part.inputs_of(batch)]
        raw = self._part.run(one)
        named = dict(zip(self._part.outputs, raw, strict=True))
        shapes = [(1, *named[name].shape[1:]) for name in self._loss.outputs]
        repeats = len(raw[0])  # a fixed batch size
        end = open_session(part_between(self._model, self.names, self._loss.outputs), base=self._base)
        fed = self._runner.feed(one)
        beside = {value.name: fed[value.name] for value in end.get_inputs() if value.name not in self._loss.outputs}

        def run(values: Mapping[str, Array]) -> list[Array]:
            repeated = {name: np.repeat(array, repeats, 0) for name, array in values.items()}
            results = end.run(None, beside | repeated)
            return [result[: len(result) // repeats] for result in results] if repeats > 1 else list(results)

        return recognise(run, shapes, self._loss, size)


def image_size(inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Return width and height of the images, the first input [B, C, H, W] or [B, H, W, C]."""
    image = next((each for each in inputs if each.ndim == 4), None)
    if image is None:
        raise UnsupportedModel("no input is a batch of images")
    height, width = image.shape[1:3] if image.shape[3] <= MOST_CHANNELS < image.shape[1] else image.shape[2:]
    return int(width), int(height)
