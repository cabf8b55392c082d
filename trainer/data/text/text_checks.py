"""Find what does not fit between a tokenizer, the columns of text, and the graph, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.metrics import MetricConfig, metrics_of
from onward.trainer.data.reading.sources import all_sources
from onward.trainer.data.schema.columns import Schema
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.text.byte_counts import counts_bytes
from onward.trainer.data.text.graph_limits import embedding_rows, position_rows
from onward.trainer.data.text.packing import PackedTexts, SeparateTexts
from onward.trainer.data.text.text_columns import TextColumns, input_problems, text_columns
from onward.trainer.data.text.tokenized_rows import Storage, TokenizedRows
from onward.trainer.data.text.tokenizer import OpenTokenizer, open_tokenizer
from onward.trainer.data.text.word_labels import WordLabels
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.model_files import read_model


def text_problems(config: RunConfig, schema: Schema, signature: Signature) -> list[str]:
    """Return one sentence for each way in which [data.text] does not fit the model or the data; [] without it.

    `schema` describes the first rows of the source, `signature` the trained part.
    """
    columns = text_columns(config.data, config.losses, config.model, signature)
    if columns is None:
        return []
    # cells of CSV files have no types: a number may be a text there
    has_types = all(source.data_format.has_types for source in all_sources(config.data))
    problems = [
        *input_problems(columns, config.data, config.losses, signature),
        *_column_problems(columns, schema, has_types=has_types),
    ]
    if counts_bytes(config.data, config.metrics):
        problems += _byte_problems(columns, config.losses, config.metrics)
    graph = read_model(config.model.path).graph
    limit, problem = length_limit(columns, graph)
    problems += [each for each in (problem, _position_problem(columns, graph)) if each]
    try:
        tokenizer = open_tokenizer(columns.config.tokenizer)
        problems += _vocabulary_problems(columns, tokenizer, graph)
        if "input_ids" in columns.inputs:
            # opened and dropped: what opening refuses belongs to this list
            _open(columns, tokenizer, limit, config.data, config.metrics, graph)
    except ConfigError as error:
        problems += error.problems
    return problems


def open_tokenized_rows(config: RunConfig, signature: Signature) -> TokenizedRows | None:
    """Open the tokenizer of [data.text]; None without it. Raises ConfigError with all that does not fit the model."""
    columns = text_columns(config.data, config.losses, config.model, signature)
    if columns is None:
        return None
    if problems := list(input_problems(columns, config.data, config.losses, signature)):
        raise ConfigError(problems)
    graph = read_model(config.model.path).graph
    limit, problem = length_limit(columns, graph)
    if found := [each for each in (problem, _position_problem(columns, graph)) if each]:
        raise ConfigError(found)
    tokenizer = open_tokenizer(columns.config.tokenizer)
    return _open(columns, tokenizer, limit, config.data, config.metrics, graph)


def _open(
    columns: TextColumns,
    tokenizer: OpenTokenizer,
    limit: int,
    data: DataConfig,
    metrics: Sequence[MetricConfig],
    graph: onnx.GraphProto,
) -> TokenizedRows:
    left, why_right = pads_left(columns, tokenizer, graph)
    storage = Storage(counts_bytes(data, metrics), left, why_right)
    if columns.config.task == "tokens":
        return WordLabels(columns, tokenizer, limit, storage, classes=data.classes)
    kinds = {"none": TokenizedRows, "joined": PackedTexts, "separate": SeparateTexts}
    return kinds[columns.packing](columns, tokenizer, limit, storage)


def pads_left(columns: TextColumns, tokenizer: OpenTokenizer, graph: onnx.GraphProto) -> tuple[bool, str]:
    """Return whether rows are padded in front, and why they are not although the tokenizer says so, or "".

        right   a  b  c        left   a  b  c        positions  0  1  2
                d  -  -               -  -  d                   -  -  0        - = padding, which the mask hides

    Raises ConfigError where data.text.pad_side = "left" would change what the model computes of a text.
    """
    wanted = columns.config.pad_side
    padding = tokenizer.settings.get("padding")
    tokenizer_pads_left = isinstance(padding, dict) and padding.get("direction") == "Left"
    is_left = wanted == "left" or (wanted == "auto" and tokenizer_pads_left)
    if not is_left or columns.is_packed:
        return False, ""
    why = _hindrance_of_padding(columns, graph)
    if why and wanted == "left":
        raise ConfigError(f"data.text.pad_side 'left': {why}; use pad_side = 'right'")
    return not why, why


def _hindrance_of_padding(columns: TextColumns, graph: onnx.GraphProto) -> str:
    """Return why padding in front would change what the model computes of a text, or ""."""
    if columns.config.task == "causal" and "attention_mask" not in columns.inputs:
        return "the model has no input attention_mask, so that each token would attend to the padding in front of it"
    counts_places = "position_ids" not in columns.inputs and not columns.fixed_length
    # positions that are the running sum of the mask do not count the padding
    table = position_rows(graph, with_masks=False) if counts_places else None
    if table is None:
        return ""
    return (
        f"the model counts positions through the row (embedding {table[1]}) and has no input position_ids, so that the "
        "positions of a text would depend on the longest text of its batch"
    )


def _byte_problems(
    columns: TextColumns, losses: Sequence[LossConfig], metrics: Sequence[MetricConfig]
) -> Iterator[str]:
    """Yield what is wrong with bits_per_byte of losses whose targets are not the next tokens."""
    for each in metrics:
        measured = [loss for loss in losses if each in metrics_of(loss, metrics)]
        if each.name == "bits_per_byte" and any(loss.label != columns.label for loss in measured):
            yield (
                f"metrics: {each.key} counts the bytes of the next tokens, but it measures losses of other labels, "
                "too; name an output, or set bytes_per_target"
            )


def _position_problem(columns: TextColumns, graph: onnx.GraphProto) -> str:
    """Return why positions do not begin anew in each text of a window, or ""."""
    table = position_rows(graph) if columns.packing == "separate" and "position_ids" not in columns.inputs else None
    if table is None:
        return ""
    return (
        f"data.text.packing 'separate': the model counts positions through a window (embedding {table[1]}) and has no "
        "input position_ids, with which they begin anew in each text; use packing = 'joined' or 'none'"
    )


def length_limit(columns: TextColumns, graph: onnx.GraphProto) -> tuple[int, str]:
    """Return the tokens that a sample may have, 0 for no limit, and what is wrong with data.text.max_length or ""."""
    most = columns.config.max_length
    # with an input of positions the graph counts none itself: what limits them is the table that the input indexes
    tables = [position_rows(graph) if "position_ids" not in columns.inputs else None]
    if info := columns.inputs.get("position_ids"):
        tables.append(embedding_rows(graph, info.name))
    rows, name = min((table for table in tables if table), default=(0, ""))
    if rows and most > rows:
        return rows, (
            f"data.text.max_length {most} is above the {rows} position embeddings of the model ({name}); "
            f"set it to {rows} or less"
        )
    return most or columns.fixed_length or rows, ""


def _column_problems(columns: TextColumns, schema: Schema, *, has_types: bool) -> Iterator[str]:
    is_tokens = columns.config.task == "tokens"
    takes_pair = not is_tokens and not columns.is_packed
    num_sources = len(columns.sources)
    if num_sources != 1 and not (takes_pair and num_sources == 2):
        sample = "one text or a pair" if takes_pair else "one column"
        yield f"data.text.columns has {num_sources} entries; a sample of {columns.config.task} is {sample}"
    if is_tokens and columns.label_source not in schema:
        yield f"data.label names {columns.label_source!r}, which the data does not have; there is {', '.join(schema)}"
    for name in columns.sources:
        if name not in schema:
            yield f"data.text.columns names {name!r}, which the data does not have; there is {', '.join(schema)}"
            continue
        # without types, as in a CSV file, a cell that looks like a number may be text
        is_number = has_types and schema[name].holds_numbers
        if not is_tokens and (schema[name].shape or is_number):
            yield f"data.text.columns names {name!r}, which holds {schema[name].kind}, not text"


def _vocabulary_problems(columns: TextColumns, tokenizer: OpenTokenizer, graph: onnx.GraphProto) -> Iterator[str]:
    info = columns.inputs.get("input_ids")
    table = embedding_rows(graph, info.name) if info else None
    if table and tokenizer.greatest_id >= table[0]:
        yield (
            f"{tokenizer.path} has ids up to {tokenizer.greatest_id}, but the embedding {table[1]} of the model has "
            f"{table[0]} rows; it is the tokenizer of another model, or tokens were added to it"
        )
