"""Open what a configuration computes of the data while it is sharded (of batches: batch_computations.py)."""

from __future__ import annotations

from collections.abc import Sequence

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.audio.audio_clips import AudioClips, open_audio
from onward.trainer.data.empty_targets import open_empty_targets
from onward.trainer.data.images.box_columns import BoxColumn
from onward.trainer.data.images.image_computer import ImageComputer
from onward.trainer.data.images.image_inputs import box_column, image_inputs, masks
from onward.trainer.data.images.image_sources import annotations_beside
from onward.trainer.data.input_columns import InputColumns
from onward.trainer.data.preprocessing import open_preprocessor
from onward.trainer.data.reading import sources
from onward.trainer.data.schema.column_computers import ColumnComputer
from onward.trainer.data.schema.columns import ColumnType, Schema
from onward.trainer.data.schema.fitted import FittedComputer
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.sequence_lengths import open_sequence_lengths
from onward.trainer.data.tables.class_names import ClassNames, open_class_names
from onward.trainer.data.tables.table_columns import Categories, NumberColumns, open_table_columns
from onward.trainer.data.text.text_checks import open_tokenized_rows


def open_fitted(
    data: DataConfig, losses: Sequence[LossConfig], signature: Signature, schema: Schema
) -> list[ClassNames | NumberColumns | Categories | AudioClips | BoxColumn]:
    """Return what computes columns in the place of columns of the source, which `schema` describes.

    Raises ConfigError as `open_class_names`, `open_table_columns`, `open_audio` and `box_column`.
    """
    in_place = open_class_names(data, losses, schema), open_table_columns(data, losses, signature, schema)
    return [*in_place[0], *in_place[1], *open_audio(data, schema), *_open_boxes(data, losses, signature)]


def _open_boxes(data: DataConfig, losses: Sequence[LossConfig], signature: Signature) -> list[BoxColumn]:
    """Return the computer of the column of boxes, with the names that settings or annotations give its classes."""
    column = box_column(data, losses)
    if not column or data.image is None:
        return []
    names: Sequence[str] | None = None if isinstance(data.classes, str) else data.classes
    if names is None and data.image.box_place:
        names = annotations_beside(sources.locate(data.source, data).files, data.image.box_place).names or None
    return [BoxColumn(column, image_inputs(data, signature)[0].column, names)]


def read_and_computed(
    config: RunConfig, signature: Signature, schema: Schema
) -> tuple[dict[str, ColumnType], list[ColumnComputer]]:
    """Return the columns of the source to read, and what computes further ones from them, in order.

    schema: the columns of the source. Raises UnsupportedModel as Preprocessor, ConfigError as TokenizedRows,
    `image_inputs` and `open_fitted`.
    """
    feeds = InputColumns(config.data, config.loss, config.model, signature)
    columns = feeds.to_read()
    decoder = None
    images = image_inputs(config.data, signature)
    if images and config.data.image:
        decoder = ImageComputer(images, config.data.image, masks(config.data, config.losses, signature))
    opened = (
        decoder,
        open_preprocessor(config.model, feeds, signature),
        open_tokenized_rows(config, signature),
    )
    checks: list[ColumnComputer] = [*open_sequence_lengths(config.losses, signature)]
    checks += open_empty_targets(config.losses, schema)
    in_place = open_fitted(config.data, config.losses, signature, schema)
    computers = [*in_place, *checks, *(computer for computer in opened if computer)]
    fitted = [computer for computer in computers if isinstance(computer, FittedComputer)]
    # a fitted computer may replace a column under its own name, and then reads it in a type of its own
    for computer in fitted:
        columns = {name: column_type for name, column_type in columns.items() if name not in computer.makes}
    for computer in fitted:
        columns |= computer.reads
    return columns, computers
