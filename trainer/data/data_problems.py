"""Report what does not fit between the columns of the data and the model, one sentence for each misfit."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from onward.trainer.config.losses import LossConfig, key_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.setting_paths import toml_key
from onward.trainer.data import misfits
from onward.trainer.data.feed_problems import NUMERIC, image_problems, shown_sample, text_problems, type_problems
from onward.trainer.data.images.image_decoding import MASK_TYPE
from onward.trainer.data.images.image_inputs import ImageInput, image_inputs, masks, mixed_labels
from onward.trainer.data.input_columns import Feed, InputColumns
from onward.trainer.data.schema.box_cells import BOX_NUMBERS, HEAD_NUMBERS
from onward.trainer.data.schema.class_axis import find_class_axis
from onward.trainer.data.schema.columns import TEXT, Column, Schema
from onward.trainer.data.schema.detection_grids import size_problems
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.label_axes import Dims
from onward.trainer.data.schema.signature import Signature, TensorInfo, read_training_signature
from onward.trainer.data.tables.class_names import class_problems
from onward.trainer.data.text.graph_limits import embedding_rows
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.onnx_graph.surgery.new_detector_head import num_classes_of


def data_problems(
    config: RunConfig,
    schema: Schema,
    signature: Signature | None = None,
    *,
    made: Collection[str] = (),
    fitted: Mapping[str, Fitted] = MappingProxyType({}),
) -> list[str]:
    """Return one sentence for each way in which the data does not fit the model; [] when it does.

    `schema` describes the first rows, or all of them. Reads `config.model` and `config.data`. Without `signature`, that
    of the model is read; raises UnsupportedModel when the ONNX file cannot be read. made: columns that are not checked,
    because `schema` is that of the source and they are computed later. fitted: what was found on the data, by column.
    """
    try:
        # a graph that does not allow the surgery has unknown inputs and outputs
        signature = signature or read_training_signature(config.model)
        # which columns are read depends on these
        masks(config.data, config.losses, signature)
        images = image_inputs(config.data, signature)
        mixed_labels(config.data, config.losses, signature)
    except ConfigError as error:
        return list(error.problems)
    columns = InputColumns(config.data, config.loss, config.model, signature)
    problems = [*_unknown_names(config.data, config.model, columns, signature), *_without_rows(signature)]
    constant = {f"input {info.name}" for info in signature.fed if not _has_rows(info, signature)}
    fed = columns.of_file()
    for feed in (*fed.values(), *columns.labels()):
        if columns.made_of_text.issuperset(feed.columns) or (
            columns.computed.issuperset(feed.columns) and not schema.keys() >= set(feed.columns)
        ):
            continue  # not computed yet, or right because the tokenizer made it for this input
        if set(feed.columns) & set(made) or feed.target in constant:
            continue
        if missing := [name for name in feed.columns if name not in schema]:
            problems += [_missing_column(feed, name, schema, signature) for name in missing]
            continue
        # pixels of the final size may be stored in place of files: both are right
        if feed.image:
            problems += image_problems(feed, schema[feed.columns[0]], "uint8", feed.image.pixel_shape)
        elif feed.mask and schema[feed.columns[0]].dtype != MASK_TYPE:
            problems += image_problems(feed, schema[feed.columns[0]], MASK_TYPE, feed.mask)
        elif feed.dtype == "string" and signature.computed:
            problems += text_problems(config.data, feed, [schema[name] for name in feed.columns])
        else:
            problems += type_problems(feed, [schema[name] for name in feed.columns])
    targets = {name for feed in columns.labels() for name in feed.columns}
    problems += [*_doubly_read(columns, signature), *misfits.label_as_input(fed.values(), targets)]
    problems += _balance_problems(columns, schema) if config.train.shuffle == "length" else ()
    problems += _vocabulary_problems(config.model, fed, fitted)
    mask_names = config.data.image.mask_columns if config.data.image else ()
    # files of masks have no classes yet: their pixels are read while the data is sharded
    encoded = {name for name in schema.keys() & set(mask_names) if schema[name].dtype != MASK_TYPE}
    checked = schema.keys() - {*made, *encoded}
    for loss in config.losses:
        if loss.has_classes and isinstance(loss.label, str) and loss.label in checked:
            key = key_of(config.losses, config.losses.index(loss), "name") if config.loss else "model.loss"
            problems += _label_range_problems(key, loss, signature, schema[loss.label], fitted)
    problems += _object_class_problems(config.losses, config.model, signature, fitted)
    return list(dict.fromkeys([*problems, *_box_problems(config.data.image, config.losses, images, schema)]))


def _object_class_problems(
    losses: Sequence[LossConfig], model: ModelConfig, signature: Signature, fitted: Mapping[str, Fitted]
) -> Iterator[str]:
    """Check that a detector has a score for each class of the boxes, where its file says how many it has."""
    for loss in losses:
        if loss.rule.labels != "objects" or loss.columns[0] not in fitted:
            continue
        number, scores = None, loss.outputs[-1 if loss.rule.has_grid else 0]
        if loss.rule.has_grid:
            with contextlib.suppress(ConfigError):  # the raw outputs are no convolutions
                number = model.num_classes or num_classes_of(read_model(model.path), model)
        elif (output := signature.output(scores)) and output.shape and output.shape[-1]:
            number = output.shape[-1] - (loss.scores == "softmax")
        yield from class_problems(loss.columns[0], fitted[loss.columns[0]], number, scores)


def _unknown_names(data: DataConfig, model: ModelConfig, columns: InputColumns, signature: Signature) -> Iterator[str]:
    inputs = [info.name for info in signature.fed]
    for name in data.inputs:
        if name in model.bind:
            yield f"input {name} has a value in model.bind and a column in data.inputs; remove one of them"
        elif name not in inputs:
            yield f"data.inputs names {name!r}, which is not an input of the model{_nearest(name, inputs)}"
    known = [*columns.to_read(), *columns.computed]
    for name in data.pad_values:
        if name not in known:
            yield f"data.pad_values names {name!r}, which is not a column that is read{_nearest(name, known)}"
    if not data.evaluation_fraction and not data.evaluation_source:
        yield "data.evaluation_fraction is 0 and there is no data.evaluation_source: nothing to evaluate on"


def _box_problems(
    image: ImageConfig | None, losses: Sequence[LossConfig], images: Sequence[ImageInput], schema: Schema
) -> Iterator[str]:
    """Yield what is wrong with the size of images for a grid, and with objects of several images for queries."""
    boxes = schema.get(image.box_column) if image else None
    if image is None or boxes is None:
        return
    joined = image.augment.joined
    # the longest row of boxes; of a source it is not known
    most = (sum(boxes.shape) - HEAD_NUMBERS) // BOX_NUMBERS
    for loss in losses:
        if loss.rule.has_grid:
            yield from size_problems(loss, images[0].size)
        # of images as they are, objects beyond the queries have no query, as in DETR
        if joined > 1 and 0 < loss.num_queries < joined * most:
            yield (
                f"data.image.augment.mosaic and mixup put {joined} images of up to {most} objects together, but loss "
                f"{loss.name} has {loss.num_queries} queries for them; leave one of the two or both out"
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there is {', '.join(names)}"


def _missing_column(feed: Feed, name: str, schema: Schema, signature: Signature) -> str:
    if undivided := misfits.undivided_header(name, schema):
        return undivided
    key = feed.target if feed.is_label else f"data.inputs.{feed.target.removeprefix('input ')}"
    missing = f"{feed.target} reads column {name!r}, which the data does not have{_nearest(name, schema)}; set {key}"
    if numbers := misfits.numbers_for(feed, schema.values()):
        return f"{missing} to {numbers}"
    if not feed.is_label and (found := misfits.remedy_of_absence(feed, schema.values())):
        return f"{missing}, or: {found}"
    # the only input of a model is what the samples are fed to, so that it has no constant value
    is_only_input = not signature.fed[1:]
    if feed.is_label or feed.stacked or is_only_input:
        return missing
    if feed.image or feed.dtype not in NUMERIC:
        return missing
    info = feed.target.removeprefix("input ")
    return f"{missing}, or, if no column is meant, {_bind(info, feed.sample_shape, 'for each row')}"


def _has_rows(info: TensorInfo, signature: Signature) -> bool:
    """Return whether axis 0 of an input can be the rows: no scalar, nor of a fixed length beside dynamic ones."""
    if info.sequence or info.shape is None:
        return True
    if not info.shape:
        return False
    tensors = [other for other in signature.fed if not other.sequence]
    is_dynamic = any(other.shape and other.shape[0] is None for other in tensors)
    return info.shape[0] is None or not is_dynamic


def _without_rows(signature: Signature) -> Iterator[str]:
    """Yield the inputs of which no axis has the rows of a batch, so that no column can feed them."""
    for info in signature.fed:
        if not _has_rows(info, signature):
            dims = info.shape or ()
            shape = "a single number" if info.shape == () else f"of shape {shown_sample(dims)}"
            # a dynamic axis that is not the first is probably that of the rows
            axis = next((at for at, length in enumerate(dims) if length is None), None)
            which = ""
            if axis:
                which = f"; or say which axis has the rows: model.batch_axes = {{{toml_key(info.name)} = {axis}}}"
            yield (
                f"input {info.name} is {shape}, no axis of which is known to have the rows of the batch: "
                f"{_bind(info.name, info.shape, 'for all rows')}{which}"
            )


def _bind(name: str, shape: Dims | None, of: str) -> str:
    """Return how to give an input a value. shape: that of the value `of` which rows."""
    lists = f", or a list of shape {shown_sample(shape)} {of}" if shape else ""
    return f"give it a value: model.bind = {{{toml_key(name)} = 0}} (a number{lists})"


def _doubly_read(columns: InputColumns, signature: Signature) -> Iterator[str]:
    """Yield the columns that would be read as text and as numbers, and those with the name of a computed tensor."""
    read = list(columns.of_source())
    for name in {name: None for feed in read for name in feed.columns}:
        targets = {feed.dtype == "string": feed.target for feed in read if name in feed.columns}
        if len(targets) == 2:
            yield f"column {name!r} feeds {targets[True]} as text and {targets[False]} as numbers; name another column"
        if name in signature.computed:
            yield f"column {name!r} has the name of a tensor that the pre-processing computes; rename the column"


def _balance_problems(columns: InputColumns, schema: Schema) -> Iterator[str]:
    inputs = [feed for feed in columns.feeds() if not feed.is_label]
    names = [name for feed in inputs for name in feed.columns]
    # the lengths of columns that are computed later are not known yet
    if any(name not in schema for name in names):
        return
    if not any(schema[name].variable for name in names):
        kinds = ", ".join(f"{name} {schema[name].kind}" for name in names[:5])
        yield f"train.shuffle is 'length', but every sample has one length ({kinds}); remove it"


def _vocabulary_problems(model: ModelConfig, fed: Mapping[str, Feed], fitted: Mapping[str, Fitted]) -> Iterator[str]:
    """Check that the ids of categories are rows of the embedding that an input indexes, where the graph shows it."""
    for feed in fed.values():
        # a column without a vocabulary counts 0 categories
        found = {name: len(fitted[name].vocabulary) for name in feed.columns if name in fitted}
        if not any(found.values()):
            continue
        table = embedding_rows(read_model(model.path).graph, feed.target.removeprefix("input "))
        for name, number in found.items():
            if table and number > table[0]:
                yield (
                    f"column {name!r} has {number:,} categories, the unknown one included, but the embedding "
                    f"{table[1]} has {table[0]:,} rows; use another model, or merge categories and name those that are "
                    "left in data.table.categories"
                )


def _declared_classes(loss: LossConfig, output: Dims, column: Column) -> int | None:
    """Return the number of classes of an output; None where it is dynamic, or the axis of classes not known yet."""
    if not loss.has_class_axis:
        return output[-1]
    # the rows, and of rows that vary their length, are not known yet
    labels = (None, None) if column.variable else (None, *column.shape)
    try:
        found = output[find_class_axis(output, labels, declared=output, given=loss.class_axis)]
    except ConfigError:
        return None
    return loss.rule.num_classes(found) if found else found


def _label_range_problems(
    key: str, loss: LossConfig, signature: Signature, column: Column, fitted: Mapping[str, Fitted]
) -> Iterator[str]:
    """Check that the labels are classes of the output. key: the setting with the name of the loss."""
    output = signature.output(loss.outputs[0])
    num_classes = _declared_classes(loss, output.shape, column) if output and output.shape else None
    if column.name in fitted and fitted[column.name].classes:
        yield from class_problems(column.name, fitted[column.name], num_classes, output.name if output else "")
        return
    # the two outermost values on either side are known, so that one is left if the other is ignored
    values = [value for value in column.extremes if value != loss.ignored]
    if not values or column.dtype == TEXT or np.dtype(column.dtype).kind == "f":
        return
    has_one_score = num_classes == 1 and loss.rule.needs_two_scores
    if output and has_one_score and values[-1] != values[0]:
        classes = f'for two classes set {key} = "bce_with_logits"; ' if values == [0, 1] else ""
        yield (
            f"{key} is {loss.name!r}, but output {output.name} has one score a sample, which cannot tell the classes "
            f"of column {column.name!r} ({values[0]:d}..{values[-1]:d}) apart; {classes}{misfits.loss_of_numbers(key)}"
        )
        return
    if values[0] < 0 or (num_classes is not None and values[-1] >= num_classes):
        fits = "0 or more"
        if num_classes and output:
            fits = f"0..{num_classes - 1}, because output {output.name} is {num_classes} wide"
        yield (
            f"the labels in column {column.name!r} are {values[0]}..{values[-1]}, but must be {fits} "
            f"(or model.ignore_index {loss.ignored})"
        )
