"""Report what does not fit between the columns of the data and the model, one sentence for each misfit."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from onward.trainer.config.losses import LossConfig, key_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data import misfits
from onward.trainer.data.images.image_decoding import MASK_TYPE
from onward.trainer.data.images.image_inputs import image_inputs, masks, mixed_labels
from onward.trainer.data.input_columns import (
    Feed,
    columns_to_read,
    computed_columns,
    feeds,
    feeds_of_source,
    file_feeds,
    labels,
)
from onward.trainer.data.reading import sources
from onward.trainer.data.schema.class_axis import find_class_axis
from onward.trainer.data.schema.columns import BYTES, TEXT, Column, Schema
from onward.trainer.data.schema.fitted import Fitted
from onward.trainer.data.schema.label_axes import fits
from onward.trainer.data.schema.label_axes import remedy as remedy_of_axes
from onward.trainer.data.schema.signature import Dims, Signature, TensorInfo, read_training_signature
from onward.trainer.data.tables.class_names import class_problems
from onward.trainer.data.text.graph_limits import embedding_rows
from onward.trainer.data.text.text_columns import text_columns
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.quantities import shown_shape

NUMERIC = {"bool", "float16", "bfloat16", "float32", "float64", "uint8", "uint16", "uint32", "uint64"} | {
    f"int{bits}" for bits in (8, 16, 32, 64)
}
"""Types that columns of numbers can be converted to."""


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
        signature = signature or read_training_signature(config.model)
    except ConfigError as error:  # the graph does not allow the surgery, so its inputs and outputs are unknown
        return list(error.problems)
    try:
        masks(config, signature)
        image_inputs(config.data, signature)
        mixed_labels(config, signature)
    except ConfigError as error:  # which columns are read depends on it
        return list(error.problems)
    problems = [*_unknown_names(config, signature), *_without_rows(signature)]
    constant = {f"input {info.name}" for info in signature.fed if not _has_rows(info, signature)}
    computed, text = computed_columns(config, signature), text_columns(config, signature)
    made_of_text = text.computed if text else frozenset[str]()
    for feed in (*file_feeds(config.data, signature).values(), *labels(config, signature)):
        if made_of_text.issuperset(feed.columns) or (
            computed.issuperset(feed.columns) and not schema.keys() >= set(feed.columns)
        ):
            continue  # not computed yet, or right because the tokenizer made it for this input
        if set(feed.columns) & set(made) or feed.target in constant:
            continue
        missing = [name for name in feed.columns if name not in schema]
        problems += [_missing_column(feed, name, schema, signature) for name in missing]
        if missing:
            continue
        if feed.image:
            problems += _image_problems(feed, schema[feed.columns[0]], "uint8", feed.image.pixel_shape)
        elif feed.mask and schema[feed.columns[0]].dtype != MASK_TYPE:
            problems += _image_problems(feed, schema[feed.columns[0]], MASK_TYPE, feed.mask)
        elif feed.dtype == "string" and signature.computed:
            problems += _text_problems(config.data, feed, [schema[name] for name in feed.columns])
        else:
            problems += type_problems(feed, [schema[name] for name in feed.columns])
    problems += _doubly_read(config, signature)
    targets = {name for feed in labels(config, signature) for name in feed.columns}
    problems += misfits.label_as_input(file_feeds(config.data, signature).values(), targets)
    problems += _balance_problems(config, signature, schema)
    problems += _vocabulary_problems(config, signature, fitted)
    mask_names = config.data.image.mask_columns if config.data.image else ()
    for loss in config.losses:
        encoded = {name for name, column in schema.items() if name in mask_names and column.dtype != MASK_TYPE}
        if loss.has_classes and isinstance(loss.label, str) and loss.label in schema.keys() - {*made, *encoded}:
            problems += _label_range_problems(config, loss, signature, schema[loss.label], fitted)
    return list(dict.fromkeys(problems))


def _unknown_names(config: RunConfig, signature: Signature) -> Iterator[str]:
    inputs = [info.name for info in signature.fed]
    for name in config.data.inputs:
        if name in config.model.bind:
            yield f"input {name} has a value in model.bind and a column in data.inputs; remove one of them"
        elif name not in inputs:
            yield f"data.inputs names {name!r}, which is not an input of the model{_nearest(name, inputs)}"
    columns = [*columns_to_read(config, signature), *computed_columns(config, signature)]
    for name in config.data.pad_values:
        if name not in columns:
            yield f"data.pad_values names {name!r}, which is not a column that is read{_nearest(name, columns)}"
    if not config.data.evaluation_fraction and not config.data.evaluation_source:
        yield "data.evaluation_fraction is 0 and there is no data.evaluation_source: nothing to evaluate on"


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
    # the only input of a model is what the samples are fed to
    if feed.is_label or feed.stacked or feed.image or feed.dtype not in NUMERIC or not signature.fed[1:]:
        return missing
    info = feed.target.removeprefix("input ")
    return f"{missing}, or, if no column is meant, {_bind(info, feed.sample_shape, 'for each row')}"


def _has_rows(info: TensorInfo, signature: Signature) -> bool:
    """Return whether axis 0 of an input can be the rows: no scalar, nor of a fixed length beside dynamic ones."""
    is_dynamic = any(each.shape and each.shape[0] is None for each in signature.fed if not each.sequence)
    return info.sequence or info.shape is None or (bool(info.shape) and not (is_dynamic and info.shape[0] is not None))


def _without_rows(signature: Signature) -> Iterator[str]:
    """Yield the inputs of which no axis has the rows of a batch, so that no column can feed them."""
    for info in signature.fed:
        if not _has_rows(info, signature):
            shape = "a single number" if info.shape == () else f"of shape {_shown(info.shape or ())}"
            axis = next((at for at, length in enumerate(info.shape or ()) if length is None), None)
            which = (
                f"; or say which axis has the rows: model.batch_axes = {{{_key(info.name)} = {axis}}}" if axis else ""
            )
            yield (
                f"input {info.name} is {shape}, no axis of which is known to have the rows of the batch: "
                f"{_bind(info.name, info.shape, 'for all rows')}{which}"
            )


def _bind(name: str, shape: Dims | None, of: str) -> str:
    """Return how to give an input a value. shape: that of the value `of` which rows."""
    lists = f", or a list of shape {_shown(shape)} {of}" if shape else ""
    return f"give it a value: model.bind = {{{_key(name)} = 0}} (a number{lists})"


def _key(name: str) -> str:
    """Return a name as a key of TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def type_problems(feed: Feed, columns: list[Column]) -> Iterator[str]:
    """Yield what is wrong with the types and shapes of the columns of one feed."""
    if feed.dtype not in NUMERIC:
        yield f"{feed.target} takes {feed.dtype}, which cannot be fed from columns of numbers"
        return
    if feed.sequence and feed.stacked:
        yield f"{feed.target} is a sequence with one tensor a sample; it cannot be stacked from columns"
        return
    for column in columns:
        if column.dtype == TEXT:
            how = "number the classes from 0 on, in the model's order"
            of_names = 'only a cross-entropy takes class names (model.loss = "cross_entropy")'
            how = how if feed.dtype == "int64" else of_names
            how = f"; {how}" if feed.is_label else _advice(feed, column)
            yield f"{feed.target} takes {feed.dtype}, but column {column.name!r} holds text{how}"
        elif column.dtype == BYTES:
            yield f"{feed.target} takes {feed.dtype}, but column {column.name!r} holds bytes{_advice(feed, column)}"
        elif not _castable(column.dtype, feed.dtype):
            numbers = feed.target.endswith("label") and feed.dtype == "int64"
            key = "model.loss" if feed.target == "data.label" else feed.target.replace(".label", ".name")
            hint = f": the loss compares with classes 0, 1, 2, ...; {misfits.loss_of_numbers(key)}" if numbers else ""
            yield f"{feed.target} takes {feed.dtype}, but column {column.name!r} holds {column.dtype}{hint}"
        elif feed.stacked and len(feed.sample_shape or ()) == 2 and not column.variable:
            if column.shape != columns[0].shape:
                yield f"{feed.target} stacks columns of one length, but column {column.name!r} is {column.kind}"
        elif feed.stacked and (column.shape or column.variable):
            yield f"{feed.target} stacks single numbers, but column {column.name!r} is {column.kind}"
    shape = feed.sample_shape
    if feed.stacked:
        found = (*columns[0].shape, len(columns))  # series are stacked on the last axis: [length, columns]
        pairs = zip(shape or (), found, strict=False)
        wrong = shape is not None and (len(shape) != len(found) or any(dim not in (None, size) for dim, size in pairs))
        if feed.is_label:
            wrong = shape is not None and not fits(shape, found)
        if wrong:
            what = f" of {_shown(found[:-1])}" if found[:-1] else ""
            by = "it" if feed.is_label else "data.inputs"
            yield (
                f"{feed.target} takes shape {_shown(shape or ())} per sample, but {by} stacks {len(columns)} columns"
                f"{what}{_advice(feed, columns[0])}"
            )
    elif columns[0].holds_numbers and (problem := _shape_problem(feed, columns[0])):
        yield problem


def _image_problems(feed: Feed, column: Column, dtype: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield what is wrong with a column of encoded images or paths; after sharding it may hold pixels."""
    if column.holds_numbers and (column.dtype, column.shape) != (dtype, shape):
        what, setting = ("masks", "data.image.masks") if feed.is_label else ("images", "[data.image]")
        yield (
            f"{feed.target} takes encoded {what} or paths, but column {column.name!r} holds {column.kind}; leave "
            f"{setting} out to feed numbers as they are"
        )


def _text_problems(data: DataConfig, feed: Feed, columns: list[Column]) -> Iterator[str]:
    """Yield what is wrong with the columns of a feed of strings."""
    for column in columns:
        # the cells of a CSV file are text, also those that look like numbers
        if column.dtype != TEXT and sources.locate(data.source, data).data_format.has_types:
            yield f"{feed.target} takes strings, but column {column.name!r} holds {column.kind}, not text"
    shape = feed.sample_shape
    if feed.sequence and feed.stacked:
        yield f"{feed.target} is a sequence with one tensor a sample; it cannot be stacked from columns"
    elif feed.stacked and shape is not None and (len(shape) != 1 or shape[0] not in (None, len(columns))):
        yield f"{feed.target} takes shape {_shown(shape)} per sample, but data.inputs stacks {len(columns)} columns"
    elif not feed.stacked and shape not in (None, (), (1,), (None,)):
        yield (
            f"{feed.target} takes {_shown(shape)} strings a sample, but column {columns[0].name!r} holds one; stack "
            f"several columns: data.inputs.{feed.target.removeprefix('input ')} = [...]"
        )


def _doubly_read(config: RunConfig, signature: Signature) -> Iterator[str]:
    """Yield the columns that would be read as text and as numbers, and those with the name of a computed tensor."""
    read = list(feeds_of_source(config, signature))
    for name in {name: None for feed in read for name in feed.columns}:
        targets = {feed.dtype == "string": feed.target for feed in read if name in feed.columns}
        if len(targets) == 2:
            yield f"column {name!r} feeds {targets[True]} as text and {targets[False]} as numbers; name another column"
        if name in signature.computed:
            yield f"column {name!r} has the name of a tensor that the pre-processing computes; rename the column"


def _advice(feed: Feed, column: Column) -> str:
    """Return, behind a semicolon, the setting that makes a column fit; "" if there is none."""
    found = misfits.remedy(feed, column)
    return f"; {found}" if found else ""


def _castable(source: str, target: str) -> bool:
    """Return whether a column may be converted: integers and booleans to floats, but not the reverse."""
    # floats as labels or ids would be cut off
    return np.dtype(source).kind in "biu" or "float" in target


def _class_axis_problem(feed: Feed, column: Column) -> str:
    """Return what is wrong with labels beside scores of three or more axes: no axis of classes fits, or several do."""
    assert feed.scores is not None
    labels = (None, *column.shape)
    try:
        find_class_axis(feed.scores, labels, declared=feed.scores, given=feed.class_axis)
    except ConfigError as error:
        # lengths that are not known yet fit any axis: the rehearsal sees the real ones
        known = None not in (*feed.scores[1:], *labels[1:])
        return "" if not known else (_last_axis_problem(feed, column) or "; ".join(error.problems))
    return ""


def _last_axis_problem(feed: Feed, column: Column) -> str:
    """Return a sentence that is easier to read, where labels fit no axis in number."""
    assert feed.scores is not None
    sample = feed.scores[1:]
    sizes = {math.prod(dim or 0 for at, dim in enumerate(sample) if at != axis) for axis in range(len(sample))}
    if math.prod(column.shape) in sizes or feed.class_axis is not None:
        return ""
    takes = f"{feed.target} must be {_shown(sample[:-1])} a sample to fit the output"
    return f"{takes}, but column {column.name!r} is {column.kind}"


def _shape_problem(feed: Feed, column: Column) -> str:
    shape = feed.sample_shape
    if feed.scores is not None and len(feed.scores) > 2 and not column.variable:
        return _class_axis_problem(feed, column)
    if shape is None:
        return ""
    if feed.is_label:
        wrong = not _labels_fit(shape, column)
        takes = f"{feed.target} must be {_shown(shape)} a sample to fit the output"
    elif column.variable:
        wrong = len(shape) != 1 or (shape[0] or 0) > column.shape[0]
        takes = f"{feed.target} takes {_shown(shape)} a sample"
    else:
        found = (1,) if feed.is_one_column and not column.shape else column.shape
        pairs = zip(shape, found, strict=False)
        wrong = len(shape) != len(found) or any(dim is not None and dim != size for dim, size in pairs)
        takes = f"{feed.target} takes {_shown(shape)} a sample"
    is_vector = shape == (None,) and not column.shape
    hint = f"; ['{column.name}'] makes a vector of one" if is_vector else _advice(feed, column)
    if feed.is_label and (advice := remedy_of_axes(shape, column.shape, column.name)):
        hint = f": {advice}"
    return f"{takes}, but column {column.name!r} is {column.kind}{hint}" if wrong else ""


def _labels_fit(shape: Dims, column: Column) -> bool:
    """Return whether the rows of a column pair with an output whose labels have this shape."""
    if not column.variable:
        return fits(shape, column.shape)
    # rows of varying length are padded to the longest of a batch, on their one axis
    size = math.prod(dim or 0 for dim in shape)
    return fits(shape, (None,)) and (None in shape or column.shape[0] >= size)


def _shown(dims: Dims) -> str:
    return shown_shape(dims) if dims else "one number"


def _balance_problems(config: RunConfig, signature: Signature, schema: Schema) -> Iterator[str]:
    columns = [name for feed in feeds(config, signature) if not feed.is_label for name in feed.columns]
    known = all(name in schema for name in columns)  # else they are computed later
    if config.train.shuffle == "length" and known and not any(schema[name].variable for name in columns):
        kinds = ", ".join(f"{name} {schema[name].kind}" for name in columns[:5])
        yield f"train.shuffle is 'length', but every sample has one length ({kinds}); remove it"


def _vocabulary_problems(config: RunConfig, signature: Signature, fitted: Mapping[str, Fitted]) -> Iterator[str]:
    """Check that the ids of categories are rows of the embedding that an input indexes, where the graph shows it."""
    for feed in file_feeds(config.data, signature).values():
        found = {name: len(fitted[name].vocabulary) for name in feed.columns if name in fitted}
        if not any(found.values()):
            continue
        table = embedding_rows(read_model(config.model.path).graph, feed.target.removeprefix("input "))
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
    labels = (None, None) if column.variable else (None, *column.shape)
    try:
        found = output[find_class_axis(output, labels, declared=output, given=loss.class_axis)]
    except ConfigError:
        return None
    return loss.rule.num_classes(found) if found else found


def _label_range_problems(
    config: RunConfig, loss: LossConfig, signature: Signature, column: Column, fitted: Mapping[str, Fitted]
) -> Iterator[str]:
    """Check that the labels are classes of the output."""
    output = signature.output(loss.outputs[0])
    num_classes = _declared_classes(loss, output.shape, column) if output and output.shape else None
    if column.name in fitted and fitted[column.name].classes:
        yield from class_problems(column.name, fitted[column.name], num_classes, output.name if output else "")
        return
    values = [value for value in column.extremes if value != loss.ignored]
    if not values or column.dtype == TEXT or np.dtype(column.dtype).kind == "f":
        return
    if num_classes == 1 and output and loss.rule.needs_two_scores and values[-1] != values[0]:
        key = key_of(config.losses, config.losses.index(loss), "name") if config.loss else "model.loss"
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
