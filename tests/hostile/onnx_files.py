"""ONNX files that are wrong in one way each: sizes, names, nesting, external data, flipped bits."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

from tests.hostile.sandbox import Case

HUGE = (-1, -(2**62), 0, 10**12, 2**31, 2**40, 2**62, 2**63 - 1)
NAMES = (
    "",
    "\0",
    "a\0b",
    "x" * 10_000,
    "../../secret",
    "\u202eabc",
    "a\nb",
    "\x1b[2J",
    "😀",
    "{name}",
    "%s%n",
    "'" * 40,
)
OUTSIDE = (
    "../secret/secret.bin",
    "link/secret.bin",
    "linked.bin",
    "/etc/hostname",
    "/dev/zero",
    "fifo",
    ".",
    "",
    "a\0b",
)
Change = Callable[[random.Random, onnx.ModelProto], None]


# -- valid files to begin with


def small_model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.normal(size=(4, 8)).astype(np.float32), "w1")]
    weights += [numpy_helper.from_array(rng.normal(size=(8, 3)).astype(np.float32), "w2")]
    weights += [numpy_helper.from_array(np.array([-1, 8], np.int64), "shape")]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("Reshape", ["r", "shape"], ["s"], "reshape"),
        helper.make_node("MatMul", ["s", "w2"], ["y"], "second"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "mlp", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _branches() -> onnx.ModelProto:
    return parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        net (float[batch, 4] x) => (float[batch, 4] y)
        <float[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float[1] one = {1}>
        {
            h = MatMul (x, w)
            s = ReduceSum <keepdims = 0> (h)
            zero = Constant <value = float {0}> ()
            c = Greater (s, zero)
            y = If (c) <then_branch = up () => (float[batch, 4] a) { a = Add (h, one) },
                        else_branch = down () => (float[batch, 4] b) { b = Sub (h, one) }>
        }""")


def _functions() -> onnx.ModelProto:
    return parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20, "own" : 1]>
        net (float[batch, 4] x) => (float[batch, 4] y)
        <float[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
        { h = MatMul (x, w)
          y = own.twice (h) }
        <domain: "own", opset_import: ["" : 20, "own" : 1]>
        twice (a) => (c) { b = own.once (a)
          c = own.once (b) }
        <domain: "own", opset_import: ["" : 20]>
        once (a) => (b) { b = Relu (a) }""")


def image_model() -> onnx.ModelProto:
    return parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 20]>
        net (float[batch, 3, 8, 8] image) => (float[batch, 2] y)
        <float[2, 3, 3, 3] k = {"""
        + ",".join(["0.1"] * 54)
        + """}, float[2] scale = {1, 1}, float[2] shift = {0, 0}, float[2] mean = {0, 0}, float[2] var = {1, 1}>
        {
            c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (image, k)
            n = BatchNormalization (c, scale, shift, mean, var)
            p = GlobalAveragePool (n)
            y = Flatten (p)
        }"""
    )


def _classifier() -> onnx.ModelProto:
    """A linear classifier whose labels are looked up in a stored tensor, and a draw as of stochastic depth."""
    nodes = [
        helper.make_node(
            "LinearClassifier",
            ["x"],
            ["label", "scores"],
            domain="ai.onnx.ml",
            coefficients=[0.1] * 8,
            intercepts=[0.0, 0.0],
            classlabels_ints=[0, 1],
            post_transform="SOFTMAX",
        ),
        helper.make_node("ArrayFeatureExtractor", ["names", "label"], ["named"], domain="ai.onnx.ml"),
    ]
    names = numpy_helper.from_array(np.array([5, 6], np.int64), "names")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    outputs = [helper.make_tensor_value_info("named", TensorProto.INT64, None)]
    outputs += [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 2])]
    graph = helper.make_graph(nodes, "classifier", [x], outputs, [names])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _depth() -> onnx.ModelProto:
    return parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        net (float[batch, 4] x) => (float[batch, 4] y)
        <float[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
        {
            h = MatMul (x, w)
            keep = Constant <value = float {0.9}> ()
            shape = Constant <value = int64[2] {1, 1}> ()
            probability = Expand (keep, shape)
            mask = Bernoulli (probability)
            scaled = Div (mask, keep)
            d = Mul (h, scaled)
            y = Add (x, d)
        }""")


def _quantized() -> onnx.ModelProto:
    return parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        net (float[batch, 4] x) => (float[batch, 4] y)
        <int8[4, 4] q = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float s = {0.1}, int8 z = {0}>
        {
            w = DequantizeLinear (q, s, z)
            xq = QuantizeLinear (x, s, z)
            xd = DequantizeLinear (xq, s, z)
            y = MatMul (xd, w)
        }""")


BASES = (small_model, _branches, _functions, image_model, _classifier, _depth, _quantized)


# -- tensors


def _all_tensors(model: onnx.ModelProto) -> list[TensorProto]:
    found = list(model.graph.initializer)
    for node in model.graph.node:
        found += [attribute.t for attribute in node.attribute if attribute.HasField("t")]
    return found


def _raw_length(rng: random.Random, model: onnx.ModelProto) -> None:
    tensor = rng.choice(_all_tensors(model) or [model.graph.initializer.add(name="w")])
    data = rng.choice((b"", b"\0", bytes(7), bytes(1000), None))
    if data is None:
        tensor.ClearField("raw_data")
        tensor.ClearField(rng.choice(("float_data", "int64_data", "int32_data")))
    else:
        tensor.raw_data = data


def _dims(rng: random.Random, model: onnx.ModelProto) -> None:
    tensor = rng.choice(_all_tensors(model) or [model.graph.initializer.add(name="w")])
    if rng.random() < 0.5 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(HUGE)
    else:
        del tensor.dims[:]
        tensor.dims.extend(rng.choice(HUGE) for _ in range(rng.choice((0, 1, 2, 5, 65, 3000))))
    if rng.random() < 0.3:
        tensor.ClearField("raw_data")


def _tensor_type(rng: random.Random, model: onnx.ModelProto) -> None:
    tensor = rng.choice(_all_tensors(model) or [model.graph.initializer.add(name="w")])
    tensor.data_type = rng.choice((*range(27), 99, -1, 2**31 - 1))
    if rng.random() < 0.3:
        tensor.string_data.append(rng.choice((b"\xff\xfe", b"a\0b")))


def _declared(rng: random.Random, model: onnx.ModelProto) -> None:
    value = rng.choice([*model.graph.input, *model.graph.output])
    tensor = value.type.tensor_type
    for _ in range(rng.choice((1, 1, 3))):
        dim = rng.choice(tensor.shape.dim) if tensor.shape.dim and rng.random() < 0.8 else tensor.shape.dim.add()
        dim.dim_value = rng.choice(HUGE)
    if rng.random() < 0.2:
        tensor.elem_type = rng.choice((0, 8, 14, 99, 2**30))


# -- names, versions, attributes, structure


def _names(rng: random.Random, model: onnx.ModelProto) -> None:
    name = rng.choice(NAMES)
    places = [*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer]
    each = rng.choice(places)
    if isinstance(each, onnx.NodeProto) and rng.random() < 0.7:
        which = rng.choice(("op_type", "domain", "input", "output", "name"))
        if which in ("input", "output"):
            names = getattr(each, which)
            if names:
                names[rng.randrange(len(names))] = name
        else:
            setattr(each, which, name)
    else:
        each.name = name


def _versions(rng: random.Random, model: onnx.ModelProto) -> None:
    number = rng.choice((0, 1, -1, 999, 2**62, -(2**63)))
    if rng.random() < 0.7 and model.opset_import:
        rng.choice(model.opset_import).version = number
    else:
        model.ir_version = number
    if rng.random() < 0.1:
        del model.opset_import[:]


def _attributes(rng: random.Random, model: onnx.ModelProto) -> None:
    node = rng.choice(model.graph.node)
    values = (*HUGE[:7], 1e308, [2**40] * 3, [], [-1, -1], b"\xff\xfe", "a\0b", [b"\xff"], [1.5] * 100_000)
    name = rng.choice([each.name for each in node.attribute] or ["axis"])
    kept = [each for each in node.attribute if each.name != name]
    value = rng.choice(values)
    attribute = helper.make_attribute(name, value) if value != [] else onnx.AttributeProto(name=name, type=7)
    copies = [onnx.AttributeProto.FromString(each.SerializeToString()) for each in kept]
    del node.attribute[:]
    node.attribute.extend([*copies, attribute])


def _wiring(rng: random.Random, model: onnx.ModelProto) -> None:
    """Cycles, missing producers, several of one name, nodes in a wrong order, no nodes at all."""
    nodes = model.graph.node
    kind = rng.randrange(6)
    if kind == 0:
        node = rng.choice(nodes)
        node.input.append(rng.choice(nodes).output[0])
    elif kind == 1:
        rng.choice(nodes).output[0] = rng.choice(nodes).output[0]
    elif kind == 2:
        copies = [onnx.NodeProto.FromString(each.SerializeToString()) for each in nodes]
        rng.shuffle(copies)
        del nodes[:]
        nodes.extend(copies)
    elif kind == 3:
        node = rng.choice(nodes)
        del node.input[:]
    elif kind == 4:
        del nodes[rng.randrange(len(nodes))]
    else:
        for field in rng.sample(("node", "input", "output", "initializer", "name"), 2):
            model.graph.ClearField(field)


def _expansion(rng: random.Random, model: onnx.ModelProto) -> None:
    """Functions that call the next one twice: 2^depth nodes; or that call each other for ever."""
    depth = rng.choice((3, 12, 20, 29, 60, 2000))
    recursive = rng.random() < 0.3
    if not any(entry.domain == "deep" for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("deep", 1))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("deep", 1)]
    for level in range(depth):
        last = level == depth - 1
        call = {"domain": "" if last and not recursive else "deep"}
        name = "Relu" if last and not recursive else f"f{(level + 1) % depth}"
        nodes = [helper.make_node(name, ["a"], ["b"], **call), helper.make_node(name, ["b"], ["c"], **call)]
        model.functions.append(helper.make_function("deep", f"f{level}", ["a"], ["c"], nodes, opsets))
    source = model.graph.input[0].name
    model.graph.node.append(helper.make_node("f0", [source], ["deep_result"], domain="deep"))
    model.graph.output.append(helper.make_tensor_value_info("deep_result", TensorProto.FLOAT, None))


# -- external data


def _external(rng: random.Random, model: onnx.ModelProto) -> None:
    Path("link").symlink_to("../secret")
    Path("linked.bin").symlink_to("../secret/secret.bin")
    Path("model.bin").write_bytes(bytes(4096))
    os.mkfifo("fifo")
    tensors = _all_tensors(model) or [model.graph.initializer.add(name="w", data_type=1)]
    for tensor in rng.sample(tensors, min(len(tensors), rng.choice((1, 1, 3)))):
        for field in ("raw_data", "float_data", "int64_data", "int32_data"):
            tensor.ClearField(field)
        tensor.data_location = TensorProto.EXTERNAL
        absolute = str(Path("../secret/secret.bin").resolve())
        location = rng.choice((*OUTSIDE, absolute, "model.bin", "model.bin", "model.bin"))
        numbers = ("0", "8", "-8", "4096", "100000000000", "9" * 5000, "x", "", "1e3", "0x10", " 8 ", "²", "\0")
        tensor.external_data.add(key="location", value=location)
        if rng.random() < 0.7:
            tensor.external_data.add(key="offset", value=rng.choice(numbers))
        if rng.random() < 0.7:
            tensor.external_data.add(key="length", value=rng.choice(numbers))
        if rng.random() < 0.2:
            tensor.external_data.add(key="location", value="../secret/secret.bin")
        if rng.random() < 0.3:
            del tensor.dims[:]
            tensor.dims.append(rng.choice((1, 2, 1024, 2**40)))


CHANGES: tuple[Change, ...] = (
    _raw_length,
    _dims,
    _tensor_type,
    _declared,
    _names,
    _versions,
    _attributes,
    _wiring,
    _expansion,
    _external,
)


# -- bytes


def _flipped(rng: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def _garbage(rng: random.Random, content: bytes) -> bytes:
    kind = rng.randrange(5)
    start = rng.randrange(len(content))
    if kind == 0:
        return rng.randbytes(rng.choice((0, 1, 10, 1000, 100_000)))
    if kind == 1:
        return content[:start] + rng.randbytes(50) + content[start:]
    if kind == 2:
        return content * rng.choice((2, 50))
    if kind == 3:
        return content.replace(b"w1", b"\xff\xfe").replace(b"Relu", b"\xc3\x28lu")
    return b"\x3a\xff\xff\xff\xff\x0f" + content  # a graph of 4 GB, by its length


def _nested(rng: random.Random, content: bytes) -> bytes:
    """Branches in branches, some thousands deep; written by hand, because protobuf refuses more than 100 levels."""

    def field(number: int, value: bytes) -> bytes:
        size, prefix = len(value), bytearray([number << 3 | 2])
        while size > 127:
            prefix.append(size & 127 | 128)
            size >>= 7
        return bytes([*prefix, size]) + value

    inner = field(1, field(1, b"x") + field(2, b"z") + field(4, b"Identity")) + field(12, field(1, b"z"))
    for _ in range(rng.choice((3, 20, 23, 24, 25, 40, 300, 3000))):
        branches = [field(5, field(1, name) + field(6, inner) + b"\xa0\x01\x05") for name in (b"then_branch",)]
        node = field(1, b"c") + field(2, b"z") + field(4, b"If") + b"".join(branches)
        inner = field(1, node) + field(2, b"g") + field(12, field(1, b"z"))
    # messages that follow each other are merged: the nodes become the graph's last ones
    return content + field(7, inner)


def file(rng: random.Random, folder: Path) -> Case:
    """One change, or two, of a valid file; tried by doctor, diff, a run, init."""
    model = rng.choice(BASES)()
    for change in rng.sample(CHANGES, rng.choice((1, 1, 1, 2))):
        change(rng, model)
    content = model.SerializeToString()
    return file_case(rng, folder, content)


def damaged_file(rng: random.Random, folder: Path) -> Case:
    """Flipped bits, a file that is cut off, garbage."""
    content = rng.choice(BASES)().SerializeToString()
    return file_case(rng, folder, rng.choice((_flipped, _flipped, _flipped, _nested, _cut, _garbage))(rng, content))


def file_case(rng: random.Random, folder: Path, content: bytes) -> Case:
    (folder / "model.onnx").write_bytes(content)
    (folder / "good.onnx").write_bytes(small_model().SerializeToString())
    (folder / "train.csv").write_text("x0,x1,x2,x3,label\n" + "".join(f"{i},1,2,3,{i % 3}\n" for i in range(40)))
    (folder / "config.toml").write_text(
        '[model]\npath = "model.onnx"\n[data]\nsource = "train.csv"\n[data.inputs]\nx = ["x0", "x1", "x2", "x3"]\n'
        "[train]\nnum_steps = 2\nglobal_batch_size = 4\n"
    )
    role = rng.random()
    if role < 0.08:
        return Case(("run", "config.toml", "model.path=good.onnx", "loss.name=file", "loss.file=model.onnx"))
    if role < 0.14:
        return Case(("run", "config.toml", "model.path=good.onnx", "teacher.path=model.onnx"))
    if role < 0.2:
        return Case(("predict", "model.onnx", "train.csv", "--input", "x=x0,x1,x2,x3"))
    if role < 0.26:
        return Case(("evaluate", "model.onnx", "train.csv"))
    commands = (
        ("doctor", "model.onnx"),
        ("doctor", "model.onnx"),
        ("diff", "model.onnx", "good.onnx"),
        ("diff", "good.onnx", "model.onnx"),
        ("run", "config.toml"),
        ("run", "config.toml", "model.num_classes=5"),
        ("run", "config.toml", "quantize.aware=true"),
        ("init", "model.onnx", "train.csv", "--no-try", "-o", "new.toml"),
    )
    return Case(rng.choice(commands))
