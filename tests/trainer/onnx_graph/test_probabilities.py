"""A softmax or a sigmoid is recognised in every form that exporters write, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor

from onward.trainer.onnx_graph.files.index import Index
from onward.trainer.onnx_graph.outputs import score_tensors
from onward.trainer.onnx_graph.probabilities import Kind, activation_of

WIDTH, CLASSES = 6, 3
TRUTH: dict[Kind, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z.softmax(-1),
    "log_softmax": lambda z: z.log_softmax(-1),
    "log_of_softmax": lambda z: z.log_softmax(-1),
    "sigmoid": torch.sigmoid,
}

SUM = "s = ReduceSum<keepdims=1>(e, axes)"
SHIFTED = "m = ReduceMax<axes=[-1], keepdims=1>(z)  d = Sub(z, m)  e = Exp(d)"
SOFTMAX = {
    "an operator": "y = Softmax<axis=-1>(z)",
    "an operator with its default axis": "y = Softmax(z)",
    "behind Identity and Cast": "p = Softmax(z)  q = Identity(p)  h = Cast<to=10>(q)  y = Cast<to=1>(h)",
    "with its maximum subtracted": f"{SHIFTED}  {SUM}  y = Div(e, s)",
    "without": f"e = Exp(z)  {SUM}  y = Div(e, s)",
    "with the maximum behind Identity": (
        "m = ReduceMax<axes=[1]>(z)  n = Identity(m)  d = Sub(z, n)  e = Exp(d)  "
        "s = ReduceSum(e, one_axis)  y = Div(e, s)"
    ),
    "with a sum that loses its axis": (
        f"{SHIFTED}  t = ReduceSum<keepdims=0>(e, axes)  s = Unsqueeze(t, axes)  y = Div(e, s)"
    ),
    "with a maximum that loses its axis": (
        "t = ReduceMax<axes=[-1], keepdims=0>(z)  m = Unsqueeze(t, axes)  d = Sub(z, m)  e = Exp(d)  "
        f"{SUM}  y = Div(e, s)"
    ),
    "as a product with Reciprocal": f"{SHIFTED}  {SUM}  r = Reciprocal(s)  y = Mul(e, r)",
    "as a product in the other order": f"e = Exp(z)  {SUM}  r = Reciprocal(s)  y = Mul(r, e)",
    "as a product with 1 / sum": f"e = Exp(z)  {SUM}  r = Div(num1, s)  y = Mul(e, r)",
    "as a product with a power of -1": f"e = Exp(z)  {SUM}  r = Pow(s, num_minus1)  y = Mul(e, r)",
    "with the sum of absolute values": f"{SHIFTED}  s = ReduceL1<axes=[-1]>(e)  y = Div(e, s)",
    "as Exp of LogSoftmax": "l = LogSoftmax(z)  y = Exp(l)",
    "as Exp of what ReduceLogSumExp leaves": "s = ReduceLogSumExp<axes=[-1]>(z)  l = Sub(z, s)  y = Exp(l)",
}
LOG_SOFTMAX = {
    "an operator": "y = LogSoftmax(z)",
    "with its maximum subtracted": f"{SHIFTED}  {SUM}  l = Log(s)  y = Sub(d, l)",
    "without": f"e = Exp(z)  {SUM}  l = Log(s)  y = Sub(z, l)",
    "with the maximum added to the logarithm": f"{SHIFTED}  {SUM}  l = Log(s)  a = Add(m, l)  y = Sub(z, a)",
    "with the logarithm added to the maximum": f"{SHIFTED}  {SUM}  l = Log(s)  a = Add(l, m)  y = Sub(z, a)",
    "with ReduceLogSumExp": "s = ReduceLogSumExp<axes=[-1]>(z)  y = Sub(z, s)",
    "with a logarithm that gets the axis back": (
        f"{SHIFTED}  t = ReduceSum<keepdims=0>(e, axes)  l = Log(t)  u = Unsqueeze(l, axes)  y = Sub(d, u)"
    ),
}
LOG_OF_SOFTMAX = {
    "of an operator": "p = Softmax(z)  y = Log(p)",
    "of one that is written out": f"{SHIFTED}  {SUM}  p = Div(e, s)  y = Log(p)",
}
SIGMOID = {
    "an operator": "y = Sigmoid(z)",
    "as 1 / (1 + Exp(-x))": "n = Neg(z)  e = Exp(n)  a = Add(num1, e)  y = Div(num1, a)",
    "as Reciprocal": "n = Neg(z)  e = Exp(n)  a = Add(e, num1)  y = Reciprocal(a)",
    "as a power of -1": "n = Neg(z)  e = Exp(n)  a = Add(e, num1)  y = Pow(a, num_minus1)",
    "with a product with -1": "n = Mul(z, num_minus1)  e = Exp(n)  a = Add(e, num1)  y = Reciprocal(a)",
    "with a quotient by -1": "n = Div(z, num_minus1)  e = Exp(n)  a = Add(e, num1)  y = Reciprocal(a)",
    "with a difference from 0": "n = Sub(num0, z)  e = Exp(n)  a = Add(e, num1)  y = Reciprocal(a)",
    "with 1 as a Constant": "c = Constant<value_float=1.0>()  n = Neg(z)  e = Exp(n)  a = Add(e, c)  y = Div(c, a)",
    "as Exp(x) / (1 + Exp(x))": "e = Exp(z)  a = Add(num1, e)  y = Div(e, a)",
    "as a half of 1 + tanh": "h = Mul(z, num_half)  t = Tanh(h)  a = Add(t, num1)  y = Mul(num_half, a)",
    "as 1 + tanh by 2": "h = Div(z, num2)  t = Tanh(h)  a = Add(num1, t)  y = Div(a, num2)",
    "as a half and a half of tanh": "h = Mul(num_half, z)  t = Tanh(h)  u = Mul(t, num_half)  y = Add(u, num_half)",
}
FORMS: dict[Kind, dict[str, str]] = {
    "softmax": SOFTMAX, "log_softmax": LOG_SOFTMAX, "log_of_softmax": LOG_OF_SOFTMAX, "sigmoid": SIGMOID,
}  # fmt: skip
OTHERS = {
    "a quotient by the sum of something else": (
        "o = Mul(z, num2)  e = Exp(z)  f = Exp(o)  s = ReduceSum(f, axes)  y = Div(e, s)"
    ),
    "a sum over all axes": "e = Exp(z)  s = ReduceSum(e)  y = Div(e, s)",
    "a softmax over two axes": "e = Exp(z)  s = ReduceSum(e, both_axes)  y = Div(e, s)",
    "numbers divided by their sum": "a = Abs(z)  s = ReduceSum(a, axes)  y = Div(a, s)",
    "a sum that has no axis": "e = Exp(z)  s = ReduceSum<keepdims=0>(e, axes)  y = Div(e, s)",
    "1 / (2 + Exp(-x))": "n = Neg(z)  e = Exp(n)  a = Add(num2, e)  y = Div(num1, a)",
    "2 / (1 + Exp(-x))": "n = Neg(z)  e = Exp(n)  a = Add(num1, e)  y = Div(num2, a)",
    "a factor that is not the same for all": "h = Mul(z, halves)  t = Tanh(h)  a = Add(t, num1)  y = Mul(num_half, a)",
    "tanh of x itself, a sigmoid of 2x": "t = Tanh(z)  a = Add(t, num1)  y = Mul(num_half, a)",
    "a sum of other scores in the logarithm": (
        "m = ReduceMax<axes=[-1]>(z)  d = Sub(z, m)  e = Exp(d)  s = ReduceSum(e, axes)  l = Log(s)  "
        "k = ReduceMax<axes=[0]>(z)  a = Add(k, l)  y = Sub(z, a)"
    ),
}
STORED = {
    "w": np.random.default_rng(0).normal(size=(WIDTH, CLASSES)).astype(np.float32),
    "axes": np.array([-1]),
    "one_axis": np.array([1]),
    "both_axes": np.array([0, 1]),
    "num0": np.float32(0),
    "num1": np.ones(1, np.float32),
    "num2": np.float32(2),
    "num_half": np.full((1, 1), 0.5, np.float32),
    "num_minus1": np.float32(-1),
    "halves": np.array([0.5, 0.5, 0.25], np.float32),
}


def model_of(nodes: str, *, opset: int = 17) -> onnx.ModelProto:
    """A product `z` [N, 3] of `x` [N, 6], and the nodes that compute the output `y` from it."""
    body = "\n".join(nodes.split("  "))
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : {opset}]>
        g (float[N, {WIDTH}] x) => (float[N, {CLASSES}] y) {{
            z = MatMul(x, w)
            {body}
        }}""")
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in STORED.items())
    return model


def under_onnxruntime(model: onnx.ModelProto, *names: str) -> list[Tensor]:
    """Return named tensors of the model for as many rows as classes, so that a wrong axis broadcasts, too."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {value.name for value in copy.graph.output}
    copy.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in {*names} - known
    )
    session = onnxruntime.InferenceSession(copy.SerializeToString(), providers=["CPUExecutionProvider"])
    rows = 2 * np.random.default_rng(1).normal(size=(CLASSES, WIDTH)).astype(np.float32)
    return [torch.from_numpy(values) for values in session.run(list(names), {"x": rows})]


CASES = {f"{kind} {name}": (kind, form) for kind, forms in FORMS.items() for name, form in forms.items()}


@pytest.mark.parametrize(("kind", "form"), CASES.values(), ids=CASES)
def test_every_form_is_recognised_with_the_scores_of_which_it_is_the_activation(kind: Kind, form: str) -> None:
    model = model_of(form)
    found = activation_of(Index(model.graph), "y")
    assert found is not None
    assert (found.kind, found.scores) == (kind, "z")
    assert kind == "sigmoid" or found.axis in (None, -1, 1)
    scores, result = under_onnxruntime(model, "z", "y")
    is_half = "Cast<to=10>" in form
    torch.testing.assert_close(result, TRUTH[kind](scores), rtol=1e-3 if is_half else 1e-5, atol=1e-6)


@pytest.mark.parametrize("form", OTHERS.values(), ids=OTHERS)
def test_what_is_no_softmax_and_no_sigmoid_of_a_tensor_is_not_taken_for_one(form: str) -> None:
    model = model_of(form)
    assert activation_of(Index(model.graph), "y") is None
    scores, result = under_onnxruntime(model, "z", "y")
    assert not any(torch.allclose(result, truth(scores), atol=1e-3) for truth in TRUTH.values())


def test_a_circle_of_nodes_ends() -> None:
    model = model_of("y = Identity(z)")
    model.graph.node[0].CopyFrom(onnx.helper.make_node("Identity", ["y"], ["z"]))
    assert activation_of(Index(model.graph), "y") is None


@pytest.mark.parametrize(
    ("behind", "tensor"),
    [
        ("q = Transpose<perm=[1, 0]>(p)  y = Transpose<perm=[1, 0]>(q)", "z"),
        ("q = Unsqueeze(p, axes)  y = Squeeze(q, axes)", "z"),
        ("shape = Shape(p)  y = Reshape(p, shape)", "z"),
    ],
)
@pytest.mark.parametrize("form", ["with its maximum subtracted", "as a product with Reciprocal"])
def test_the_scores_are_named_through_nodes_that_keep_the_axis_of_the_classes(
    behind: str, tensor: str, form: str
) -> None:
    model = model_of(SOFTMAX[form].replace("y = ", "p = ") + "  " + behind)
    what = "the logits before the nodes of a Softmax that is written out, for the loss cross_entropy"
    assert list(score_tensors(model.graph, ["y"])) == [(tensor, what)]


def test_a_logarithm_of_a_softmax_that_is_written_out_can_be_read_as_it_is() -> None:
    model = model_of(LOG_SOFTMAX["with ReduceLogSumExp"])
    ((tensor, what),) = score_tensors(model.graph)
    assert (tensor, what) == (
        "y",
        "the result of the nodes of a LogSoftmax that is written out, for the loss cross_entropy",
    )
