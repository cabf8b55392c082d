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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onward.trainer.config.losses import key_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.images.image_inputs import ImageInput, image_inputs, masks
from onward.trainer.data.schema.columns import BYTES, TEXT, ColumnType
from onward.trainer.data.schema.label_axes import label_shape
from onward.trainer.data.schema.signature import Dims, Signature, TensorInfo
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


def feeds(config: RunConfig, signature: Signature) -> list[Feed]:
    """Return a feed for each input of the trained part in order, then one for the labels of each loss that has any,
    and after it one for the input lengths of a CTC.

    What pre-processing or a tokenizer computes is stored under the name of the tensor.
    """
    computed = computed_columns(config, signature)
    images = {each.name: each for each in image_inputs(config.data, signature)}
    found = [
        _feed(info, info.name if info.name in computed else _columns_of(info, config.data, images), images)
        for info in signature.inputs
    ]
    return [*found, *labels(config, signature)]


def computed_columns(config: RunConfig, signature: Signature) -> frozenset[str]:
    """Return the columns that feed inputs of the trained part and are computed, not read."""
    text = text_columns(config, signature)
    return frozenset(signature.computed) | (text.computed if text else frozenset())


def file_feeds(data: DataConfig, signature: Signature) -> dict[str, Feed]:
    """Return input of the file -> its feed; without pre-processing these are the inputs of the trained part."""
    images = {each.name: each for each in image_inputs(data, signature)}
    return {info.name: _feed(info, _columns_of(info, data, images), images) for info in signature.fed}


def _columns_of(info: TensorInfo, data: DataConfig, images: Mapping[str, ImageInput]) -> str | tuple[str, ...]:
    """Return the columns that feed an input of the file: those of its name, unless the configuration names others."""
    return images[info.name].column if info.name in images else data.inputs.get(info.name, info.name)


def labels(config: RunConfig, signature: Signature) -> Iterator[Feed]:
    """Yield the feeds of the labels of each loss that takes labels."""
    sizes = {mask.column: mask.size for mask in masks(config.data, config.losses, signature)}
    for feed in label_feeds(config, signature):
        yield replace(feed, mask=sizes.get(feed.columns[0]))


def label_feeds(config: RunConfig, signature: Signature) -> Iterator[Feed]:
    losses = config.losses
    for place, loss in enumerate(losses):
        if not loss.takes_labels:
            continue
        output = signature.output(loss.outputs[0])
        # messages name the setting that the user has written
        own = bool(config.loss and config.loss[place].label)
        key = key_of(losses, place, "label") if own else "data.label"
        stacked = not isinstance(loss.label, str)
        dtype = loss.label_dtype
        scores = output.shape if output and loss.has_class_axis else None
        whole = label_shape(loss, output.shape) if output and output.shape is not None else None
        shape = None if whole is None else whole[1:]
        yield Feed(key, loss.columns, stacked, dtype, shape, is_label=True, scores=scores, class_axis=loss.class_axis)
        if loss.input_lengths:
            key = key_of(losses, place, "input_lengths")
            yield Feed(key, (loss.input_lengths,), False, "int64", (), is_label=True)


def _feed(info: TensorInfo, columns: str | tuple[str, ...], images: Mapping[str, ImageInput]) -> Feed:
    stacked = not isinstance(columns, str)
    names = (columns,) if isinstance(columns, str) else columns
    image = images.get(info.name)
    return Feed(f"input {info.name}", names, stacked, info.dtype, info.sample_shape, info.sequence, image=image)


def feeds_of_source(config: RunConfig, signature: Signature) -> Iterator[Feed]:
    """Yield the feeds of inputs of the file, and of labels, whose columns the data has itself."""
    text = text_columns(config, signature)
    computed = text.computed if text else frozenset[str]()
    for feed in (*file_feeds(config.data, signature).values(), *labels(config, signature)):
        if not computed.issuperset(feed.columns):
            yield feed


def columns_to_read(config: RunConfig, signature: Signature) -> dict[str, ColumnType]:
    """Return the columns of the data to read; one that feeds two inputs gets a type that serves both."""
    text = text_columns(config, signature)
    found: dict[str, ColumnType] = dict(text.read) if text else {}
    for feed in feeds_of_source(config, signature):
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
