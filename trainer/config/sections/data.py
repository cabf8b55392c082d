"""The settings of the data: [data]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from onward.trainer.config.section import COMMON, Length, NonNegativeInt, PositiveInt, Section
from onward.trainer.config.sections.audio import AudioConfig
from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.config.sections.tables import TableConfig
from onward.trainer.config.sections.text import TextConfig
from onward.trainer.config.urls import Location, redacted, url_of


class SourceConfig(Section):
    """One of several sources that are mixed."""

    source: Location
    """A file, a directory or a glob, as in `data.source`."""
    weight: PositiveFloat = 1.0
    """How many of the samples are of this source, in proportion to the weights of the others."""


class DataConfig(Section):
    """Where samples come from, and which column feeds which input of the model."""

    source: Annotated[Location, COMMON]
    """A file, a directory or a glob, also by URL; or `digits` (scikit-learn's 1,797 images), or `stdlib` (the text of
    Python's standard library). Relative to the config file; on the command line, to the working directory."""
    format: Literal[
        "auto",
        "csv",
        "parquet",
        "jsonl",
        "npz",
        "text",
        "digits",
        "arrow",
        "shards",
        "pb",
        "images",
        "audio",
        "webdataset",
    ] = "auto"
    """The format of the source; `auto` decides by its name. `images` and `audio` are files in a folder for each class,
    `webdataset` tar files, `arrow` single files of Onward's shards, `shards` a directory of them with its manifest,
    which may be at a URL and larger than the disk, `pb` those of ONNX Runtime's trainer. Of a directory of text
    the files in .py are read, or else, with `[data.text]`, those in .txt; a glob names others: `notes/**/*.md`."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources in place of `source`, each with a weight, mixed anew in each epoch. An epoch has as many samples
    as all sources together; of a source it has the share of its weight, so that the rows of a source with a large
    weight and few rows are taken several times."""
    image: ImageConfig | None = None
    """How encoded images are read: the table `[data.image]`; without it no column holds encoded images."""
    audio: AudioConfig | None = None
    """A column of audio files: `[data.audio]`."""
    files_from: tuple[Location, ...] = ()
    """Directories of which the files may be that cells of a table name (images, audio) and links in a folder lead to;
    empty = only of the source's own directory: that of the table. A single one needs no list."""
    evaluation_source: Location = ""
    """Samples to evaluate on; empty = set aside `evaluation_fraction` of the source, or of each of several."""
    evaluation_rows: NonNegativeInt = 0
    """Evaluate on so many rows only, always the same ones; 0 = on all that are set aside or in `evaluation_source`."""
    test_source: Location = ""
    """Samples on which the exported file is evaluated once, at the end. Nothing is chosen by the result."""
    evaluation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """The share of rows (of files, for text) set aside for evaluation; which ones depends on the row's
    place in its file (or on the file's name) alone, so appended rows move none to the other side."""
    split: Literal["random", "stratified", "series"] = "random"
    """How the rows for evaluation are chosen: `random` = among all rows; `stratified` = among the rows of each class in
    `label`, so that each class has its share. Both by hashes of a row's place, without a seed. Of windows over time
    series (`table.window`) `random` holds out the end of time (of each series, without a column of times), and `series`
    whole series."""
    inputs: dict[str, str | tuple[str, ...]] = {}
    """Graph input -> its column, or several columns stacked into one vector. Inputs not named here read
    the column of their own name. A glob pattern, such as "f*", stands for the columns that it matches, in the order of
    the file, and "!f2" leaves columns out; the saved configuration has the columns."""
    label: Annotated[str | tuple[str, ...], COMMON] = "label"
    """The column (or columns) the loss compares with; unused when the loss is a graph output. Short for
    `loss.label`."""
    classes: Literal["auto", "sorted"] | tuple[str, ...] = "auto"
    """The class names in the model's order, for a cross-entropy on labels that are names: ["cat", "dog"]. `auto` = the
    names in the data, sorted, where the labels are text; labels that are integers are class ids. `sorted` = integers
    are names, too, such as 3, 5 and 10 for classes 0, 1 and 2."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What happens at a row that cannot be read: `fail` stops with its file and line, `skip` counts it and goes on."""
    rows_per_shard: PositiveInt = 65536
    """Rows in one shard file. Sharding needs memory in proportion to it."""
    shard_on: Annotated[str, Field(pattern=r"^$|^(dask|ray)$|^(tcp|tls|ray)://.+")] = ""
    """Where the parts of a large source are written as shards; empty = on all cores of this machine. `dask` and `ray`
    map Prefect tasks over a cluster that is started on this machine, an address (tcp://HOST:8786 of Dask,
    ray://HOST:10001) over that cluster, whose workers must see the directories of the data and of ONWARD_HOME. The
    shards are the same."""
    pad_values: dict[str, float] = {}
    """Column of variable length -> the value that pads its shorter rows in a batch; without an entry 0,
    `model.ignore_index` for labels, and for what is computed from strings the value that the model itself pads with."""
    image_size: Length | tuple[Length, Length] = 32
    """Digits only: side in pixels the 8x8 images are resized to, with the grey image three times as channels; or
    [channels, side]."""
    sequence_length: Length = 128
    """Text only: bytes in one sample; the label of each byte is the byte that follows it."""

    @field_validator("files_from", mode="before")
    @classmethod
    def _may_be_one_directory(cls, given: Any) -> Any:
        if isinstance(given, str) and given:
            return (given,)
        return given or ()

    @field_validator("files_from")
    @classmethod
    def _are_local(cls, directories: tuple[str, ...]) -> tuple[str, ...]:
        if urls := [redacted(url) for each in directories if (url := url_of(each))]:
            raise ValueError(f"names directories of this machine, not {', '.join(urls)}; name the URL in data.source")
        return directories

    @model_validator(mode="before")
    @classmethod
    def _has_one_source_or_several(cls, settings: Any) -> Any:
        """Let `source` be the first of `sources`, by which formats and columns are found."""
        if not isinstance(settings, Mapping) or not settings.get("sources"):
            return settings
        # runs before the fields are validated: anything may be there
        first = settings["sources"][0] if isinstance(settings["sources"], list | tuple) else None
        if not isinstance(first, Mapping | SourceConfig):
            return settings  # which the field `sources` refuses
        first = first.source if isinstance(first, SourceConfig) else first.get("source")
        if settings.get("source") not in (None, "", first):
            raise ValueError("source and sources exclude each other; put the source among the sources")
        return {**settings, "source": first} if first else settings

    @model_validator(mode="after")
    def _divides_one_column_of_classes(self) -> DataConfig:
        """Refuse a stratified split of what has no rows with one class each, or is divided otherwise."""
        if self.split == "series" and not self.table.window:
            raise ValueError("split 'series' is for windows over time series: set table.window, or remove split")
        if self.split != "stratified":
            return self
        why = ""
        if not isinstance(self.label, str):
            why = f"label has {len(self.label)} columns"
        elif self.evaluation_source:
            why = "evaluation_source has the rows for evaluation"
        elif self.table.window:
            why = "table.window divides series by time, or by series"
        if why:
            raise ValueError(f"split 'stratified' needs one column of classes to divide, but {why}; remove split")
        return self

    @model_serializer(mode="wrap")
    def _without_a_derived_source(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `source` where it was derived, so that what was saved can be loaded with other `sources`."""
        saved: dict[str, Any] = serialize(self)
        if self.sources:
            saved.pop("source", None)
        return saved

    def plain_from(self, num_samples: int, num_rows: int) -> int | None:
        """Return the position in the stream from which on images are not put together; None = they are to the end."""
        mosaic = self.image.augment.mosaic if self.image else 0.0
        if not isinstance(mosaic, tuple):
            return None
        # counted from the end of the run, whether steps or epochs limit it; even, so that both of a pair are plain
        return max(0, num_samples - round(mosaic[1] * num_rows)) // 2 * 2

    @property
    def digits_shape(self) -> tuple[int, int]:
        """The channels and the side of the bundled digits."""
        return self.image_size if isinstance(self.image_size, tuple) else (3, self.image_size)

    @property
    def mixture(self) -> tuple[SourceConfig, ...]:
        """Return the sources with their weights, also if there is one."""
        return self.sources or (SourceConfig(source=self.source),)

    text: TextConfig | None = None
    """Columns of raw text and the model's tokenizer: `[data.text]`."""
    table: TableConfig = TableConfig()
    """What is computed of columns of a table: `[data.table]`."""


def engine_of(shard_on: str) -> str:
    """Return the engine that a value of data.shard_on names."""
    return "ray" if shard_on.startswith("ray") else "dask"
