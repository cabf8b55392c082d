"""Infer types and shapes that ONNX's shape inference leaves out: of ai.onnx.ml, and of skl2onnx's Tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import TensorProto, helper

DOMAIN = "ai.onnx.ml"
Dims = list[int | str | None]


def further_results(graph: onnx.GraphProto, known: Mapping[str, onnx.ValueInfoProto]) -> Iterator[onnx.ValueInfoProto]:
    """Yield the type of each result whose type is not among `known`, and whose operand's is."""
    for node in graph.node:
        if node.domain not in (DOMAIN, "com.microsoft"):
            continue
        name = node.output[-1]  # of classifiers: the scores, after the labels
        # a declared value may have a shape and no element type
        typed = name in known and known[name].type.tensor_type.elem_type
        if not name or typed or not node.input:
            continue
        operand = known.get(node.input[0])
        if operand is None:
            continue
        kind = operand.type.tensor_type.elem_type
        dims = _dims(operand)
        if (node.domain, node.op_type) == ("com.microsoft", "Tokenizer"):  # one dimension more, for the tokens
            yield helper.make_tensor_value_info(name, TensorProto.STRING, None if dims is None else [*dims, None])
        if node.domain != DOMAIN:
            continue
        attributes = {attribute.name: attribute for attribute in node.attribute}
        # an undefined type is no type: it would be asked for again without end
        if node.op_type == "Imputer" and kind:
            yield helper.make_tensor_value_info(name, kind, dims)
        elif node.op_type in ("Scaler", "Normalizer"):
            yield helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
        elif node.op_type in ("LinearRegressor", "TreeEnsembleRegressor", "SVMRegressor"):
            targets = next((attributes[key].i for key in ("targets", "n_targets") if key in attributes), 1)
            yield _matrix(name, dims, targets)
        elif node.op_type in ("TreeEnsembleClassifier", "SVMClassifier"):
            # one of the attributes for labels has them: as integers or as strings
            counts = (len(attributes[key].ints) + len(attributes[key].strings) for key in attributes if "label" in key)
            yield _matrix(name, dims, next(counts, None))
        elif node.op_type == "FeatureVectorizer":
            widths = list(attributes["inputdimensions"].ints) if "inputdimensions" in attributes else []
            yield _matrix(name, dims, sum(widths) or None)


def _dims(value: onnx.ValueInfoProto) -> Dims | None:
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return [_length_or_symbol(dim) for dim in kind.shape.dim]


def _length_or_symbol(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value") and dim.dim_value >= 0:
        return dim.dim_value
    return dim.dim_param or None


def _matrix(name: str, rows: Dims | None, columns: int | None) -> onnx.ValueInfoProto:
    """Return the type of an fp32 matrix with the rows of an operand."""
    row = rows[0] if rows and len(rows) == 2 else None
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [row, columns])
