"""Refuse attributes of operators that ONNX does not allow, before anything divides by them or takes memory for them.

A stride of 0 ends a shape computation in a ZeroDivisionError, and a `group` of 0 ends the process of onnxruntime when
it opens the file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import onnx
from onnx import AttributeProto, defs, inliner

from onward.trainer.bounds import TENSOR_DIMS
from onward.trainer.errors import shown
from onward.trainer.onnx_graph.files.index import bodies_of, domain_of, nodes_inside, without_large_tensors


class Bound(NamedTuple):
    """The least and the greatest value of an attribute, or of each of its values."""

    least: int
    most: int = 2**31 - 1


POSITIVE = Bound(1)
NOT_NEGATIVE = Bound(0)
AXIS = Bound(-TENSOR_DIMS.most, TENSOR_DIMS.most - 1)
DIMENSION = Bound(0, TENSOR_DIMS.most)
VOCABULARY = Bound(0, 2**24)
"""Columns of the result of TfIdfVectorizer, which has as many as the largest index says."""

BOUNDS: Mapping[str, Bound] = {
    **dict.fromkeys(("strides", "dilations", "kernel_shape", "output_shape", "pooled_shape"), POSITIVE),
    **dict.fromkeys(("group", "groups", "offset_group", "num_groups", "num_outputs", "blocksize"), POSITIVE),
    **dict.fromkeys(("hidden_size", "q_num_heads", "kv_num_heads", "output_height", "output_width"), POSITIVE),
    **dict.fromkeys(("size", "p", "sample_size", "num_scan_inputs"), POSITIVE),
    **dict.fromkeys(("pads", "output_padding", "split", "block_size", "sampling_ratio", "chunk_size"), NOT_NEGATIVE),
    **dict.fromkeys(("num_heads", "rotary_embedding_dim", "max_skip_count"), NOT_NEGATIVE),
    **dict.fromkeys(("axis", "axes", "new_axis", "scan_input_axes", "scan_output_axes"), AXIS),
    **dict.fromkeys(("perm", "batch_dims", "batch_axis", "time_axis"), DIMENSION),
    **dict.fromkeys(("min_gram_length", "max_gram_length"), POSITIVE),
    **dict.fromkeys(("ngram_counts", "ngram_indexes"), VOCABULARY),
    "k": Bound(-(2**31)),
}
"""Attribute -> its bounds, which are the same in every operator that has it."""
OWN_BOUNDS: Mapping[tuple[str, str], Bound] = {
    ("Pad", "pads"): Bound(-(2**31)),  # negative pads crop
    ("RandomNormal", "shape"): NOT_NEGATIVE,
    ("RandomUniform", "shape"): NOT_NEGATIVE,
    ("MultiHeadAttention", "num_heads"): POSITIVE,
    ("Attention", "num_heads"): POSITIVE,  # of com.microsoft; elsewhere 0 means: the operator finds it out
    ("GroupQueryAttention", "num_heads"): POSITIVE,
    ("MatMulNBits", "block_size"): POSITIVE,
    ("MatMulNBits", "bits"): Bound(1, 8),
    ("MatMulNBits", "K"): POSITIVE,
    ("MatMulNBits", "N"): POSITIVE,
    ("LinearRegressor", "targets"): POSITIVE,
    ("SVMRegressor", "n_supports"): NOT_NEGATIVE,
    ("SVMClassifier", "vectors_per_class"): NOT_NEGATIVE,
    ("FeatureVectorizer", "inputdimensions"): POSITIVE,
    **{(f"TreeEnsemble{end}", "n_targets"): Bound(1, 2**24) for end in ("", "Regressor")},
}
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")
"""The domains whose operators have these attributes; others may give the names another meaning."""


def attribute_problems(model: onnx.ModelProto) -> Iterator[str]:
    """Yield a sentence for each attribute of a node that has another type than its operator's, or is outside its
    bounds, those of functions included."""
    for nodes, opsets in bodies_of(model):
        for node in nodes_inside(nodes):
            if node.domain in DOMAINS:
                domain = domain_of(node)
                yield from _problems_of(node, _types(node.op_type, domain, opsets.get(domain, 0)))


def passed_attribute_problems(model: onnx.ModelProto) -> Iterator[str]:
    """Yield the same of attributes that nodes pass to functions of a valid model, whose bodies use them as theirs."""
    nodes = [node for function in model.functions for node in nodes_inside(function.node)]
    if any(attribute.ref_attr_name for node in nodes for attribute in node.attribute):
        yield from attribute_problems(inliner.inline_local_functions(without_large_tensors(model)))


@functools.cache
def _types(operator: str, domain: str, opset: int) -> Mapping[str, int]:
    """Return the type of each attribute of an operator; {} for one that ONNX does not define in this opset."""
    try:
        schema = defs.get_schema(operator, opset, domain)
    except (defs.SchemaError, TypeError):  # a version beyond 32 bits is an error of its binding
        return {}
    # the stub of AttrType lacks `value`
    return {name: getattr(attribute.type, "value", 0) for name, attribute in schema.attributes.items()}


def _problems_of(node: onnx.NodeProto, types: Mapping[str, int]) -> Iterator[str]:
    for attribute in node.attribute:
        # an attribute that ONNX does not define may have any type
        wanted = types.get(attribute.name, attribute.type)
        if attribute.type not in (wanted, AttributeProto.UNDEFINED):
            kinds = AttributeProto.AttributeType.Name
            yield f"{_whose(node)} {attribute.name} of the type {kinds(attribute.type)}; it takes {kinds(wanted)}"
            continue
        bound = OWN_BOUNDS.get((node.op_type, attribute.name)) or BOUNDS.get(attribute.name)
        if bound is None or attribute.type not in (AttributeProto.INT, AttributeProto.INTS):
            continue
        values = [attribute.i] if attribute.type == AttributeProto.INT else attribute.ints
        # a value that the call of a function gives is looked at by `passed_attribute_problems`
        if attribute.ref_attr_name or all(bound.least <= value <= bound.most for value in values):
            continue
        given = shown(values[0] if attribute.type == AttributeProto.INT else list(values))
        yield f"{_whose(node)} {attribute.name} = {given}; allowed is {bound.least:,} to {bound.most:,}"


def _whose(node: onnx.NodeProto) -> str:
    return f"node '{shown(node.name or next(filter(None, node.output), ''))}': {node.op_type} has"
