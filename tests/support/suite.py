"""ONNX's own test suite: its cases, and what our import makes of each."""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.files.tensor_protos import tensor_from_array
from onward.trainer.onnx_import.driver import to_module
from tests.support.shared_files import made_once

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"

CPU = torch.device("cpu")
HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, *HALVES)


@functools.cache
def cases() -> list[Any]:
    """The cases of single operators, and of their definitions ("expanded"); the suite computes for seconds."""

    def write(path: Path) -> None:
        from onnx.backend.test.loader import load_model_tests

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy, while the suite computes what it expects
            path.write_bytes(pickle.dumps(load_model_tests(kind="node")))

    found: list[Any] = pickle.loads(made_once("cases.pickle", write).read_bytes())
    for case in found:
        if case.name.startswith("test_cast"):
            _within_range(case)
    return found


NARROW = {TensorProto.INT4: (-8, 7), TensorProto.UINT4: (0, 15), TensorProto.INT2: (-2, 1), TensorProto.UINT2: (0, 3)}
"""An integer type of less than a byte -> its range."""


def _within_range(case: Any) -> None:
    """Cast 0 in place of each float that a narrow integer does not hold.

    ONNX leaves the result undefined, and what the suite expects there differs with the version of ml_dtypes.
    """
    (given, *_), [result] = case.data_sets[0]
    if result.data_type not in NARROW or given.data_type not in FLOATS:
        return
    least, greatest = NARROW[result.data_type]
    values, expected = numpy_helper.to_array(given).copy(), numpy_helper.to_array(result).copy()
    is_outside = (values < least) | (values > greatest)
    values[is_outside] = 0
    expected[is_outside] = 0
    given.CopyFrom(numpy_helper.from_array(values, given.name))
    result.CopyFrom(numpy_helper.from_array(expected, result.name))


def is_expanded(case: Any) -> bool:
    return "_expanded" in case.name


def element_types(model: onnx.ModelProto) -> set[int]:
    """Of the graph's inputs and outputs, those in sequences and optionals too."""

    def of(kind: onnx.TypeProto) -> int:
        if kind.HasField("sequence_type"):
            return of(kind.sequence_type.elem_type)
        return of(kind.optional_type.elem_type) if kind.HasField("optional_type") else kind.tensor_type.elem_type

    return {of(value.type) for value in (*model.graph.input, *model.graph.output)}


def as_torch(value: Any) -> Any:
    """A value of the suite as the module takes and gives it: halves as fp32, sequences as lists."""
    if value is None or isinstance(value, list):
        return value and [as_torch(item) for item in value]
    array = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
    return tensor_from_array(array)


def with_stored_operands(case: Any) -> onnx.ModelProto | None:
    """The case with every input but the first stored in the file; None if one is not a tensor, or there is one."""
    given = case.data_sets[0][0]
    if len(given) < 2 or any(value is None or isinstance(value, list) for value in given):
        return None
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for declared, value in list(zip(model.graph.input, given, strict=True))[1:]:
        tensor = TensorProto()
        tensor.CopyFrom(value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value)))
        tensor.name = declared.name
        model.graph.initializer.append(tensor)
    return model


def verdict(
    model: onnx.ModelProto,
    inputs: Sequence[Any],
    wanted: Sequence[Any],
    *,
    device: torch.device = CPU,
    **tolerance: float,
) -> str:
    """ "right", "refused: why", or what is wrong."""
    try:
        module = to_module(model).eval().to(device)
    except UnsupportedModel as refusal:
        return f"refused: {refusal}"
    try:
        got = module(*(moved(as_torch(value), device) for value in inputs[: len(module.input_names)]))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return f"raised {type(error).__name__}: {error}"
    got = got if isinstance(got, tuple) else (got,)
    if len(got) != len(wanted):
        return f"{len(got)} outputs, not {len(wanted)}"
    if misplaced := sorted({str(each.device) for each in tensors_in(got) if each.device.type != device.type}):
        return f"a result is on {', '.join(misplaced)}, not on {device}"
    got = moved(got, CPU)
    half = any(kind in HALVES for kind in element_types(model))
    least = 1e-2 if half else 1e-4, 1e-2 if half else 1e-6
    rtol, atol = (max(tolerance.get(name, 0), low) for name, low in zip(("rtol", "atol"), least, strict=True))
    found = (difference(a, as_torch(b), rtol=rtol, atol=atol) for a, b in zip(got, wanted, strict=True))
    return next(filter(None, found), "right")


def moved(value: Any, device: torch.device) -> Any:
    """A value of the suite on another device."""
    if isinstance(value, list | tuple):
        return type(value)(moved(each, device) for each in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, those in sequences too."""
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_in(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def difference(got: Any, want: Any, **tolerance: float) -> str:
    """How two values differ; "" if they do not."""
    if want is None or got is None:
        return "" if got is want else f"{got} instead of {want}"
    if isinstance(want, list):
        if not isinstance(got, list | tuple) or len(got) != len(want):
            return f"no sequence of {len(want)}"
        return next(filter(None, (difference(a, b, **tolerance) for a, b in zip(got, want, strict=True))), "")
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
    got = got.detach()
    if got.dtype.is_floating_point:
        got, want = got.double(), want.double()
    return "" if np.allclose(got.numpy(), want.numpy(), equal_nan=True, **tolerance) else "wrong values"


# -- models on disk


def true_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs that are not stored in the file."""
    stored = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in stored]


def numbered(directory: Path, kind: str) -> list[Path]:
    """input_0.pb, input_1.pb, ..."""
    return sorted(directory.glob(f"{kind}_*.pb"), key=lambda path: int(path.stem.split("_")[1]))


def read_value(path: Path, declared: onnx.ValueInfoProto) -> Any:
    """A tensor, or a sequence as a list."""
    if declared.type.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    return TensorProto.FromString(path.read_bytes())


# -- the same cases in older versions

FORMER = {"constant_value": "value"}
"""What an input was called when it was an attribute."""


def older_cases() -> Iterable[tuple[Any, int, onnx.ModelProto, list[Any]]]:
    """(case, version, model, inputs): cases of one operator, relabelled to each earlier version from 7 on."""
    versions: dict[str, set[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and not schema.deprecated:
            versions.setdefault(schema.name, set()).add(schema.since_version)
    for case in cases():
        nodes = case.model.graph.node
        if len(nodes) != 1 or nodes[0].domain or any(attribute.HasField("g") for attribute in nodes[0].attribute):
            continue
        if any(value is None or isinstance(value, list) for side in case.data_sets[0] for value in side):
            continue
        newest = next(entry.version for entry in case.model.opset_import if not entry.domain)
        current = onnx.defs.get_schema(nodes[0].op_type, newest, "").since_version
        for version in sorted(v for v in versions[nodes[0].op_type] if 7 <= v < current):
            if (relabelled := _relabelled(case, version)) is not None:
                yield case, version, *relabelled


def _relabelled(case: Any, version: int) -> tuple[onnx.ModelProto, list[Any]] | None:
    """The case in an older version, inputs that were attributes then moved; None if they cannot be."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", version))
    model.ir_version = min(model.ir_version, 8)
    node = model.graph.node[0]
    newest = next(entry.version for entry in case.model.opset_import if not entry.domain)
    now, then = (onnx.defs.get_schema(node.op_type, opset, "") for opset in (newest, version))
    inputs = dict(zip((value.name for value in model.graph.input), case.data_sets[0][0], strict=True))
    former = {formal.name.lower() for formal in then.inputs}
    for position in reversed(range(len(node.input))):
        formal = now.inputs[min(position, len(now.inputs) - 1)].name.lower()
        name = FORMER.get(formal, formal)
        if formal in former or name not in then.attributes or position >= len(now.inputs):
            continue
        if (actual := node.input[position]) not in inputs:
            del node.input[position]
            continue
        value = inputs.pop(actual)
        array = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
        attribute_types = onnx.defs.OpSchema.AttrType
        single = then.attributes[name].type in (attribute_types.INT, attribute_types.FLOAT)
        if array.size == 0 or (single and array.size != 1):
            return None
        node.attribute.append(helper.make_attribute(name, array.reshape(-1)[0].item() if single else array.tolist()))
        del node.input[position]
        kept = [value for value in model.graph.input if value.name != actual]
        del model.graph.input[:]
        model.graph.input.extend(kept)
    return model, list(inputs.values())
