"""Predict the rows of any data with an exported file, and write them into a table.

Predictor + batches of raw rows  ->  Predictions  ->  a CSV, Parquet or .npz file, or blocks of columns
"""

from __future__ import annotations

import contextlib
import csv
import json
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.errors import ConfigError, DataError, first_lines
from onward.trainer.export.measuring.raw_batches import RawBatch
from onward.trainer.export.served.predictor import BadRows, Predictor
from onward.trainer.export.served.raw_inputs import RECORD
from onward.trainer.onnx_graph.files.integer_division import guard_integer_divisions
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.onnx_graph.files.onnxruntime_session import guarded_content
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph
from onward.trainer.run.durable_files import durable_file
from onward.trainer.run.recorded.preprocessing_record import Preprocessing
from onward.trainer.run.records import read_record

T = TypeVar("T")
Table = dict[str, Any]
"""Column -> its cells, a list or an array."""
MOST_BAD = 20
"""A prediction that fails names so many bad rows."""
ROWS_AT_ONCE = {"image": 32, "audio": 32, "text": 32}
"""What a column holds -> rows of a batch; 1024 for numbers and categories."""
SUFFIXES = (".csv", ".parquet", ".npz", ".json")
"""Names of files that predictions are written into; .json has boxes in the form of COCO."""
REPORT_S = 2.0
"""Seconds between two reports of progress."""


def recipe_of(model: Path) -> tuple[dict[str, Any] | None, Path]:
    """Return the content of the preprocessing.json of an exported file, and its directory; None if there is none.

    It lies beside the file, or in the directory that `onward export -o` makes, also for the file's variants. Raises
    ConfigError if the one beside the file is that of another file.
    """
    stem = model.stem
    name = model.name.split(".", 1)[0]
    for folder in (model.with_name(f"{stem}.preprocessing"), model.with_name(f"{name}.preprocessing"), model.parent):
        if not (folder / RECORD).is_file():
            continue
        recipe = read_record(folder / RECORD, Preprocessing)
        # a variant has the preprocessing of the file that it was made of
        own = Path(recipe.model).stem in (stem, name)
        if folder == model.parent and not own and recipe.sha256 != model_digest(model):
            raise ConfigError(
                f"{folder / RECORD} is that of {recipe.model}, not of {model.name}: move {model.name} to another "
                f"directory, or its own preprocessing.json into {stem}.preprocessing/"
            )
        return recipe.model_dump(mode="json"), folder
    return None, model.parent


def content_of(model: Path, recipe: Mapping[str, Any] | None) -> bytes | None:
    """Return what onnxruntime opens in place of a file that predicts; None = the file itself.

    Of a file of which an inner part was trained it is this part, whose inputs the preprocessing computes. Raises as
    `guarded_content`.
    """
    if not recipe or not recipe["begins_at"]:
        return guarded_content(model)
    objects = recipe["objects"]
    outputs = objects["outputs"] if objects else [meaning["name"] for meaning in recipe["outputs"]]
    config = ModelConfig(path=model, start=recipe["begins_at"], output=tuple(outputs))
    return bytes(extract_subgraph(guard_integer_divisions(read_model(model)), config).SerializeToString())


def batch_rows(predictor: Predictor, asked: int) -> int:
    """Return how many rows are predicted at a time. asked: 0 = what suits the data."""
    usual = min(ROWS_AT_ONCE.get(kind, 1024) for kind in predictor.columns.values())
    return asked or predictor.fixed_rows or usual


@dataclass
class Predictions:
    """What a model gives for batches of raw rows. skips: leave bad rows out, in place of failing with all of them."""

    predictor: Predictor
    batches: Iterable[RawBatch]
    skips: bool = False
    report: Callable[[int, float], None] | None = None
    """Called every two seconds with the rows so far and the seconds they took."""
    bad: dict[str, str] = field(default_factory=dict)
    """Row -> why it is left out, as far as the rows were read."""
    num_rows: int = 0

    def tables(self, top: int = 0) -> Iterator[Table]:
        """Yield the columns that name rows and those that are predicted, a row for each box. Raises as `outputs`."""
        for batch, found in self._each(lambda cells: self.predictor.predict(cells, top=top)):
            if self.predictor.detector:
                places = found.pop("row")
                names = {name: [cells[at] for at in places] for name, cells in batch.ids.items()}
                yield {**names, **found}
                continue
            if clash := [name for name in batch.ids if name in found]:
                raise DataError(f"a predicted column is called {clash[0]}, as the one that names the rows")
            yield {**batch.ids, **found}

    def objects(self) -> Iterator[tuple[RawBatch, list[Array]]]:
        """Yield each batch without its bad rows, and the boxes of each image (`Predictor.objects`). Raises so, too."""
        return self._each(self.predictor.objects)

    def outputs(self) -> Iterator[tuple[RawBatch, dict[str, Array]]]:
        """Yield each batch without its bad rows, and output -> array [n, ...].

        Raises DataError with the bad rows, and if there is no other row, or a row has results for each position.
        """
        return self._each(self.predictor.outputs)

    def _each(self, compute: Callable[[dict[str, list[Any]]], T]) -> Iterator[tuple[RawBatch, T]]:
        started = reported = time.monotonic()
        for batch in self.batches:
            self._left_out(batch.bad)
            found = self._computed(batch, compute)
            if found is None:
                continue
            self.num_rows += len(batch.names)
            # a result that is not complete is not used, and need not be computed
            if self.skips or not self.bad:
                yield batch, found
            if self.report and time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                self.report(self.num_rows, reported - started)
        if self.bad and not self.skips:
            raise DataError(self._problems())
        if not self.num_rows:
            raise DataError(["no row can be predicted", *self._problems()] if self.bad else "the data holds no rows")

    def _computed(self, batch: RawBatch, compute: Callable[[dict[str, list[Any]]], T]) -> T | None:
        """Return the results of a batch, from which bad rows are removed; None if no row is left."""
        try:
            return compute(batch.cells) if batch.names else None
        except BadRows as error:
            batch.leave_out(error.rows)
            self._left_out(batch.bad)
            return self._computed(batch, compute)
        except ValueError as error:
            raise DataError(str(error)) from error

    def _left_out(self, bad: dict[str, str]) -> None:
        self.bad.update(bad)
        if len(self.bad) > MOST_BAD and not self.skips:
            raise DataError(self._problems())

    def _problems(self) -> list[str]:
        return first_lines((f"{row}: {why}" for row, why in self.bad.items()))


# -- files


def output_problems(path: Path, *, overwrite: bool) -> list[str]:
    """Return why predictions cannot be written there, before any is computed."""
    found = []
    if path.suffix.lower() not in SUFFIXES:
        found.append(
            f"{path} ends in {path.suffix!r}; predictions are written into {', '.join(SUFFIXES)}, and masks into a "
            "folder, whose name ends in /"
        )
    elif path.is_dir():
        found.append(f"{path} is a directory; name a file in it")
    elif path.exists() and not overwrite:
        found.append(f"{path} exists already; name another file, or add --overwrite")
    return found


def write_predictions(path: Path, found: Predictions, *, top: int = 0, overwrite: bool = False) -> None:
    """Write all rows into a file, whose suffix decides its format; it is complete or absent.

    .npz: the outputs of the file as they are, which are all in memory meanwhile; likewise .json. Raises ConfigError for
    a path that cannot be written, DataError as `Predictions`.
    """
    if problems := output_problems(path, overwrite=overwrite):
        raise ConfigError(problems)
    suffix = path.suffix.lower()
    if suffix == ".json" and not found.predictor.detector:
        raise ConfigError(
            f"{path} would have boxes, and the model predicts none; name a file {', '.join(SUFFIXES[:-1])}"
        )
    whole = {".npz": _write_npz, ".json": _write_coco}
    writers = {".csv": _write_csv, ".parquet": _write_parquet}
    with durable_file(path) as partial:
        if suffix in whole:
            whole[suffix](partial, found)
        else:
            writers[suffix](partial, found.tables(top))


def _write_csv(path: Path, tables: Iterator[Table]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        header: list[str] = []
        for table in tables:
            if not header:
                # the first batch decides the columns: a file has one header
                header = list(table)
                writer.writerow(header)
            columns = [table[name] for name in header]
            # numpy's own scalars print as short as they can be read back
            writer.writerows(zip(*columns, strict=True))


def _write_parquet(path: Path, tables: Iterator[Table]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as stack:
        writer: Any = None
        made: Any = None
        for table in tables:
            made = pa.table({name: pa.array(cells) for name, cells in table.items()})
            # images without any box say nothing about the types of columns
            if not made.num_rows:
                continue
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(path, made.schema))
            # a later batch may have another type, such as of a column that is empty so far
            writer.write_table(made.cast(writer.schema))
        if writer is None:
            pq.write_table(made, path)


def _write_coco(path: Path, found: Predictions) -> None:
    """Write what was found as COCO has annotations, each with its score; classes are numbered from 0 on."""
    images: list[dict[str, Any]] = []
    boxes: list[dict[str, Any]] = []
    names = list(found.predictor.meanings[0]["classes"])
    for batch, of_images in found.objects():
        for name, own in zip(batch.ids.get("file", batch.names), of_images, strict=True):
            images.append({"id": len(images) + 1, "file_name": name})
            for number, score, x1, y1, x2, y2 in own.tolist():
                # a model may have more classes than its data, which have no names
                names += map(str, range(len(names), int(number) + 1))
                sides = [x2 - x1, y2 - y1]
                box = {"id": len(boxes) + 1, "image_id": len(images), "category_id": int(number), "score": score}
                boxes.append({**box, "bbox": [x1, y1, *sides], "area": sides[0] * sides[1], "iscrowd": 0})
    categories = [{"id": at, "name": name} for at, name in enumerate(names)]
    content = {"images": images, "categories": categories, "annotations": boxes}
    path.write_text(json.dumps(content), encoding="utf-8")


def _write_npz(path: Path, found: Predictions) -> None:
    ids: dict[str, list[Any]] = {}
    arrays: dict[str, list[Array]] = {}
    for batch, outputs in found.outputs():
        for name, cells in batch.ids.items():
            ids.setdefault(name, []).extend(cells)
        for name, array in outputs.items():
            arrays.setdefault(name, []).append(array)
    joined = {name: np.concatenate(parts) for name, parts in arrays.items()}
    # texts have a fixed width, because numpy would pickle objects
    named = {name: np.array(cells) for name, cells in ids.items() if name not in joined}
    # not numpy.savez, whose own arguments are names that a column may have
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in {**named, **joined}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
