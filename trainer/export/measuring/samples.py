"""Find the evaluation rows on which an exported file is worst, in the pass that computes its metrics.

    OnnxRunner.evaluate --outputs of each batch--> WorstSamples --record--> export/samples.json (the report shows it)

Only the losses of single rows are computed in addition, in a bounded number and time. Nothing depends on them, so an
error here ends this, and not the export. Of images with boxes, the boxes that the file finds in the shown images are
computed at the end, and those that the file found before the training.
"""

from __future__ import annotations

import base64
import heapq
import io
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from PIL import Image
from torch import Tensor

from onward.trainer.config.sections.metrics import tasks_of
from onward.trainer.data.batches.batches import Batch
from onward.trainer.data.images.image_inputs import ImageInput
from onward.trainer.data.schema.box_cells import BOX_NUMBERS
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.target_counts import numbers_of
from onward.trainer.data.storage.shards import Shards
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.metrics.measured import Measured
from onward.trainer.run.recorded.sample_records import LEAST_SCORE, ImageBox, Sample, Samples

log = logging.getLogger(__name__)

Outputs = Callable[[Batch, int, int], Sequence[Tensor]]
"""Batch, start, stop -> the outputs of a file for the rows [start, stop) of the batch."""

MOST_SHOWN = 12
MOST_PICTURES = 5
"""Images with boxes that are shown because of their losses,"""
NUM_ORDINARY = 3
"""and images that are drawn at random."""
MOST_BOXES = 20
"""Boxes of an image that are shown, those with the greatest scores."""
MOST_ROWS = 10_000
BUDGET_S = 10.0
"""Time for the losses of single rows."""
MOST_VALUES = 1000
"""Pairs of target and prediction that are kept of a regression."""
INPUT_BYTES = 16 << 20
"""Inputs of a row that are larger are not kept."""
IMAGE_PIXELS = 128
"""Longest side of an image that is shown,"""
PICTURE_PIXELS = 256
"""and of an image with boxes."""
TEXT_CHARACTERS = 240
BINS = 40

Entry = tuple[float, int, Sample, Batch]
"""The loss of a row, minus its number, and the row as a record and as a batch."""


class WorstSamples:
    """Collects the losses of rows, batch by batch.

    losses: as of the evaluation. rows: the split. images: the inputs that are images, by name, whose pixels are shown
    as they were before they were scaled. input_names: those of the graph, in order.
    """

    def __init__(
        self, losses: Losses, rows: Shards, images: Sequence[ImageInput] = (), input_names: Sequence[str] = ()
    ) -> None:
        self._losses = losses
        self._rows = rows
        known = {each.name: each for each in images}
        self._images = [known.get(name) for name in input_names]
        self._spent_s = 0.0
        self._why = ""
        self._number = 0
        self._found: list[float] = []
        self._values: list[tuple[float, float]] = []
        self._worst: list[Entry] = []
        self._drawn: list[Entry] = []
        self._random = random.Random(0)
        of_objects = [place for place, loss in enumerate(losses.each) if "objects" in tasks_of(loss.config)]
        self._detector = of_objects[0] if of_objects else None
        """The place of the loss of detected objects; None without one."""
        self._most = MOST_SHOWN if self._detector is None else MOST_PICTURES

    def add(self, outputs: Sequence[Tensor], batch: Batch, start: int, stop: int) -> None:
        """Add the rows [start, stop) of a batch, of which these are the outputs. Raises nothing."""
        # once the limit is reached or an error has occurred, nothing more is added
        if self._why:
            return
        began_at = time.monotonic()
        try:
            self._add(outputs, batch, start, stop)
        # losses of the user's code raise whatever they like, and this is only a part of the report
        except Exception as error:
            self._why = f"the loss of single rows cannot be computed: {type(error).__name__}: {error}"
            log.info("%s", self._why)
        self._spent_s += time.monotonic() - began_at
        if self._spent_s > BUDGET_S:
            self._why = f"the time for the losses of single rows is {BUDGET_S:g} s"
        elif len(self._found) >= MOST_ROWS:
            self._why = f"the losses of at most {MOST_ROWS:,} rows are computed"

    def _add(self, outputs: Sequence[Tensor], batch: Batch, start: int, stop: int) -> None:
        size = stop - start
        # a sum or a mean over the batch has no part that belongs to one row
        if any(not each.ndim or len(each) % size for each in outputs):
            raise ValueError("an output has no results for each row")
        for row in range(size):
            # an output may have several results for each row, which stay together
            own = [each.view(size, -1, *each.shape[1:])[row] for each in outputs]
            labels = [None if each is None else each[start + row : start + row + 1] for each in batch.labels]
            loss = self._loss(own, labels)
            # rows without a target, or with a loss that is not a number, cannot be ranked
            if math.isnan(loss):
                continue
            sample = self._sample(int(batch.rows[start + row]), loss, own, labels)
            self._found.append(loss)
            if sample.num_right is None and sample.target is not None and len(self._values) < MOST_VALUES:
                self._values.append((sample.target, sample.predicted or 0.0))
            # counts the rows, so that of equal losses the earlier one is kept and shown first
            self._number += 1
            # a heap whose least entry is the best of the worst rows: the next worse row replaces it
            if len(self._worst) < self._most or loss > self._worst[0][0]:
                entry = (loss, -self._number, sample, _row_of(batch, start + row))
                (heapq.heappush if len(self._worst) < self._most else heapq.heappushpop)(self._worst, entry)
            if self._detector is not None and (place := self._place_among_drawn()) is not None:
                entry = (loss, -self._number, sample, _row_of(batch, start + row))
                self._drawn[place : place + 1] = [entry]

    def _place_among_drawn(self) -> int | None:
        """Return the place of the newest row among those that are drawn, where every row so far is with one
        probability; None if it is not drawn."""
        # as many more as may be among the worst, which are shown once
        most = NUM_ORDINARY + self._most
        if len(self._drawn) < most:
            return len(self._drawn)
        place = self._random.randrange(self._number)
        return place if place < most else None

    def _loss(self, outputs: Sequence[Tensor], labels: Sequence[Tensor | None]) -> float:
        """Return the loss of one row, the mean over its targets; NaN if it has none."""
        # as the loss of a batch of one row, so that it is the same formula
        sums = self._losses(outputs, labels, 1)
        counts: list[float] = []
        for loss, own in zip(self._losses.each, labels, strict=False):
            counts += numbers_of(loss.divisor(own, 1))
        if self._losses.counts_itself:
            counts = [max(counts[0], 1.0)]
        # an image without objects has targets of set_classes, and none of the losses of its boxes
        if not any(counts):
            return math.nan
        means = [total / (count or 1.0) for total, count in zip(sums, counts, strict=False)]
        return float(self._losses.weighted(means))

    def _sample(self, row: int, loss: float, outputs: Sequence[Tensor], labels: Sequence[Tensor | None]) -> Sample:
        """Return a row with its target and its prediction by the first loss, as far as it has them."""
        first = self._losses.each[0]
        task = next(iter(tasks_of(first.config)), None)
        if labels[0] is None or task not in ("classes", "values"):
            return Sample(row=row, loss=loss)
        measured = Measured(first, outputs, labels[0], task=task)
        if task == "classes":
            targets = measured.targets[measured.counted]
            predicted = measured.predicted[measured.counted]
            right: int | None = int((targets == predicted).sum())
        else:
            targets = measured.targets.flatten()
            predicted = measured.scores.flatten()
            right = None
        # of several targets, such as the pixels of a mask, the numbers alone are shown
        one = len(targets) == 1
        return Sample(
            row=row,
            loss=loss,
            target=float(targets[0]) if one else None,
            predicted=float(predicted[0]) if one else None,
            num_targets=len(targets),
            num_right=right,
        )

    @property
    def _ordinary(self) -> list[Entry]:
        worst = {sample.row for _, _, sample, _ in self._worst}
        return [entry for entry in self._drawn if entry[2].row not in worst][:NUM_ORDINARY]

    @property
    def shown_rows(self) -> list[int]:
        """The numbers of the rows in the split that are shown."""
        return [sample.row for _, _, sample, _ in (*self._worst, *self._ordinary)]

    def record(
        self,
        judged_by: str,
        origins: Mapping[int, str] = MappingProxyType({}),
        *,
        before: Outputs | None = None,
        after: Outputs | None = None,
    ) -> Samples:
        """Return what was found. Raises the errors of reading rows and of running the files.

        origins: row -> its place in the source. before, after: run the file that came in and the exported file, for the
        boxes that they find in the shown images.
        """
        files = {name: run for name, run in (("before", before), ("after", after)) if run is not None}

        def shown(entry: Entry) -> Sample:
            _, _, sample, batch = entry
            update = self._shown(sample.row, batch) | {"where": origins.get(sample.row, "")}
            return sample.model_copy(update=update | self._boxes(batch, files))

        worst = [shown(entry) for entry in sorted(self._worst, key=lambda entry: (-entry[0], -entry[1]))]
        ordinary = [shown(entry) for entry in self._ordinary]
        # infinite losses are among the worst, but have no place on an axis
        finite = [loss for loss in self._found if math.isfinite(loss)]
        mean = float(np.mean(finite)) if finite else 0.0
        counts, edges = np.histogram(finite, bins=BINS if finite else 1)
        return Samples(
            judged_by=judged_by,
            num_rows=len(self._found),
            of_rows=self._rows.num_rows,
            why_not_all=self._why,
            worst=tuple(worst),
            ordinary=tuple(ordinary),
            mean=mean,
            counts=tuple(int(count) for count in counts),
            edges=tuple(float(edge) for edge in edges),
            values=tuple(self._values),
        )

    def _boxes(self, batch: Batch, files: Mapping[str, Outputs]) -> dict[str, object]:
        """Return the objects of an image, and the boxes that each file finds in it; {} for other data, and of an image
        that was not kept."""
        labels = None if self._detector is None else batch.labels[self._detector]
        if self._detector is None or labels is None or not batch.inputs:
            return {}
        # rows of padding have no class
        objects = [each for each in labels.reshape(-1, BOX_NUMBERS).tolist() if each[0] >= 0]
        boxes: dict[str, object] = {"objects": tuple(_image_box(int(each[0]), each[1:5]) for each in objects)}
        for name, run in files.items():
            measured = Measured(self._losses.each[self._detector], run(batch, 0, 1), labels, task="objects")
            found = measured.objects[0][0].tolist()
            # as many as there are objects also with low scores, as models have them that are hardly trained
            num_shown = max(len(objects), sum(each[1] >= LEAST_SCORE for each in found[:MOST_BOXES]))
            boxes[name] = tuple(_image_box(int(each[0]), each[2:], score=each[1]) for each in found[:num_shown])
        return boxes

    def _shown(self, row: int, batch: Batch) -> dict[str, object]:
        texts: dict[str, str] = {}
        for name, values in self._rows.read(np.array([row])).items():
            if (text := _as_text(values[0])) is not None:
                texts[name] = text
        # inputs beyond the known ones are tried without a description of their pixels
        images = [*self._images, *[None] * len(batch.inputs)]
        arrays = (_as_image(tensor[0].numpy(), image) for tensor, image in zip(batch.inputs, images, strict=False))
        pixels = next((array for array in arrays if array is not None), None)
        if pixels is None:
            return {"inputs": texts}
        picture = Image.fromarray(pixels)
        longest = IMAGE_PIXELS if self._detector is None else PICTURE_PIXELS
        picture.thumbnail((longest, longest))
        return {"inputs": texts, "image": _png(picture), "image_size": picture.size}


def _row_of(batch: Batch, row: int) -> Batch:
    """Return a row of a batch as a batch of its own, without its inputs if they are large."""
    inputs = tuple(each[row : row + 1].clone() for each in batch.inputs)
    labels = tuple(None if each is None else each[row : row + 1].clone() for each in batch.labels)
    kept = inputs if sum(each.nbytes for each in inputs) <= INPUT_BYTES else ()
    return replace(batch, inputs=kept, labels=labels, size=1, rows=batch.rows[row : row + 1])


def _image_box(of_class: int, corners: Sequence[float], score: float | None = None) -> ImageBox:
    x1, y1, x2, y2 = (round(value, 5) for value in corners)
    return ImageBox(of_class=of_class, corners=(x1, y1, x2, y2), score=score)


def _as_text(value: object) -> str | None:
    """Return a cell of the data as short text; None for content, such as an encoded image, and for arrays of axes."""
    if isinstance(value, bytes):
        return None
    array = np.asarray(value)
    if array.ndim > 1:
        return None
    # more values would not fit into the line
    few = array.reshape(-1)[:64]
    text = " ".join(f"{each:.5g}" if isinstance(each, np.floating) else str(each) for each in few)
    return text if len(text) <= TEXT_CHARACTERS and len(few) == array.size else f"{text[:TEXT_CHARACTERS]} ..."


def _as_image(values: Array, image: ImageInput | None) -> Array | None:
    """Return an input as an image, uint8 [H, W] or [H, W, 3]; None if it has not the shape of one.

    image: how its pixels were scaled; None = its values are scaled to their own range.
    """
    # channels first or last; fewer than 4 pixels a side are rather a small matrix
    if values.ndim == 3 and values.shape[0] in (1, 3) and min(values.shape[1:]) >= 4:
        values = np.moveaxis(values, 0, -1)
    elif not (values.ndim == 3 and values.shape[2] in (1, 3) and min(values.shape[:2]) >= 4):
        return None
    # NaN and infinity have no colour
    numbers = np.nan_to_num(values.astype(np.float32))
    low = float(numbers.min())
    high = float(numbers.max())
    if image is None:
        scaled = ((numbers - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)
    else:
        numbers = numbers[..., ::-1] if image.bgr else numbers
        # undo what the preprocessing did, in the reverse order: mean and std, then the scale
        numbers = numbers * (image.std or (1.0,)) + (image.mean or (0.0,))
        scaled = np.clip(np.rint(numbers / (1.0 if image.takes_integers else image.scale)), 0, 255).astype(np.uint8)
    return scaled[:, :, 0] if scaled.shape[2] == 1 else scaled


def _png(picture: Image.Image) -> str:
    content = io.BytesIO()
    picture.save(content, format="PNG")
    return base64.b64encode(content.getvalue()).decode()
