"""Run an ONNX file on raw rows, and give classes, probabilities and numbers back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from .detections import detections_in, in_original, object_columns
from .media import Array, image_size
from .raw_inputs import LOG, RawInputs, Rows, few, raw_columns, unusable, values
from .result_columns import Columns, Meaning, result_columns

DTYPES = {"float": "float32", "double": "float64", "float16": "float16", "string": "string", "bool": "bool"}
"""Type of a tensor in onnxruntime -> numpy's name, as far as they differ."""


class UnusableModel(ValueError):
    """A file that cannot predict from raw rows, with the reason."""


class BadRows(ValueError):
    """Some rows cannot be predicted. rows: the place of each among the rows that were given, and why."""

    def __init__(self, rows: Mapping[int, str]) -> None:
        self.rows = dict(rows)
        super().__init__("; ".join(f"row {at}: {why}" for at, why in self.rows.items()))


class Predictor:
    """One ONNX file with its preprocessing.

    recipe: the content of its preprocessing.json, in the directory `folder`; None = each input takes the column of its
    name as it is, unless `inputs` names the columns that are stacked to it. content: a model to open in place of what
    the file holds, with the file's external data. Raises UnusableModel.
    """

    def __init__(
        self,
        model: Path,
        recipe: Mapping[str, Any] | None,
        folder: Path,
        *,
        inputs: Mapping[str, Sequence[str]] | None = None,
        threads: int = 0,
        content: bytes | None = None,
    ) -> None:
        # the outputs that the recipe describes, also such as are inside of the graph
        wanted = [meaning["name"] for meaning in recipe["outputs"]] if recipe else []
        self.detector: Mapping[str, Any] | None = (recipe or {}).get("objects")
        """Of a detector: how its boxes are read, `objects` of preprocessing.json."""
        wanted = list(dict.fromkeys([*wanted, *(self.detector["outputs"] if self.detector else ())]))
        self._stored = {name: name.removesuffix(LOG) for name in wanted if name.endswith(LOG)}
        """Output of training that is the logarithm of probabilities in the file -> these."""
        self._session = _opened(model, content, [self._stored.get(name, name) for name in wanted], threads)
        # the inputs that the file itself declares: the recipe may describe more of them
        taken = {value.name: value for value in self._session.get_inputs()}
        # a file with preprocessing takes raw columns itself, so that its recipe describes nothing more
        if recipe is not None and not _begins_raw(recipe, taken):
            recipe = _checked(recipe, taken)
            described: Mapping[str, Any] = recipe
        else:
            described = {"inputs": _plain_inputs(taken, inputs or {}), "text": None}
        self.meanings: list[Meaning] = list(recipe["outputs"]) if recipe else self._plain_outputs()
        self._types = {name: _dtype(value.type) for name, value in taken.items()}
        self._raw = RawInputs(described, folder)
        self._described = described["inputs"]
        self._window: int = described.get("window_length") or 0
        self.columns = raw_columns(described)
        """Raw column -> what it holds: image, audio, text, category, integers (a category by number), number."""
        images = [how for how in self._described.values() if how["kind"] == "image"]
        self._images = images
        self.channels_last = bool(images) and all(how["layout"] == "nhwc" for how in images)
        """Whether the channels of images, and so the classes of masks, are on the last axis."""
        of_rows = [value for name, value in taken.items() if self._described[name]["kind"] != "value"]
        batch_sizes = [value.shape[0] for value in of_rows if value.shape]
        # the first dimension is the batch; a name or None in it is any number of rows
        fixed = [size for size in batch_sizes if isinstance(size, int)]
        self.fixed_rows = fixed[0] if fixed else 0
        """Rows that the file takes at a time; 0 = any number."""

    def _plain_outputs(self) -> list[Meaning]:
        tensors = [value.name for value in self._session.get_outputs() if value.type.startswith("tensor(")]
        return [{"name": name, "loss": "", "label": (), "classes": ()} for name in tensors]

    def predict(self, rows: Rows, *, top: int = 0) -> Columns:
        """Return column -> values [n] of n rows, as result_columns.py describes them. Raises as `outputs`.

        Of a detector: a row for each box, and the number of its image as `row`.
        """
        if not self.detector:
            return result_columns(self.outputs(rows), self.meanings, top)
        return object_columns(self.objects(rows), self.meanings[0]["classes"], top)

    def objects(self, rows: Rows) -> list[Array]:
        """Return of each image class, score, x1, y1, x2, y2 by score, [n, 6], in pixels of the image itself.

        Images are run one by one: the outputs of a file that chooses among its boxes have no rows. Raises as `outputs`.
        """
        assert self.detector
        how = self._images[0]
        count = self._count(rows)
        inputs = self._inputs(rows, count) if count else {}
        size = self.fixed_rows or 1
        found = []
        for at in range(count):
            given = {name: np.repeat(array[at : at + 1], size, 0) for name, array in inputs.items()}
            # of a fixed batch the others are copies
            results = [each[: len(each) // size] for each in self._called(list(self.detector["outputs"]), given, size)]
            boxes = self.found(results, (how["width"], how["height"]))
            found.append(in_original(boxes, image_size(rows[how["column"]][at]), how))
        return found

    def found(self, results: Sequence[Array], size: tuple[int, int]) -> Array:
        """Return what the outputs for one image hold, with corners in shares of the input of `size` (width, height)."""
        assert self.detector
        if self.detector["form"] is None:
            raise ValueError("the file returns raw outputs, which Onward decodes: `onward predict` gives their boxes")
        return detections_in(self.detector["form"]).read(results, size)

    def _count(self, rows: Rows) -> int:
        if missing := [name for name in self.columns if name not in rows]:
            raise ValueError(f"column {few(missing)} is missing; there is {few(list(rows)) or 'none'}")
        return len(rows[next(iter(self.columns))])

    def outputs(self, rows: Rows) -> dict[str, Array]:
        """Return output -> array [n, ...] of n rows.

        Raises BadRows, and ValueError with every column that is missing or what onnxruntime refuses.
        """
        count = self._count(rows)
        windows = list(self.columns) if self._window else []
        # said before the computation, whose own error would not name the column
        if short := [name for name in windows if _is_no_window(rows[name], self._window)]:
            raise ValueError(
                f"the model takes windows of {self._window} successive values, the oldest first, so that each cell of "
                f"{few(short)} must be a list of {self._window} numbers"
            )
        names = [meaning["name"] for meaning in self.meanings]
        # training reads logarithms, of which the file has the probabilities
        in_file = [self._stored.get(name, name) for name in names]
        if not count:
            return {name: np.empty((0, *self.row_shape(name)), np.float32) for name in names}
        inputs = self._inputs(rows, count)
        # a file of fixed batch is run in parts of that many rows
        size = self.fixed_rows or count
        parts = [self._run(inputs, in_file, first, size, count) for first in range(0, count, size)]
        # each output from all parts, in the order of the rows
        found = {name: np.concatenate([part[at] for part in parts]) for at, name in enumerate(names)}
        # zero has no logarithm
        least = np.finfo(np.float32).tiny
        return found | {name: np.log(np.maximum(found[name], least)) for name in self._stored}

    def row_shape(self, name: str) -> list[int]:
        """Return what an output declares of one row, with 1 for each dynamic dimension."""
        (value,) = [each for each in self._session.get_outputs() if each.name == self._stored.get(name, name)]
        row_dims = value.shape[1:] if value.shape else []
        return [dim if isinstance(dim, int) else 1 for dim in row_dims]

    def _inputs(self, rows: Rows, count: int) -> dict[str, Array]:
        try:
            found = self._raw.compute(rows)
        except ValueError as error:
            # at least one row is bad: find out which, row by row
            bad = {}
            for at in range(count):
                try:
                    # a batch fails as a whole, so that each row is tried by itself
                    self._raw.compute({name: rows[name][at : at + 1] for name in self.columns})
                except ValueError as alone:
                    bad[at] = str(alone)
            if bad:
                raise BadRows(bad) from error
            raise
        return {
            name: array if array.dtype == object else array.astype(self._types[name]) for name, array in found.items()
        }

    def _run(self, inputs: Mapping[str, Array], names: list[str], first: int, size: int, count: int) -> list[Array]:
        """Return the outputs of some rows; a batch of a fixed size is filled up with copies of its last row."""
        # beyond the last row the last row again
        places = np.minimum(np.arange(first, first + size), count - 1)
        given = inputs if size == count else {name: array[places] for name, array in inputs.items()}
        results = self._called(names, given, size)
        # the copies behind the last row are dropped
        kept = min(size, count - first)
        for name, array in zip(names, results, strict=True):
            # an output without rows, such as a mean over the batch, has none to give back
            if not np.ndim(array) or len(array) != size:
                raise ValueError(f"output {name!r} is {list(np.shape(array))} for {size} rows: it has no row for each")
        return [np.asarray(array)[:kept] for array in results]

    def _called(self, names: list[str], given: Mapping[str, Array], size: int) -> list[Array]:
        try:
            found: list[Array] = self._session.run(names, {**given, **values(self._described, size)})
        except Exception as error:  # onnxruntime's errors have no common base class
            raise ValueError(f"onnxruntime cannot run the file on these rows: {error}") from error
        return found


def _is_no_window(cells: Sequence[Any], length: int) -> bool:
    return any(np.ndim(cell) != 1 or len(cell) != length for cell in cells)


def _opened(model: Path, content: bytes | None, outputs: Sequence[str], threads: int) -> onnxruntime.InferenceSession:
    """Open the file, which gives these tensors as outputs, also such as are inside of it. Raises UnusableModel."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is raised is not printed as well
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.parent))
    # onnxruntime 1.31 overwrites constants that it shares with a BatchNormalization in training form
    how = {"providers": ["CPUExecutionProvider"], "disabled_optimizers": ["ConstantSharing"]}
    try:
        session = onnxruntime.InferenceSession(content or str(model), options, **how)
        known = {value.name for value in session.get_outputs()}
        if inner := [name for name in outputs if name not in known]:
            # the loss of training reads scores in front of the file's own output, such as its probabilities
            import onnx

            read = onnx.load_model_from_string
            proto = read(content) if content else onnx.load(str(model), load_external_data=False)
            proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in inner)
            session = onnxruntime.InferenceSession(proto.SerializeToString(), options, **how)
    except Exception as error:  # onnxruntime's errors have no common base class
        raise UnusableModel(f"onnxruntime cannot open {model}: {error}") from error
    return session


def _checked(recipe: Mapping[str, Any], taken: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the recipe with the inputs that the file takes. Raises UnusableModel if some are not described."""
    if why := unusable(recipe, list(taken)):
        raise UnusableModel(why)
    return {**recipe, "inputs": {name: how for name, how in recipe["inputs"].items() if name in taken}}


def _begins_raw(recipe: Mapping[str, Any], taken: Mapping[str, Any]) -> bool:
    """Return whether the file computes the preprocessing itself: it takes the raw columns of numbers and categories."""
    columns = {column["name"] for how in recipe["inputs"].values() for column in how.get("columns", ())}
    # it takes no tensor that the recipe computes, and nothing but raw columns
    return not set(taken) & set(recipe["inputs"]) and set(taken) <= columns


def _plain_inputs(taken: Mapping[str, Any], inputs: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return how the inputs of a file without preprocessing.json are read of columns. Raises UnusableModel."""
    if unknown := [name for name in inputs if name not in taken]:
        raise UnusableModel(f"the file has no input {few(unknown)}; it takes {few(list(taken))}")
    if wrong := [name for name, value in taken.items() if not value.type.startswith("tensor(")]:
        raise UnusableModel(f"input {few(wrong)} is no tensor")
    found = {}
    for name, value in taken.items():
        columns = list(inputs.get(name, [name]))
        row_dims = value.shape[1:] if value.shape else []
        # of one row: the first dimension is the batch
        shape = [dim if isinstance(dim, int) else None for dim in row_dims]
        if name in inputs and shape[-1:] not in ([None], [len(columns)]) and shape:
            raise UnusableModel(f"input {name} takes {shape[-1]} numbers a row, but {len(columns)} columns are named")
        found[name] = {
            "kind": "columns",
            "columns": [{"name": column} for column in columns],
            "stacked": name in inputs and bool(shape),
            "shape": shape,
            "dtype": _dtype(value.type),
            "as_it_is": True,
        }
    return found


def _dtype(of_tensor: str) -> str:
    name = of_tensor.removeprefix("tensor(").removesuffix(")")
    return DTYPES.get(name, name)
