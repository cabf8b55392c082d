"""Write ONNX files of an exporter with a record of what the exporting framework trains in them.

The record of EXPORTER is EXPORTER.json beside the files: the versions of the packages, and for every file its
architecture, its inputs and `trained`, the names of the stored tensors that depend on trainable variables. The last is
measured, so that it holds whatever the exporter folds, transposes or renames: the model is written three times,

    weights as they are           file.onnx, which is kept
    trainable variables changed   stored tensors that differ from file.onnx  ->  trained
    the other variables changed   stored tensors that differ                 ->  buffers, such as running statistics

and a tensor that both change, such as a convolution that BatchNormalization was folded into, is trained. Tensors that
neither changes are constants. Needs numpy and onnx only, so that it runs in the environment of every exporter.
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

FOLDER = Path(__file__).resolve().parent
LARGEST_FILE_BYTES = 200_000

_Scope = ChainMap[str, onnx.NodeProto]
"""Name of a value -> the node that computes it."""
_Pair = tuple[str, str, _Scope, _Scope]
Changed = Literal["", "trainable", "others"]


@dataclass(frozen=True)
class Written:
    """One file to write."""

    name: str
    architecture: str
    inputs: Mapping[str, Mapping[str, Any]]
    """Input -> {"shape": lengths behind the batch dimension, and for integers "below": the first one too large}."""
    write: Callable[[Path, Changed], object]
    """Write the model to a path, with the given variables changed by random numbers."""


def write_files(exporter: str, packages: Sequence[str], files: Sequence[Written]) -> None:
    """Write every file and the exporter's record; a file that cannot be written is an error."""
    described = {}
    for file in files:
        target = FOLDER / f"{exporter}-{file.name}.onnx"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            kept, trainable, others = (_written(file, changed, path) for changed in ("", "trainable", "others"))
        by_trainable, by_others = _differing(kept, trainable), _differing(kept, others)
        content = kept.SerializeToString()
        if len(content) > LARGEST_FILE_BYTES:
            raise ValueError(f"{target.name} has {len(content)} bytes, more than {LARGEST_FILE_BYTES}")
        target.write_bytes(content)
        described[file.name] = {
            "architecture": file.architecture,
            "inputs": {name: dict(what) for name, what in file.inputs.items()},
            "trained": sorted(by_trainable),
            "buffers": sorted(by_others - by_trainable),
        }
        print(f"{target.name}: {len(content)} bytes, {len(by_trainable)} trained, {len(by_others)} depend on others")
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in packages}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(what)}" for name, what in described.items())
    content = f'{{"exporter": "{exporter}", "versions": {json.dumps(versions)}, "files": {{\n{lines}\n}}}}\n'
    (FOLDER / f"{exporter}.json").write_text(content, encoding="utf-8")


def _written(file: Written, changed: Changed, path: Path) -> onnx.ModelProto:
    file.write(path, changed)
    model = onnx.load(path)
    for node in _nodes(model.graph):  # torch records where on the exporting machine each line of the module stands
        kept = [entry for entry in node.metadata_props if not entry.key.endswith("stack_trace")]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.doc_string = ""
    return model


def _differing(kept: onnx.ModelProto, changed: onnx.ModelProto) -> set[str]:
    """Return the names in `kept` of stored tensors whose contents differ."""
    pairs = _aligned(kept.graph, changed.graph)
    other = dict(_stored(changed.graph))
    found = set()
    for name, tensor in _stored(kept.graph):
        output, slash, attribute = name.partition("/") if name not in pairs else (name, "", "")
        if output not in pairs:  # an initializer that nothing reads
            continue
        counterpart = other[pairs[output] + slash + attribute]
        if numpy_helper.to_array(tensor).tobytes() != numpy_helper.to_array(counterpart).tobytes():
            found.add(name)
    return found


def _aligned(a: onnx.GraphProto, b: onnx.GraphProto) -> dict[str, str]:
    """Return name in `a` -> name in `b` for every value, walking back from the outputs.

    Neither names nor the order of nodes need be equal: exporters number tensors, and sort nodes by hashes.
    """
    pairs: dict[str, str] = {}
    seen: set[tuple[str, int]] = set()
    scopes = []  # so that no two have one id
    waiting = _outputs(a, b, ChainMap(), ChainMap())
    while waiting:
        x, y, mine, other = waiting.pop()
        x, y = _source(x, mine), _source(y, other)
        if not x or (x, id(mine)) in seen:
            continue
        seen.add((x, id(mine)))
        scopes.append(mine)
        pairs[x] = y
        if (node := mine.get(x)) is None:
            continue
        counterpart = other.get(y)
        if counterpart is None or counterpart.op_type != node.op_type:
            raise ValueError(f"{node.op_type} {x} has another counterpart in the second export: {y}")
        waiting += [(u, v, mine, other) for u, v in zip(node.input, counterpart.input, strict=True)]
        for inner, its in zip(node.attribute, counterpart.attribute, strict=True):
            if inner.HasField("g"):
                waiting += _outputs(inner.g, its.g, mine, other)
    return pairs


def _source(name: str, nodes: _Scope) -> str:
    """Return the value that Identity nodes copy, which optimisers leave in one export and remove in another."""
    while (node := nodes.get(name)) is not None and node.op_type == "Identity":
        name = node.input[0]
    return name


def _outputs(a: onnx.GraphProto, b: onnx.GraphProto, outer_a: _Scope, outer_b: _Scope) -> list[_Pair]:
    """Return the pairs of outputs of two graphs, with the nodes that are visible from inside them."""
    scopes = [
        outer.new_child({name: node for node in graph.node for name in node.output})
        for graph, outer in ((a, outer_a), (b, outer_b))
    ]
    return [(x.name, y.name, *scopes) for x, y in zip(a.output, b.output, strict=True)]


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _stored(graph: onnx.GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Yield (name, tensor) of initializers, Constant nodes and linear models, those of inner graphs included."""
    for tensor in graph.initializer:
        yield tensor.name, tensor
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type in ("LinearClassifier", "LinearRegressor") and attribute.floats:
                numbers = np.array(attribute.floats, np.float32)
                yield f"{node.output[0]}/{attribute.name}", numpy_helper.from_array(numbers)
            if node.op_type == "Constant" and attribute.name == "value":
                yield node.output[0], attribute.t
            if attribute.HasField("g"):
                yield from _stored(attribute.g)
