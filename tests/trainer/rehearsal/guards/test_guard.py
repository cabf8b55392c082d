"""The guard: what it catches of 29 faults, silent ones included, and that it raises no false alarm.

A fault of values is made by importing another file than the one that is compared; a fault of gradients by changing what
the backward pass gives, while all values stay right.
"""

import math
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser

from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.rehearsal.guards.guard import GuardError, guard
from onward.trainer.rehearsal.guards.guarded_files import guard_of_file, guarded_file
from tests.support import fixed_batches, graphs
from tests.support.production_kinds import KINDS

RNG = np.random.default_rng(0)
WIDTH = 4


def parsed(text, **weights):
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 17]>' + text)
    for name, value in weights.items():
        array = value.astype(np.float32) if value.dtype == np.float64 else value
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(model)
    return model


SQUARE, OTHER, BIAS, SCALE, TABLE = (
    RNG.standard_normal(shape) for shape in ((WIDTH, WIDTH), (WIDTH, WIDTH), WIDTH, WIDTH, (16, WIDTH))
)

BODY = """g (float[N,S,4] x) => (float[N,S,4] y, float[N,4] mean) {{
    p = MatMul(x, w)
    h = Add(p, b)
    n = LayerNormalization <axis = {axis}, epsilon = {epsilon}> (h, s, o)
    a = {activation}(n)
    q = MatMul(a, w2)
    shape = Shape(x)
    length = Gather <axis = 0> (shape, {length})
    places = Range(first, length, step)
    rows = Gather(table, places)
    e = {combine}(q, rows)
    k = {softmax}(e)
    y = Add(k, x)
    mean = {pool} (y) }}"""


def network(*, axis=-1, epsilon=1e-5, activation="Tanh", length="one_axis", combine="Add",
            softmax="Softmax <axis = -1>", pool="ReduceMean <axes = [1], keepdims = 0>", **weights):  # fmt: skip
    """A file with a square product, a bias, a norm, positions, a softmax and a mean over a dynamic length."""
    given = {"w": SQUARE, "b": BIAS, "s": SCALE, "o": BIAS[::-1].copy(), "w2": OTHER, "table": TABLE,
             "first": np.array(0), "step": np.array(1), "one_axis": np.array(1)} | weights  # fmt: skip
    text = BODY.format(axis=axis, epsilon=epsilon, activation=activation, length=length, combine=combine,
                       softmax=softmax, pool=pool)  # fmt: skip
    return parsed(text, **given)


def rows(number=3, length=5):
    drawn = np.random.default_rng(1).standard_normal((number, length, WIDTH))
    return (torch.from_numpy(drawn.astype(np.float32)),)


def baked(length=5):
    """The network whose positions are those of one length, whatever the length of its rows."""
    return network(table=np.tile(TABLE[:length].mean(0), (16, 1)))


OTHER_FILES = {
    "a transposed square weight": lambda: network(w=SQUARE.T.copy()),
    "a second weight transposed": lambda: network(w2=OTHER.T.copy()),
    "two weights swapped": lambda: network(w=OTHER, w2=SQUARE),
    "a dropped bias": lambda: network(b=np.zeros(WIDTH)),
    "a bias of the wrong sign": lambda: network(b=-BIAS),
    "an element of a weight": lambda: network(w=SQUARE + 1e-1 * np.eye(WIDTH)),
    "a norm over the wrong axes": lambda: network(axis=1, s=np.tile(SCALE, (5, 1)), o=np.tile(BIAS[::-1], (5, 1))),
    "another epsilon": lambda: network(epsilon=1e-1),
    "a softmax over the wrong axis": lambda: network(softmax="Softmax <axis = 1>"),
    "a mean over the wrong axis": lambda: network(pool="ReduceMean <axes = [2], keepdims = 0>"),
    "a mean that keeps its axis": lambda: network(pool="ReduceMean <axes = [1], keepdims = 1>"),
    "a sum of magnitudes for a mean": lambda: network(pool="ReduceL1 <axes = [1], keepdims = 0>"),
    "another activation": lambda: network(activation="Sigmoid"),
    "a product for a sum": lambda: network(combine="Mul"),
    "positions of another table": lambda: network(table=TABLE[::-1].copy()),
    "positions of one length": baked,
}


@pytest.mark.parametrize("fault", OTHER_FILES)
def test_a_module_that_computes_something_else_is_refused(fault):
    module = to_module(OTHER_FILES[fault]())
    with pytest.raises(GuardError, match="differs from the file at"):
        guard(guarded_file(network(), module, rows()))


def scaled(factor):
    return lambda gradient: gradient * factor


GRADIENTS = {
    "a dropped gradient of a bias": ("b", scaled(0.0)),
    "a dropped gradient of a scale": ("s", scaled(0.0)),
    "a doubled gradient": ("w", scaled(2.0)),
    "a gradient of the wrong sign": ("w2", scaled(-1.0)),
    "a gradient of the wrong sign in a bias": ("o", scaled(-1.0)),
    "a gradient 5 % too large": ("w", scaled(1.05)),
    "a transposed gradient": ("w", lambda gradient: gradient.t().contiguous()),
    "a gradient of the first row alone": ("w2", lambda gradient: torch.cat([gradient[:1], 0 * gradient[1:]])),
    "a gradient that is averaged": ("table", lambda gradient: gradient.mean() * torch.ones_like(gradient)),
    "a gradient that is clipped": ("w2", lambda gradient: gradient.clamp(-1e-3, 1e-3)),
}


@pytest.mark.parametrize("fault", GRADIENTS)
def test_a_wrong_gradient_behind_right_values_is_refused(fault):
    name, change = GRADIENTS[fault]
    module = to_module(network())
    named_weights(module)[name].register_hook(change)
    with pytest.raises(GuardError, match="is not the derivative of the file's loss"):
        guard(guarded_file(network(), module, rows()))


def test_a_frozen_weight_that_is_called_trained_is_refused():
    module = to_module(network())
    reads = [
        node for node in module.graph.nodes if node.op == "get_attr" and module.onnx_names.get(node.target) == "w2"
    ]
    for node in reads:
        with module.graph.inserting_after(node):
            cut = module.graph.call_method("detach", (node,))
        node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)
    module.recompile()
    with pytest.raises(GuardError, match="is not the derivative of the file's loss"):
        guard(guarded_file(network(), module, rows()))


def test_a_length_that_was_baked_in_is_refused_at_another_length():
    """Equal values at the length of the rows, and at no other."""
    text = """g (float[N,S,4] x) => (float[N,4] y) {{ p = MatMul(x, w) t = ReduceSum(p, one) u = Squeeze(t, one)
        {length} y = Div(u, n) }}"""
    counted = "shape = Shape(x) k = Gather <axis = 0> (shape, place) n = Cast <to = 1> (k)"
    given = {"w": SQUARE, "one": np.array([1])}
    file = parsed(text.format(length=counted), place=np.array(1), **given)
    module = to_module(parsed(text.format(length="n = Identity(five)"), five=np.float64(5), **given))
    with pytest.raises(GuardError, match="length 2 of x"):
        guard(guarded_file(file, module, rows()))


class Flipped(torch.autograd.Function):
    """The identity, whose gradient is that of other rows."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient.flip(0)


def flipped(x):
    return Flipped.apply(x)


def test_a_wrong_gradient_of_an_inner_node_is_refused():
    """Torch's fault in BatchNormalization was of this kind: right values, and a wrong backward pass of one kernel."""
    module = to_module(network())
    [node] = [node for node in module.graph.nodes if node.target is torch.tanh]
    with module.graph.inserting_after(node):
        wrong = module.graph.call_function(flipped, (node,))
    node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
    module.recompile()
    with pytest.raises(GuardError, match="is not the derivative"):
        guard(guarded_file(network(), module, rows()))


# -- no false alarm


@pytest.mark.parametrize("seed", range(4))
def test_a_right_module_passes_in_every_direction(seed):
    record = guard(guarded_file(network(), to_module(network()), rows()), seed=seed)
    assert record.error < 1e-5
    assert record.bound < 2e-3
    assert record.judged_by == "onnxruntime in float64"
    assert len(record.sizes) == 4
    assert not record.left_out


@pytest.mark.parametrize("name", graphs.MODELS)
def test_no_graph_of_the_tests_gives_an_alarm(name):
    model = graphs.MODELS[name]()
    inputs = tuple(map(torch.from_numpy, graphs.feed(model, 3, 0).values()))
    record = guard(guarded_file(model, to_module(model), inputs))
    assert record.difference < 1e-5
    assert record.error < record.bound / 2
    assert not record.left_out


QUICK = ("jax2onnx-cnn", "keras-gru", "keras-transformer", "onnxruntime-cnn", "onnxruntime-text", "optimum-distilbert",
         "paddle2onnx-lstm", "skl2onnx-mlp-regressor", "tf2onnx-transformer", "torch-legacy-transformer")  # fmt: skip
FOREIGN = [
    pytest.param(file, id=file.stem, marks=() if file.stem in QUICK else pytest.mark.slow)
    for file in sorted((Path(graphs.__file__).parent / "foreign").glob("*.onnx"))
    if file.stem not in ("optimum-vit", "skl2onnx-trees", "sklearn-forest")  # one size of images; without weights
]


@pytest.mark.parametrize("file", FOREIGN)
def test_no_file_of_another_exporter_gives_an_alarm(file):
    record, warnings = guard_of_file(file)
    assert record is not None, warnings
    assert record.difference < 1e-5
    assert record.error < record.bound or record.left_out
    assert warnings == ()


@pytest.mark.parametrize("name", KINDS)
def test_files_of_the_kinds_that_packages_ship_raise_no_alarm(name):
    kind = KINDS[name]
    model, module = kind.build(), to_module(kind.build())
    feeds = kind.feeds(kind.tried[1])
    record = guard(guarded_file(model, module, tuple(torch.from_numpy(feeds[each]) for each in module.input_names)))
    assert record.sizes
    assert record.error < record.bound < 0.1 or "stored as integers" in record.left_out[-1]


@pytest.mark.parametrize("name", ["vit-2", "attention-2"])
def test_rows_that_an_exporter_repeated_for_its_batch_are_one_weight(name):
    # the class token, the embeddings of positions
    model = fixed_batches.exported(name, "dynamo")
    module = to_module(model, widen=True)
    record = guard(guarded_file(model, module, (fixed_batches.rows(name, 2),), rows=(2,)))
    assert record.error < 1e-5
    assert record.bound < 2e-3
    for weight in named_weights(module).values():
        if weight.shape[0] == 2:
            weight.register_hook(lambda gradient: gradient / 2)
    with pytest.raises(GuardError, match="the gradient of a training step is not the derivative"):
        guard(guarded_file(model, module, (fixed_batches.rows(name, 2),), rows=(2,)))


def test_a_relu_that_reads_zeros_has_two_slopes_and_raises_no_alarm():
    text = "g (float[N,4] x) => (float[N,4] y) { p = MatMul(x, w) h = Add(p, b) y = Relu(h) }"
    model = parsed(text, w=SQUARE, b=np.zeros(WIDTH))
    record = guard(guarded_file(model, to_module(model), (torch.zeros(3, 4),)))
    [line] = record.left_out
    assert "shows nothing on these rows" in line


def test_a_bound_of_fp32_is_said_where_nothing_computes_in_float64(monkeypatch):
    def refuse(model):
        raise ValueError("no kernel")

    from onward.trainer.rehearsal.trials import second_path

    opened = second_path._onnxruntime
    monkeypatch.setattr(second_path, "_reference", refuse)
    wide = onnx.TensorProto.DOUBLE
    monkeypatch.setattr(
        second_path,
        "_onnxruntime",
        lambda model: refuse(model) if model.graph.input[0].type.tensor_type.elem_type == wide else opened(model),
    )
    record = guard(guarded_file(network(), to_module(network()), rows()))
    assert record.judged_by == "onnxruntime in float32"
    assert record.error < record.bound < 0.1


def test_a_pass_in_numpy_that_takes_too_long_ends_before_its_last_node(monkeypatch):
    from onnx.reference.ops.op_conv import Conv

    from onward.trainer.rehearsal.trials import second_path

    computed = []
    original = Conv._run

    def slow(self, *operands, **attributes):
        computed.append(self)
        time.sleep(2.5)
        return original(self, *operands, **attributes)

    monkeypatch.setattr(Conv, "_run", slow)
    monkeypatch.setattr(second_path, "SLOWEST_S", 2.0)
    text = "g (float[N,4,3,3] x) => (float[N,4,3,3] y) { h = Conv(x, w) t = Tanh(h) y = Conv(t, w) }"
    model = parsed(text, w=SQUARE.reshape(4, 4, 1, 1))
    record = guard(guarded_file(model, to_module(model), (torch.randn(3, 4, 3, 3),)))
    assert len(computed) == 1
    assert record.judged_by == "onnxruntime in float32"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("g (float[N,4] x) => (float[N,4] y) { p = MatMul(x, w) r = RandomNormalLike(p) y = Add(p, r) }",
         "draw random"),
        ("g (float[N,4] x) => (float[N,4] y) { p = MatMul(x, w) q = QuantizeLinear(p, k) y = DequantizeLinear(q, k) }",
         "rounds to integers"),
    ],
)  # fmt: skip
def test_where_there_is_no_derivative_one_line_says_so(text, said):
    model = parsed(text, w=SQUARE, **({"k": np.float64(0.05)} if "(p, k)" in text else {}))
    guarded = guarded_file(model, to_module(model), (torch.randn(3, 4),), tolerance=100.0)
    record = guard(guarded)
    assert math.isnan(record.error)
    *values, line = record.left_out
    assert "no derivative of the loss was compared" in line
    assert said in line
    # what is drawn differs in both, at any size
    assert [said in each and "values at other sizes" in each for each in values] == [True] * ("Random" in text)


def test_doctor_compares_made_up_rows_and_says_what_is_wrong(tmp_path, monkeypatch):
    onnx.save(network(), tmp_path / "model.onnx")
    record, warnings = guard_of_file(tmp_path / "model.onnx")
    assert record is not None
    assert record.error < record.bound
    assert warnings == ()
    from onward.trainer.rehearsal.guards import guarded_files

    right = guarded_files.open_trainable

    def wrong(config):
        found = right(config)
        named_weights(found.module)["w"].register_hook(scaled(3.0))
        return found

    monkeypatch.setattr(guarded_files, "open_trainable", wrong)
    record, [warning] = guard_of_file(tmp_path / "model.onnx")
    assert record is None
    assert warning.key == "guard"
    assert "is not the derivative" in warning.what
