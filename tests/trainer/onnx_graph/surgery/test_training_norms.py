"""BatchNormalization in training form: which nodes have running statistics, and what becomes of those that have none.

The truth is onnxruntime on the file as it is (where it has the operator's version), or the formula in float64.
"""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.surgery.strip_training import strip_training
from onward.trainer.onnx_graph.surgery.training_norms import training_norms
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights

RNG = np.random.default_rng(0)
AMONG_CHANNELS = "the rows of the batch are among the channels of its input"
DIVIDED = "the rows of the batch are divided among several axes of its input"
STORED = "its input is computed from stored tensors alone"


def parsed(text, **weights):
    """A file at opset 17, or the one of `text`, with random weights, and statistics of the given lengths."""
    model = parser.parse_model(
        text if text.lstrip().startswith("<") else '<ir_version: 8, opset_import: ["": 17]>' + text
    )
    for name, value in weights.items():
        array = RNG.standard_normal(value) if isinstance(value, tuple) else np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(model)
    return model


def statistics(length):
    """Scale, bias, mean and variance, all different from 0 and 1."""
    positive = np.linspace(0.5, 2.0, length)
    return {"s": positive, "o": np.linspace(-1.0, 1.0, length), "m": np.linspace(0.1, 0.9, length), "v": 3 * positive}


def norm(x="h", y="n", **attributes):
    given = ", ".join(f"{name} = {value}" for name, value in {"training_mode": 1, **attributes}.items())
    return f"{y}, rm, rv = BatchNormalization <{given}> ({x}, s, o, m, v)"


def weight_standardisation():
    return parsed(f"""g (float[N,3,6,6] x) => (float[N,4,6,6] y) {{
        h = Reshape(w, flat)
        {norm()}
        k = Reshape(n, back)
        y = Conv <pads = [1,1,1,1]> (x, k) }}""",
        w=(4, 3, 3, 3), flat=np.array([1, 4, 27]), back=np.array([4, 3, 3, 3]), **statistics(4))  # fmt: skip


def instance_norm(rows, shape):
    return parsed(f"""g (float[{rows},3,6,6] x) => (float[{rows},2,6,6] y) {{
        c = Conv <pads = [1,1,1,1]> (x, w)
        h = Reshape(c, folded)
        {norm()}
        u = Reshape(n, back)
        a = Relu(u)
        y = Conv(a, w2) }}""",
        w=(3, 3, 3, 3), w2=(2, 3, 1, 1), folded=np.array(shape), back=np.array([rows, 3, 6, 6]),
        **statistics(3 * rows))  # fmt: skip


def ghost_batches():
    return parsed(f"""g (float[4,3,6] x) => (float[4,3,6] y) {{
        c = Conv(x, w)
        h = Reshape(c, folded)
        {norm()}
        y = Reshape(n, back) }}""",
        w=(3, 3, 1), folded=np.array([2, 6, 6]), back=np.array([4, 3, 6]), **statistics(6))  # fmt: skip


def without_memory():
    return parsed(f"""g (float[N,3,6] x) => (float[N,3,6] y) {{
        h = Conv(x, w)
        {norm(y="y", momentum=1.0)} }}""",
        w=(3, 3, 1), **statistics(3))  # fmt: skip


def in_a_branch():
    return parsed(f"""g (float[N,3,6] x, bool b) => (float[N,4,6] y) {{
        h = Reshape(w, flat)
        k = If (b) <
            then_branch = t () => (float[1,4,3] n) {{ {norm()} }},
            else_branch = e () => (float[1,4,3] q) {{ q = Identity(h) }} >
        l = Reshape(k, back)
        y = Conv(x, l) }}""",
        w=(4, 3, 1), flat=np.array([1, 4, 3]), back=np.array([4, 3, 1]), **statistics(4))  # fmt: skip


def in_a_function():
    return parsed(f"""<ir_version: 8, opset_import: ["": 17, "own": 1]>
        g (float[N,3,6] x) => (float[N,4,6] y) {{
            h = Reshape(w, flat)
            k = own.standard(h, s, o, m, v)
            l = Reshape(k, back)
            y = Conv(x, l) }}
        <domain: "own", opset_import: ["": 17]>
        standard (h, s, o, m, v) => (n) {{ {norm()} }}""",
        w=(4, 3, 1), flat=np.array([1, 4, 3]), back=np.array([4, 3, 1]), **statistics(4))  # fmt: skip


PLACEHOLDERS = {
    "a Conv weight": (weight_standardisation, STORED),
    "rows folded into channels": (lambda: instance_norm(2, [1, -1, 6, 6]), AMONG_CHANNELS),
    "rows folded, all lengths written": (lambda: instance_norm(2, [1, 6, 6, 6]), AMONG_CHANNELS),
    "the only row folded": (lambda: instance_norm(1, [1, 3, 6, 6]), AMONG_CHANNELS),
    "groups of rows": (ghost_batches, DIVIDED),
    "momentum of 1": (without_memory, "with momentum = 1 it keeps nothing of a batch"),
    "in a branch": (in_a_branch, STORED),
    "in a function": (in_a_function, STORED),
}


def feeds(model, rows=None):
    """Random inputs of 4 rows, or of as many as the file declares."""
    given = {}
    for value in model.graph.input:
        dims = [dim.dim_value or rows or 4 for dim in value.type.tensor_type.shape.dim]
        is_bool = value.type.tensor_type.elem_type == onnx.TensorProto.BOOL
        given[value.name] = np.array(True) if is_bool else RNG.standard_normal(dims).astype(np.float32) * 3
    return given


@pytest.mark.parametrize("how", PLACEHOLDERS)
def test_a_node_without_running_statistics_computes_the_same_in_every_mode_and_in_the_exported_file(how):
    make, why = PLACEHOLDERS[how]
    model = make()
    assert [each.placeholder for each in training_norms(model)] == [why]
    given = feeds(model)
    [want] = open_session(model, share_constants=False).run(None, given)
    stripped = onnx.ModelProto.FromString(model.SerializeToString())
    assert strip_training(stripped) == {}
    assert stripped == model, "the exported file keeps the training form"
    module = to_module(model)
    assert not {"m", "v"} & set(named_weights(module)), "what is stored is no statistic"
    for training in (True, False):
        got = module.train(training)(*map(torch.from_numpy, given.values())).detach().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_scale_and_bias_of_each_place_in_the_batch_stay_frozen():
    roles = to_module(instance_norm(2, [1, -1, 6, 6])).roles
    assert {name: roles[name].kind for name in ("w", "w2", "s", "o")} == {
        "w": "trained", "w2": "trained", "s": "frozen", "o": "frozen"}  # fmt: skip
    assert "place in the batch" in roles["s"].reason


RUNNING = {
    "plain": (f"g (float[N,3,6] x) => (float[N,3,6] y) {{ h = Conv(x, w) {norm(y='y')} }}", {"w": (3, 3, 1)}),
    "fixed batch": (f"g (float[4,3,6] x) => (float[4,3,6] y) {{ h = Conv(x, w) {norm(y='y')} }}", {"w": (3, 3, 1)}),
    "tokens joined with rows": (
        f"""g (float[N,5,2] x) => (float[M,3] y) {{ p = MatMul(x, w) h = Reshape(p, flat) {norm(y="y")} }}""",
        {"w": (2, 3), "flat": np.array([-1, 3])},
    ),
    "tokens joined with rows of a fixed batch": (
        f"""g (float[4,5,2] x) => (float[20,3] y) {{ p = MatMul(x, w) h = Reshape(p, flat) {norm(y="y")} }}""",
        {"w": (2, 3), "flat": np.array([20, 3])},
    ),
    "features flattened": (
        f"""g (float[1,3,6] x) => (float[1,18] y) {{ p = Conv(x, w) h = Reshape(p, flat) {norm(y="y")} }}""",
        {"w": (3, 3, 1), "flat": np.array([1, 18])},
    ),
    "channels last": (
        f"""g (float[N,6,6,3] x) => (float[N,3,6,6] y) {{ p = Mul(x, w) h = Transpose <perm = [0,3,1,2]> (p)
            {norm(y="y")} }}""",
        {"w": (3,)},
    ),
    "time in front of rows": (
        f"""g (float[5,N,3] x) => (float[M,3] y) {{ p = Mul(x, w) h = Reshape(p, flat) {norm(y="y")} }}""",
        {"w": (3,), "flat": np.array([-1, 3])},
    ),
    "embedded ids": (
        f"""g (int64[N,5] x) => (float[N,3,5] y) {{ e = Gather(w, x) h = Transpose <perm = [0,2,1]> (e)
            {norm(y="y")} }}""",
        {"w": (7, 3)},
    ),
    "after a fold was undone": (
        f"""g (float[2,3,6] x) => (float[2,3,6] y) {{ p = Conv(x, w) q = Reshape(p, fold) r = Reshape(q, back)
            h = Relu(r) {norm(y="y")} }}""",
        {"w": (3, 3, 1), "fold": np.array([1, 6, 6]), "back": np.array([2, 3, 6])},
    ),
    "opset 9": (
        """<ir_version: 4, opset_import: ["": 9]> g (float[N,3,6] x) => (float[N,3,6] y) { h = Conv(x, w)
            y, rm, rv, a, b = BatchNormalization (h, s, o, m, v) }""",
        {"w": (3, 3, 1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", RUNNING)
def test_statistics_of_rows_of_a_batch_are_running_ones(how):
    text, weights = RUNNING[how]
    length = 18 if how == "features flattened" else 3
    model = parsed(text, **weights, **statistics(length))
    assert [each.placeholder for each in training_norms(model)] == [""]
    assert strip_training(model) == {"BatchNormalization update": 1}
    [node] = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert len(node.output) == 1
    assert not [each for each in node.attribute if each.name == "training_mode"]


@pytest.mark.parametrize("is_test", [None, 0, 1])
def test_the_form_of_opset_6_is_read_from_is_test_and_written_there(is_test):
    given = {} if is_test is None else {"is_test": is_test}
    node = helper.make_node("BatchNormalization", ["x", "s", "o", "m", "v"], ["y"], **given)
    x = helper.make_tensor_value_info("x", 1, ["N", 3, 6])
    stored = [numpy_helper.from_array(np.float32(value), name) for name, value in statistics(3).items()]
    graph = helper.make_graph([node], "g", [x], [helper.make_tensor_value_info("y", 1, ["N", 3, 6])], stored)
    for tensor in stored:
        graph.input.append(helper.make_tensor_value_info(tensor.name, 1, [3]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 6)], ir_version=3)
    module = to_module(model)
    assert strip_training(model) == ({} if is_test else {"BatchNormalization update": 1})
    assert {each.name: each.i for each in model.graph.node[0].attribute} == {"is_test": 1}
    data = feeds(model, rows=4)["x"]
    [want] = ReferenceEvaluator(model).run(None, {"x": data, **{t.name: numpy_helper.to_array(t) for t in stored}})
    got = module.eval()(torch.from_numpy(data)).detach().numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_file_that_says_training_mode_0_keeps_its_attribute():
    model = parsed("""g (float[N,3,6] x) => (float[N,3,6] y) {
        y = BatchNormalization <training_mode = 0> (x, s, o, m, v) }""", **statistics(3))  # fmt: skip
    before = onnx.ModelProto.FromString(model.SerializeToString())
    assert strip_training(model) == {}
    assert model == before
