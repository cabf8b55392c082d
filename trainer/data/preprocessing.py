"""Compute the pre-processing of a model with onnxruntime while the data is read, and describe what it computes.

What the pre-processing is, onnx_graph/surgery/preprocessing_nodes.py says. Each row is computed once, and its result is
stored in the shards as a column with the name of the tensor, so that ranks read numbers only:

    CSV: text "a good film"    -- StringSplit, LabelEncoder -->    shard: ids [1, 7, 4]

A result whose rows all have one shape is computed for many rows at once. One that is padded to the longest row of a
call, as StringSplit does, is computed row by row and stored in each row's own length; batches are padded with the value
that the pre-processing itself pads with, so that a batch is what the model would compute from the same rows:

    rows together    [1 7 4]    each row alone    [1 7 4]    stored    [1 7 4]    value of the padding    0
                     [3 0 0]                      [3]                  [3]

Anything else, such as results of two dimensions a row that differ in shape, is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.input_columns import Feed, InputColumns
from onward.trainer.data.schema.column_computers import rows_between
from onward.trainer.data.schema.columns import Array, Column, Values, rows_at
from onward.trainer.data.schema.signature import Signature, TensorInfo, read_preprocessing
from onward.trainer.errors import DataError, UnsupportedModel
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import describe

FIRST_ROWS = 32
"""Rows that are computed both alone and together, to find out what results look like."""

FileInputs = dict[str, Any]
"""Input of the file -> array [n, ...], or (a sequence) a list of n arrays."""


def file_inputs(inputs: Mapping[str, Feed], values: Mapping[str, Values]) -> FileInputs:
    """Return what onnxruntime is fed for some rows: `values` are the rows of every column."""
    return {name: _input(feed, values) for name, feed in inputs.items()}


def _input(feed: Feed, values: Mapping[str, Values]) -> Any:
    dtype = object if feed.dtype == "string" else feed.tensor_dtype if feed.dtype == "bfloat16" else feed.dtype
    rank = None if feed.sample_shape is None else len(feed.sample_shape)
    if feed.sequence:  # a tensor for each row, of one element if the row is a single value
        least = 1 if rank is None else rank
        return [np.array(row, dtype, ndmin=least) for row in values[feed.columns[0]]]
    arrays = [np.asarray(values[name]) for name in feed.columns]
    array = (np.stack(arrays, axis=-1) if feed.stacked else arrays[0]).astype(dtype)
    return array.reshape(-1, 1) if array.ndim == 1 and rank == 1 else array


def open_preprocessor(model: ModelConfig, columns: InputColumns, signature: Signature) -> Preprocessor | None:
    """Open the pre-processing of the configured model; None if it has none. Raises UnsupportedModel as Preprocessor."""
    nodes = read_preprocessing(model) if signature.computed else None
    if nodes is None:
        return None
    results = [info for info in signature.inputs if info.name in signature.computed]
    trained = {name for feed in columns.feeds() for name in feed.columns}
    own = columns.of_file()
    file_only = frozenset(name for feed in own.values() for name in feed.columns) - trained
    return Preprocessor(nodes, results, own, file_only)


class Preprocessor:
    """Computes the tensors that the trained part of a model begins with.

    `model`: the pre-processing as a model of its own, with all of its tensors. `results`: the tensors. `inputs`: input
    of the file -> its columns. `file_only`: the columns that the trained part does not read. Raises UnsupportedModel
    when onnxruntime cannot run it.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        results: Sequence[TensorInfo],
        inputs: Mapping[str, Feed],
        file_only: frozenset[str] = frozenset(),
    ) -> None:
        # imported here: ranks never need it
        from onward.trainer.onnx_graph.files.onnxruntime_session import open_session

        content = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
        self.digest = json.dumps([content, sorted(file_only)])
        self._feeds = {value.name: inputs[value.name] for value in model.graph.input}
        self._results = list(results)
        self.summary = describe(model.graph.node, [info.name for info in results])
        """Where the trained part begins and what is in front of it, for people."""
        self.file_only = file_only
        self.consumed = frozenset[str]()
        try:
            self._session = open_session(model)
        except Exception as error:  # onnxruntime's errors have no common base class
            names = ", ".join(info.name for info in self._results)
            remedy = f"compute {names} yourself, as columns of the data, and name them in model.start"
            if "locale" in str(error):  # that of StringNormalizer, by default en_US.UTF-8
                remedy = f"install the locale (locale-gen en_US.UTF-8), or {remedy}"
            raise UnsupportedModel(
                f"onnxruntime cannot run the pre-processing in front of {names}: {error}; {remedy}"
            ) from error
        self.columns: tuple[Column, ...] = ()
        """The columns of the results, as soon as `describe` has found them."""
        self.pad_values: dict[str, float] = {}
        """Result of varying length -> what the pre-processing pads it with, as soon as two rows have shown it."""

    # -- what the results look like

    def describe(self, values: Mapping[str, Values]) -> None:
        """Find the columns of the results from the first rows. Raises DataError for results that cannot be stored."""
        alone = []
        good = []
        problem = ""
        for at in range(min(FIRST_ROWS, len(next(iter(values.values()))))):
            try:
                alone.append(self._compute(rows_between(values, at, at + 1)))
                good.append(at)
            except DataError as error:
                problem = problem or str(error)
        if not good:
            raise DataError(f"{problem} (and for all of the first rows)")
        together = self._compute({name: rows_at(rows, np.array(good)) for name, rows in values.items()})
        self.columns = tuple(
            self._column(info, together[place], [row[place] for row in alone])
            for place, info in enumerate(self._results)
        )

    def _column(self, info: TensorInfo, together: Array, alone: list[Array]) -> Column:
        # both calls must give a row for each row: a result for the whole batch could not be stored by row
        for rows, result in ((len(alone), together), *((1, result) for result in alone)):
            if not result.ndim or len(result) != rows:
                raise DataError(
                    f"the pre-processing's result {info.name!r} is {list(result.shape)} for {rows} rows, but must have "
                    "one row for each; name a later tensor in model.start, with columns of its values"
                )
        shapes = sorted({result.shape[1:] for result in alone})
        # numpy has no bfloat16
        dtype = {"bfloat16": "float32"}.get(info.dtype, info.dtype)
        # lists of different lengths, or of one length that the graph leaves open: later rows may be longer
        varies = len(shapes) > 1 or info.shape is None or None in info.shape[1:]
        if len(shapes[0]) == 1 and varies:
            self._learn_padding(info.name, together, alone)
            return Column(name=info.name, dtype=dtype, shape=shapes[-1], variable=True)
        if len(shapes) > 1 or together.shape[1:] != shapes[0]:
            raise DataError(
                f"the pre-processing's result {info.name!r} is ragged: {list(shapes[0])} to {list(shapes[-1])} for "
                f"single rows, {list(together.shape)} for {len(alone)} together; pad it inside the model to one size"
            )
        _check_equal(info.name, together, np.concatenate(alone))
        return Column(name=info.name, dtype=dtype, shape=shapes[0])

    def _learn_padding(self, name: str, together: Array, alone: list[Array]) -> None:
        """Check that rows together are the rows alone with one value behind them, and remember the value."""
        found = {self.pad_values[name]} if name in self.pad_values else set()
        for whole, row in zip(together, alone, strict=True):
            # in front of the padding, the row must be what it is alone
            _check_equal(name, whole[: row.shape[1]], row[0])
            found |= set(whole[row.shape[1] :].tolist())
        if len(found) > 1:
            raise DataError(
                f"the pre-processing's result {name!r} is ragged: rows of different length are not filled with one "
                f"value, but with {', '.join(map(str, sorted(found)[:3]))}; pad it inside the model to one size"
            )
        if found:
            self.pad_values[name] = found.pop()

    # -- all rows

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return the results of `count` rows, and row -> why it has none. Raises DataError for results that cannot be
        stored."""
        # one call for all rows is fast, but fails as a whole: then each row is computed by itself
        results, failed = self._together(rows, count) or self._row_by_row(rows, count)
        for column, result in zip(self.columns, results, strict=True):
            for at, row in enumerate(result):
                if row.dtype.kind == "f" and not np.isfinite(row).all():
                    wrong = row[~np.isfinite(row)][0]
                    failed.setdefault(at, f"the pre-processing's result {column.name!r} holds {wrong}")
        return {column.name: result for column, result in zip(self.columns, results, strict=True)}, failed

    def _together(self, rows: Mapping[str, Values], count: int) -> tuple[list[Values], dict[int, str]] | None:
        """Return the results of rows that are computed in one call; None if they must be computed one by one."""
        if any(column.variable for column in self.columns):
            return None
        try:
            found = self._compute(rows)
        except DataError:
            return None  # because of at least one row, which the calls for each row find
        for column, result in zip(self.columns, found, strict=True):
            if result.shape != (count, *column.shape):
                raise DataError(
                    f"the pre-processing's result {column.name!r} is ragged: {list(result.shape)} for {count} rows, "
                    f"but {list(column.shape)} for each row before; pad it inside the model to one size"
                )
        return [result.astype(column.dtype) for result, column in zip(found, self.columns, strict=True)], {}

    def _row_by_row(self, rows: Mapping[str, Values], count: int) -> tuple[list[Values], dict[int, str]]:
        failed: dict[int, str] = {}
        results: list[list[Array]] = [[] for _ in self.columns]
        for at in range(count):
            try:
                computed = self._compute(rows_between(rows, at, at + 1))
            except DataError as error:
                failed[at] = str(error)
                # a bad row keeps its place until it is left out
                computed = [np.zeros((1, *column.shape), column.dtype) for column in self.columns]
            for column, result, kept in zip(self.columns, computed, results, strict=True):
                # a row that varies is a list of any length; others have the shape of the first rows
                fits = result.ndim == len(column.shape) + 1 if column.variable else result.shape[1:] == column.shape
                if not fits or not result.size:
                    found = f"is {list(result.shape)}" if result.size else "is empty"
                    failed.setdefault(at, f"the pre-processing's result {column.name!r} {found}")
                    result = np.zeros((1, *column.shape), column.dtype)
                kept.append(result[0].astype(column.dtype))
        self._learn_from(rows, results, failed)
        stored = [r if c.variable else np.stack(r) for c, r in zip(self.columns, results, strict=True)]
        return stored, failed

    def _learn_from(
        self, rows: Mapping[str, Values], results: Sequence[Sequence[Array]], failed: Mapping[int, str]
    ) -> None:
        """Compute the shortest and the longest row together, in case all rows of `describe` had one length."""
        for place, (column, kept) in enumerate(zip(self.columns, results, strict=True)):
            if not column.variable or column.name in self.pad_values:
                continue
            lengths = sorted((len(row), at) for at, row in enumerate(kept) if at not in failed)
            if lengths and lengths[0][0] < lengths[-1][0]:
                # the shorter of two rows is padded, which shows the value
                ends = np.array([lengths[0][1], lengths[-1][1]])
                together = self._compute({name: rows_at(cells, ends) for name, cells in rows.items()})[place]
                self._learn_padding(column.name, together, [kept[at][None] for at in ends.tolist()])

    def _compute(self, rows: Mapping[str, Values]) -> list[Array]:
        """Return the results for some rows. Raises DataError when onnxruntime refuses them."""
        try:
            found = self._session.run([info.name for info in self._results], file_inputs(self._feeds, rows))
        except Exception as error:  # onnxruntime's errors have no common base class
            raise DataError(f"the pre-processing fails: {error}") from error
        return [np.asarray(result) for result in found]


def _check_equal(name: str, together: Array, alone: Array) -> None:
    # a batch of another size may be summed in another order; integers are equal or not
    relative, absolute = (1e-4, 1e-5) if alone.dtype.kind == "f" else (0.0, 0.0)
    if together.shape != alone.shape or not np.allclose(together, alone, relative, absolute):
        raise DataError(
            f"the pre-processing's result {name!r} depends on the other rows that are computed with a row, so it "
            "cannot be stored row by row; name a tensor behind it in model.start, with columns of its values"
        )
