"""Write the model directory that MLflow registers: the ONNX file, what lies beside it, and what predicts from raw rows.

    model.onnx, its external data         byte for byte the exported file
    preprocessing.json, tokenizer.json    how inputs are computed of raw rows
    code/onward_served_DIGEST/            the Python files that do it: no Onward is needed to load the model
    MLmodel                               flavors: onnx (the file), python_function (raw rows -> class, probability)

Nothing is pickled: MLflow imports the Python files by their name.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from mlflow.types import Schema

REQUIREMENTS = ("mlflow", "onnx", "onnxruntime", "numpy")
"""Packages that loading a registered model needs. MLflow would load and run the model to infer them."""
ENTRY = "mlflow_model"
"""The module of the copied files that MLflow calls."""


class Point(NamedTuple):
    """One value of one metric. Equal points are stored once, however often they are sent."""

    key: str
    value: float
    at_ms: int
    step: int


class Port(NamedTuple):
    """An input or output of a model: numpy's name of its dtype, -1 for each dynamic dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class RawColumn(NamedTuple):
    """A column of raw rows, as the registered model takes or gives it."""

    name: str
    kind: Literal["number", "text", "content"]
    """`content`: the bytes of an image or audio file, in JSON in base64."""


@dataclass(frozen=True)
class RawPrediction:
    """How a registered model predicts from raw rows."""

    code: Path
    """The directory of the Python files that do it."""
    columns: tuple[RawColumn, ...]
    requirements: tuple[str, ...] = ()
    """Packages that the files need beside REQUIREMENTS."""
    example: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Column -> cells of a few rows; {} = none."""
    predicted: tuple[RawColumn, ...] = ()
    """The columns that it gives, as far as they are known."""


@dataclass(frozen=True)
class ModelFile:
    """An ONNX file to be registered."""

    path: Path
    sha256: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    beside: tuple[Path, ...] = ()
    """Files with its external data, in its directory or below."""
    documents: tuple[Path, ...] = ()
    """Files about it, which are registered with it under their names."""
    step: int = 0
    example: Mapping[str, Any] = field(default_factory=dict)
    """Input name -> array: one small batch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    points: Sequence[Point] = ()
    """Points of the run that describe the file, too."""
    tags: Mapping[str, str] = field(default_factory=dict)
    raw: RawPrediction | None = None
    """How it predicts from raw rows; None = from tensors only."""


def write_package(model: ModelFile, folder: Path, *, model_id: str, run_id: str) -> None:
    """Write an MLflow model directory with an ONNX file and its external data, byte for byte."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as temporary:
        warnings.simplefilter("ignore")  # deprecations inside MLflow
        import mlflow.onnx
        from mlflow.models import Model, ModelSignature

        code = None
        requirements = [*REQUIREMENTS]
        if model.raw:
            code = _copied_code(model.raw.code, Path(temporary))
            requirements += model.raw.requirements
        schemas = _raw_schemas(model.raw) if model.raw else _tensor_schemas(model)
        mlflow.onnx.save_model(
            model.path.read_bytes(),
            folder,
            code_paths=[str(code)] if code else None,
            mlflow_model=Model(run_id=run_id, model_uuid=model_id, model_id=model_id),
            signature=ModelSignature(*schemas),
            input_example=_example(model),
            pip_requirements=_pinned(requirements),
            onnx_execution_providers=["CPUExecutionProvider"],
            save_as_external_data=False,
        )
        if code:
            # the flavor python_function is loaded by the package in the code, and not by MLflow's own
            saved = Model.load(str(folder))
            saved.flavors["python_function"]["loader_module"] = f"{code.name}.{ENTRY}"
            saved.flavors["python_function"].pop("data", None)  # it is given the whole directory
            saved.save(str(folder / "MLmodel"))
    # `save_model` may serialize the model again; the registered file must be the verified one, byte for byte.
    shutil.copyfile(model.path, folder / "model.onnx")
    for file in model.beside:
        place = folder / file.relative_to(model.path.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    for file in model.documents:
        shutil.copyfile(file, folder / file.name)


def _copied_code(code: Path, folder: Path) -> Path:
    """Copy the Python files into a package that is named after their content; return its directory.

    Models of several releases of Onward may be loaded in one process, where a name is imported once.
    """
    files = sorted(code.glob("*.py"))
    # names and contents in a fixed order, so that equal code gets an equal name
    digest = hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()
    copy = folder / f"onward_served_{digest[:12]}"
    copy.mkdir()
    for file in files:
        shutil.copyfile(file, copy / file.name)
    return copy


def _pinned(packages: Sequence[str]) -> list[str]:
    found = []
    for package in packages:
        try:
            found.append(f"{package}=={version(package)}")
        except PackageNotFoundError:  # an optional one, which this machine does without
            found.append(package)
    return found


def _example(model: ModelFile) -> Any:
    if model.raw is None:
        return dict(model.example) or None
    if not model.raw.example:
        return None
    import pandas as pd

    return pd.DataFrame(dict(model.raw.example))


def _raw_schemas(raw: RawPrediction) -> tuple[Schema, Schema | None]:
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import AnyType

    # MLflow converts no column of integers to one of decimals, and none with gaps to one of integers, so that a column
    # of numbers that are whole by chance would be refused: numbers have no declared type, and the code checks them
    any_number = AnyType()  # type: ignore[no-untyped-call]
    kinds: dict[str, Any] = {"number": any_number, "text": DataType.string, "content": DataType.binary}
    given = Schema([ColSpec(kinds[column.kind], column.name) for column in raw.columns])
    if not raw.predicted:
        return given, None
    made = {"number": DataType.double, "text": DataType.string}
    return given, Schema([ColSpec(made[column.kind], column.name) for column in raw.predicted])


def _tensor_schemas(model: ModelFile) -> tuple[Schema | None, Schema | None]:
    from mlflow.types import Schema, TensorSpec
    from numpy import dtype

    def schema(ports: tuple[Port, ...]) -> Schema | None:
        # MLflow describes strings as objects, and has no word for sequences of maps
        known = [port for port in ports if port.dtype != "undefined"]
        kinds = [dtype("object" if port.dtype == "string" else port.dtype) for port in known]
        if not known:
            return None  # MLflow has no empty schema
        return Schema([TensorSpec(kind, port.shape, port.name) for port, kind in zip(known, kinds, strict=True)])

    return schema(model.inputs), schema(model.outputs)
