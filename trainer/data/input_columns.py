"""Match the columns of the data with the inputs of the graph.

Each graph input is fed by one column of the same name, by another column (data.inputs), or by several columns of
numbers that are stacked into one vector; the labels of each loss are fed by data.label or by the loss's own label:

    data.inputs.features = ["a", "b"]       columns a, b  -> stacked -> input `features` [B, 2]
                                            column image             -> input `image`    [B, 3, 64, 64]
    data.label = "digit"                    column digit             -> labels           [B]

In a file that begins with pre-processing (onnx_graph/surgery/preprocessing_nodes.py) columns feed the inputs of the
file, and what the pre-processing computes is stored as a further column of the shards, which feeds an input of the
trained part:

                                            column text  -> input `text`, pre-processing -> column ids -> `ids` [B, 16]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onward.trainer.config.losses import LossConfig, filled, key_of
from onward.trainer.config.section import as_tuple
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.images.image_inputs import ImageInput, image_inputs, masks
from onward.trainer.data.schema.columns import BYTES, TEXT, ColumnType
from onward.trainer.data.schema.label_axes import Dims, label_shape
from onward.trainer.data.schema.signature import Signature, TensorInfo
from onward.trainer.data.text.text_columns import text_columns


@dataclass(frozen=True)
class Feed:
    """The columns that feed one input of the graph, or the labels."""

    target: str
    """`input NAME`, or the setting that names the labels' columns, as messages name it."""
    columns: tuple[str, ...]
    stacked: bool
    """Whether the columns are single numbers that are stacked into a vector; otherwise the one column is the tensor."""
    dtype: str
    """The declared type of the input."""
    sample_shape: Dims | None
    """The declared shape without the batch dimension."""
    sequence: bool = False
    """Whether the input is a sequence with one tensor for each sample."""
    is_label: bool = False
    """Whether it feeds the labels of a loss."""
    image: ImageInput | None = None
    """Set where the column holds encoded images."""
    mask: tuple[int, int] | None = None
    """Of labels that are images: height and width in a batch."""
    scores: Dims | None = None
    """Of labels that are classes: the declared shape of the output with their scores."""
    class_axis: int | None = None
    """Of such labels: `loss.class_axis`."""

    @property
    def column_type(self) -> ColumnType:
        """Return the type and shape that each of the columns is read as."""
        if self.image or self.mask:
            return ColumnType(BYTES)
        if self.dtype == "string":
            return ColumnType(TEXT)
        # numpy has no bfloat16: such inputs are stored in fp32
        dtype = {"bfloat16": "float32"}.get(self.dtype, self.dtype)
        return ColumnType(dtype, () if self.stacked else self.sample_shape)

    @property
    def is_one_column(self) -> bool:
        """Whether a column of single values is fed as a vector of one: an input [B, 1], as skl2onnx writes them."""
        return not self.stacked and self.sample_shape == (1,) and not self.is_label

    @property
    def tensor_dtype(self) -> str:
        """Return the type of the tensor that is fed; fp32 for half precision, as the graph is imported in fp32."""
        return {"float16": "float32", "bfloat16": "float32"}.get(self.dtype, self.dtype)


class InputColumns:
    """The feeds of a trained part and of its losses, and the columns that they read."""

    def __init__(self, data: DataConfig, loss: Sequence[LossConfig], model: ModelConfig, signature: Signature) -> None:
        self._data = data
        self._loss = loss
        self._losses = filled(model, data, loss)
        self._signature = signature
        self.text = text_columns(data, self._losses, model, signature)

    @property
    def made_of_text(self) -> frozenset[str]:
        """Return the columns that the tokenizer computes."""
        return self.text.computed if self.text else frozenset()

    @property
    def computed(self) -> frozenset[str]:
        """Return the columns that feed inputs of the trained part and are computed, not read."""
        return self.made_of_text.union(self._signature.computed)

    def feeds(self) -> list[Feed]:
        """Return a feed for each input of the trained part in order, then one for the labels of each loss that has any,
        and after it one for the input lengths of a CTC.

        What pre-processing or a tokenizer computes is stored under the name of the tensor.
        """
        images = {each.name: each for each in image_inputs(self._data, self._signature)}
        found = []
        for info in self._signature.inputs:
            columns = info.name if info.name in self.computed else _columns_of(info, self._data, images)
            found.append(_feed(info, columns, images))
        return [*found, *self.labels()]

    def labels(self) -> Iterator[Feed]:
        """Yield the feeds of the labels of each loss that takes labels."""
        sizes = {mask.column: mask.size for mask in masks(self._data, self._losses, self._signature)}
        for place, loss in enumerate(self._losses):
            if not loss.takes_labels:
                continue
            output = self._signature.output(loss.outputs[0])
            # messages name the setting that the user has written
            own = bool(self._loss and self._loss[place].label)
            scores = output.shape if output and loss.has_class_axis else None
            whole = label_shape(loss, output.shape) if output and output.shape is not None else None
            yield Feed(
                key_of(self._losses, place, "label") if own else "data.label",
                loss.columns,
                not isinstance(loss.label, str),
                loss.label_dtype,
                None if whole is None else whole[1:],
                is_label=True,
                mask=sizes.get(loss.columns[0]),
                scores=scores,
                class_axis=loss.class_axis,
            )
            if loss.input_lengths:
                key = key_of(self._losses, place, "input_lengths")
                mask = sizes.get(loss.input_lengths)
                yield Feed(key, (loss.input_lengths,), False, "int64", (), is_label=True, mask=mask)

    def of_file(self) -> dict[str, Feed]:
        """Return input of the file -> its feed."""
        return file_feeds(self._data, self._signature)

    def of_source(self) -> Iterator[Feed]:
        """Yield the feeds of inputs of the file, and of labels, whose columns the data has itself."""
        for feed in (*self.of_file().values(), *self.labels()):
            if not self.made_of_text.issuperset(feed.columns):
                yield feed

    def to_read(self) -> dict[str, ColumnType]:
        """Return the columns of the data to read; one that feeds two inputs gets a type that serves both."""
        found: dict[str, ColumnType] = dict(self.text.read) if self.text else {}
        for feed in self.of_source():
            for name in feed.columns:
                kind = feed.column_type
                before = found.get(name)
                if before and {TEXT, BYTES} & {before.dtype, kind.dtype}:
                    # if the other one takes numbers, `data_problems` refuses it
                    found[name] = ColumnType(TEXT if TEXT in (before.dtype, kind.dtype) else BYTES)
                    continue
                if before:
                    # one type that holds the values of both readers
                    kind = ColumnType(np.promote_types(before.dtype, kind.dtype).name, before.shape)
                found[name] = kind
        return found


def file_feeds(data: DataConfig, signature: Signature) -> dict[str, Feed]:
    """Return input of the file -> its feed; without pre-processing these are the inputs of the trained part."""
    images = {each.name: each for each in image_inputs(data, signature)}
    return {info.name: _feed(info, _columns_of(info, data, images), images) for info in signature.fed}


def _columns_of(info: TensorInfo, data: DataConfig, images: Mapping[str, ImageInput]) -> str | tuple[str, ...]:
    """Return the columns that feed an input of the file: those of its name, unless the configuration names others."""
    return images[info.name].column if info.name in images else data.inputs.get(info.name, info.name)


def _feed(info: TensorInfo, columns: str | tuple[str, ...], images: Mapping[str, ImageInput]) -> Feed:
    stacked = not isinstance(columns, str)
    image = images.get(info.name)
    names = as_tuple(columns)
    return Feed(f"input {info.name}", names, stacked, info.dtype, info.sample_shape, info.sequence, image=image)
