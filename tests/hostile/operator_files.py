"""ONNX files with divisions that end a process, and with attributes that no operator may have."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
from onnx import helper, parser

from tests.hostile.onnx_files import file_case
from tests.hostile.sandbox import Case

NUMBERS = (0, -1, -2, 1, 3, 65, 2**31, 2**40, 2**62, -(2**31), -(2**62), -(2**63), 2**63 - 1)
OPERATORS = (
    ("Conv", "x, k", ("strides", "dilations", "group", "kernel_shape", "pads")),
    ("ConvTranspose", "x, k", ("strides", "dilations", "group", "output_padding", "output_shape", "pads")),
    ("MaxPool", "x", ("kernel_shape", "strides", "dilations", "pads", "storage_order", "ceil_mode")),
    ("AveragePool", "x", ("kernel_shape", "strides", "dilations", "pads", "count_include_pad")),
    ("LpPool", "x", ("kernel_shape", "strides", "p", "pads")),
    ("GlobalLpPool", "x", ("p",)),
    ("LpNormalization", "x", ("p", "axis")),
    ("LRN", "x", ("size",)),
    ("DepthToSpace", "x", ("blocksize",)),
    ("SpaceToDepth", "x", ("blocksize",)),
    ("Split", "x", ("num_outputs", "axis")),
    ("Concat", "x, x", ("axis",)),
    ("Flatten", "x", ("axis",)),
    ("Softmax", "x", ("axis",)),
    ("Transpose", "x", ("perm",)),
    ("Gather", "x, i", ("axis",)),
    ("GatherND", "x, i", ("batch_dims",)),
    ("Shape", "x", ("start", "end")),
    ("GroupNormalization", "x, s, s", ("num_groups",)),
    ("LayerNormalization", "x, s", ("axis",)),
    ("GRU", "r, w, w", ("hidden_size", "layout")),
    ("TopK", "x, i", ("axis", "largest")),
    ("CumSum", "x, i", ("exclusive", "reverse")),
    ("QuantizeLinear", "x, s", ("axis", "block_size")),
    ("EyeLike", "m", ("k",)),
    ("Trilu", "m", ("upper",)),
    ("Multinomial", "m", ("sample_size", "dtype")),
    ("RandomNormal", "", ("shape",)),
    ("Resize", "x, , f", ("axes", "antialias")),
    ("ReduceMax", "x", ("keepdims", "noop_with_empty_axes")),
    ("ReverseSequence", "m, i", ("batch_axis", "time_axis")),
    ("Cast", "x", ("to",)),
)
LISTS = {"strides", "dilations", "kernel_shape", "pads", "output_padding", "output_shape", "perm", "shape", "axes"}


def divisions(rng: random.Random, folder: Path) -> Case:
    """Integer Div and Mod by -1 and 0: of constants, of what constants give, of the input, in a branch."""
    kind, bits = rng.choice((("int32", 32), ("int64", 64), ("int8", 8), ("int16", 16), ("uint8", 0), ("uint32", 0)))
    least = -(2 ** (bits - 1)) if bits else 255
    divisor = rng.choice((-1, -1, -1, 0, 1)) if bits else rng.choice((0, 255))
    operator = rng.choice(("Div", "Mod", "Mod <fmod = 1>"))
    version = rng.choice((14, 14, 18, 20)) if kind in ("int32", "int64") else 18
    made = rng.choice(
        (
            f"c = {operator} (a, b)",
            f"a1 = Add (a, zero)\n c = {operator} (a1, b)",
            f"i0 = Mul (xi, zero)\n a1 = Add (i0, a)\n c = {operator} (a1, b)",
            f"i0 = Mul (xi, zero)\n b1 = Add (i0, b)\n c = {operator} (a, b1)",
            f"yes = Equal (a, a)\n y1 = Squeeze (yes)\n c = If (y1) <then_branch = t () => ({kind}[1] d) "
            f"{{ d = {operator} (a, b) }}, else_branch = e () => ({kind}[1] g) {{ g = Identity (a) }}>",
            f"c0 = Shape (x)\n c1 = Cast <to = 7> (c0)\n m = Constant <value = int64 {{{divisor}}}> ()\n"
            f"c2 = {operator} (c1, m)\n c = Identity (a)\n unused = Cast <to = 1> (c2)",
        )
    )
    batch = rng.choice(("batch", "1", "4"))
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : {version}]>
        net (float[{batch}, 4] x) => (float[{batch}, 4] y)
        <{kind}[1] a = {{{least}}}, {kind}[1] b = {{{divisor}}}, {kind}[1] zero = {{0}},
         float[4, 4] w = {{1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}}>
        {{
            xi = Cast <to = {onnx.TensorProto.DataType.Value(kind.upper())}> (x)
            {made}
            f = Cast <to = 1> (c)
            h = MatMul (x, w)
            y = Add (h, f)
        }}""")
    return file_case(rng, folder, model.SerializeToString())


def attributes(rng: random.Random, folder: Path) -> Case:
    """One operator with an attribute of 0, of a negative or of a huge number; also passed to a function."""
    operator, operands, names = rng.choice(OPERATORS)
    name = rng.choice(names)
    length = rng.choice((2, 2, 2, 4, 4, 0, 1, 5))
    number = rng.choice(NUMBERS)
    several = [rng.choice((number, number, 1)) for _ in range(length)]
    value = (several or [1]) if name in LISTS else number
    given = {name: value, **({"kernel_shape": [2, 2]} if operator.endswith("Pool") and name != "kernel_shape" else {})}
    if operator == "GlobalLpPool":
        given = {name: value}
    inputs = [each.strip() for each in operands.split(",")] if operands else []
    node = helper.make_node(operator, inputs, ["c"], "bounded", **given)
    by_function = rng.random() < 0.25
    batch = rng.choice(("batch", "1", "2"))
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : {rng.choice((18, 20, 22))}, "own" : 1]>
        net (float[{batch}, 3, 4, 4] x, float[{batch}, 4, 4] r, float[4, 4] m) => (y)
        <float[3, 3, 2, 2] k = {{{", ".join(["0.1"] * 36)}}}, float[3] s = {{1, 1, 1}}, int64[1] i = {{1}},
         float[4] f = {{1, 1, 2, 2}}, float[1, 12, 4] w = {{{", ".join(["0.1"] * 48)}}}>
        {{ y = Identity (c) }}""")
    if by_function:
        opsets = [helper.make_opsetid("", 20)]
        inner = helper.make_node(operator, inputs, ["c"], "bounded", **given)
        for attribute in inner.attribute:
            if attribute.name == name:
                passed = onnx.AttributeProto(name=name, type=attribute.type, ref_attr_name="passed")
                attribute.CopyFrom(passed)
        used = [each for each in dict.fromkeys(inputs) if each]
        model.functions.append(helper.make_function("own", "f", used, ["c"], [inner], opsets, ["passed"]))
        node = helper.make_node("f", used, ["c"], "call", domain="own", passed=value)
    identity = onnx.NodeProto.FromString(model.graph.node[0].SerializeToString())
    del model.graph.node[:]
    model.graph.node.extend([node, identity])
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None))
    return file_case(rng, folder, model.SerializeToString())
