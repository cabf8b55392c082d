"""BatchNormalization by stored statistics, by computed ones, and by stored ones behind arithmetic."""

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

from onward.trainer.diagnostics.audit_input import AuditInput
from onward.trainer.diagnostics.exporter_warnings import exporter_warnings
from onward.trainer.onnx_graph.initializers import stored_tensors
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.roles.roles import find_roles
from onward.trainer.onnx_import.train_selection import select_trained
from tests.support.trained_models import model_with_weights

FEATURES = 6


def keras_layer_norm(*, training_mode=0):
    """LayerNormalization as tf2onnx writes it: samples are turned into channels, whose statistics are computed."""
    g = GraphWriter("keras", seed=1, opset=15)
    x = g.op("MatMul", g.input("x", ("batch", FEATURES)), g.weight("w", g.normal(0.5, FEATURES, FEATURES)))
    h = g.op("Transpose", x, perm=[1, 0])  # [features, batch]: one channel for each sample
    mean = g.op("ReduceMean", h, axes=[0], keepdims=0)
    squares = g.op("Mul", g.op("Sub", h, mean), g.op("Sub", h, mean))
    variance = g.op("ReduceMean", squares, axes=[0], keepdims=0)
    size = g.op("Shape", mean)
    ones, zeros = (g.op("ConstantOfShape", size, value=numpy_helper.from_array(np.float32([n]))) for n in (1, 0))
    outputs = ["y", "new_mean", "new_variance"][: 3 if training_mode else 1]
    g.op("BatchNormalization", h, ones, zeros, mean, variance, outputs=outputs,
         **({"training_mode": 1} if training_mode else {}))  # fmt: skip
    y = g.op("Transpose", "y", perm=[1, 0])
    gamma, beta = g.weight("gamma", g.normal(1.0, FEATURES)), g.weight("beta", g.normal(1.0, FEATURES))
    g.op("Add", g.op("Mul", y, gamma), beta, outputs="result")
    g.output("result", ("batch", FEATURES))
    return g.model()


def by_onnxruntime(model, *inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, dict(zip([value.name for value in session.get_inputs()], inputs, strict=True)))[0]


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("training", [False, True])
def test_computed_statistics_are_used_as_they_are_in_training_and_in_evaluation(batch, training):
    model = keras_layer_norm()
    module = to_module(model).train(training)
    assert set(named_weights(module)) == {"w", "gamma", "beta"}
    x = np.random.default_rng(0).standard_normal((batch, FEATURES)).astype(np.float32)
    got = module(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(got, by_onnxruntime(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training_mode", [0, 1])
@pytest.mark.parametrize("training", [False, True])
def test_gradients_pass_through_computed_statistics(training, training_mode):
    module = to_module(keras_layer_norm(training_mode=training_mode)).double().train(training)
    x = torch.randn(3, FEATURES, dtype=torch.float64, requires_grad=True)
    weights = tuple(module.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: module(x), (x, *weights))
    want = torch.nn.functional.layer_norm(x @ module.w, [FEATURES], module.gamma, module.beta)
    torch.testing.assert_close(module(x), want)


def test_a_node_in_training_mode_normalises_by_the_batch_only_in_training():
    """Given statistics that are neither stored nor those of the batch: inputs of the graph."""
    g = GraphWriter("given", opset=15)
    names = [g.input(name, (3,)) for name in ("scale", "bias", "mean", "variance")]
    g.op("BatchNormalization", g.input("x", ("n", 3, 4)), *names, training_mode=1, outputs=["y", "m", "v"])
    for name, shape in (("y", ("n", 3, 4)), ("m", (3,)), ("v", (3,))):
        g.output(name, shape)
    module = to_module(g.model())
    scale, bias, mean, variance = torch.rand(3), torch.rand(3), torch.rand(3), torch.rand(3) + 0.5
    before = copy.deepcopy((mean, variance))
    x = torch.randn(5, 3, 4)
    y, new_mean, new_variance = module.train()(scale, bias, mean, variance, x)
    torch.testing.assert_close(y, torch.nn.functional.batch_norm(x, None, None, scale, bias, True))
    batch_variance, batch_mean = torch.var_mean(x, (0, 2), correction=0)
    torch.testing.assert_close(new_mean, 0.9 * mean + 0.1 * batch_mean)
    torch.testing.assert_close(new_variance, 0.9 * variance + 0.1 * batch_variance)
    y, *_ = module.eval()(scale, bias, mean, variance, x)
    torch.testing.assert_close(y, torch.nn.functional.batch_norm(x, mean, variance, scale, bias))
    torch.testing.assert_close((mean, variance), before)  # operands of the caller are not changed


def with_statistics(how):
    """A convolution and a BatchNormalization whose stored statistics pass through `how` on their way."""
    g = GraphWriter("behind", seed=2, opset=15)
    x = g.op("Conv", g.input("x", ("n", 2, 5)), g.weight("w", g.normal(0.5, 3, 2, 1)))
    scale, bias = g.weight("scale", g.normal(1.0, 3)), g.weight("bias", g.normal(1.0, 3))
    mean, variance = g.weight("mean", g.normal(1.0, 3)), g.weight("variance", np.float32([0.5, 1.0, 2.0]))
    mean, variance = how(g, mean, variance)
    g.op("BatchNormalization", x, scale, bias, mean, variance, outputs="y")
    g.output("y", ("n", 3, 5))
    return g.model()


UNCHANGED = {
    "directly": lambda g, m, v: (m, v),
    "identity": lambda g, m, v: (g.op("Identity", m), g.op("Identity", v)),
    "cast": lambda g, m, v: (g.op("Cast", m, to=TensorProto.FLOAT), v),
}
ARITHMETIC = {
    "epsilon apart": lambda g, m, v: (m, g.op("Add", v, g.weight("epsilon", 1e-3))),
    "a factor": lambda g, m, v: (g.op("Mul", m, g.weight("factor", 2.0)), v),
    "wider": lambda g, m, v: tuple(
        g.op("Cast", g.op("Cast", each, to=TensorProto.DOUBLE), to=TensorProto.FLOAT) for each in (m, v)
    ),
    "negated": lambda g, m, v: (g.op("Neg", m), v),
}


def keys(model):
    stored = stored_tensors(model.graph, None)
    found = AuditInput(model, stored=stored, roles=find_roles(model.graph, stored))
    return [warning.key for warning in exporter_warnings(found)]


@pytest.mark.parametrize("how", UNCHANGED)
def test_statistics_that_reach_the_node_unchanged_are_updated(how):
    model = with_statistics(UNCHANGED[how])
    module = to_module(model).train()
    before = {name: module.get_buffer(name).clone() for name in ("mean", "variance")}
    module(torch.randn(4, 2, 5))
    assert all(not torch.equal(module.get_buffer(name), value) for name, value in before.items())
    assert "frozen_statistics" not in keys(model)


@pytest.mark.parametrize("how", ARITHMETIC)
def test_statistics_behind_arithmetic_are_never_updated_and_named_by_doctor(how):
    model = with_statistics(ARITHMETIC[how])
    module = to_module(model)
    assert set(named_weights(module)) == {"w", "scale", "bias"}
    assert {module.roles[name].kind for name in ("mean", "variance")} == {"frozen"}
    x = np.random.default_rng(0).standard_normal((4, 2, 5)).astype(np.float32)
    want = by_onnxruntime(model, x)
    for mode in (True, False, True):  # a module that has been trained computes what the file computes
        got = module.train(mode)(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert "frozen_statistics" in keys(model)


def test_statistics_inside_a_branch_follow_the_batches_that_take_it():
    """Tensors stored inside an inner graph are trained like others, and so is what the branch normalises by."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    g (float[N,2] x, bool b) => (float[N,2] y) <float[2,2] w = {1,3,2,7}> {
      h = MatMul(x, w)
      y = If(b)<
        then_branch = t () => (float[N,2] p) <float[2] s = {1,2}, float[2] o = {1,0}, float[2] m = {0,1},
          float[2] v = {1,2}> { p = BatchNormalization(h, s, o, m, v) },
        else_branch = e () => (float[N,2] q) { q = Neg(h) }>
    }""")
    module = to_module(model)
    x, yes = torch.randn(5, 2), torch.tensor(True)
    h = x @ torch.tensor([[1.0, 3.0], [2.0, 7.0]])
    expected = torch.nn.functional.batch_norm(h, None, None, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]), True)
    torch.testing.assert_close(module.train()(x, yes), expected, atol=1e-5, rtol=1e-5)
    moved = 0.9 * torch.tensor([0.0, 1.0]) + 0.1 * h.mean(0)
    torch.testing.assert_close(named_weights(module)["y/m"], moved)
    module(x, torch.tensor(False))
    torch.testing.assert_close(named_weights(module)["y/m"], moved)
    written = model_with_weights(module, model)
    [then] = [attribute.g for attribute in written.graph.node[1].attribute if attribute.name == "then_branch"]
    kept = {tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in then.initializer}
    torch.testing.assert_close(kept["m"], moved)
    assert kept["s"].tolist() == [1, 2]
    select_trained(module, freeze=["y/s", "y/o"])
    torch.testing.assert_close(module.train()(x, yes), module.eval()(x, yes))
    torch.testing.assert_close(named_weights(module)["y/m"], moved)


def for_every_position(opset=7):
    """BatchNormalization with spatial = 0: scale, bias and statistics have the shape of a row."""
    shape, rng = (3, 2, 4), np.random.default_rng(0)
    stored = {name: rng.standard_normal(shape).astype(np.float32) for name in ("scale", "bias", "mean", "variance")}
    stored["variance"] = np.abs(stored["variance"]) + np.float32(0.1)
    node = helper.make_node("BatchNormalization", ["x", *stored], ["y"], spatial=0, epsilon=1e-3)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape]) for name in "xy"]
    tensors = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph([node], "positions", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)


@pytest.mark.parametrize("opset", [7, 8])
def test_spatial_0_normalises_every_position_by_its_own_statistics(opset):
    model = for_every_position(opset)
    module = to_module(model)
    x = np.random.default_rng(1).standard_normal((5, 3, 2, 4)).astype(np.float32)
    np.testing.assert_allclose(
        module.eval()(torch.from_numpy(x)).detach(), by_onnxruntime(model, x), rtol=1e-5, atol=1e-6
    )
    # in training those of the batch, which move the stored ones; as torch's BatchNorm1d over all positions
    weights = {name: tensor.detach().clone() for name, tensor in named_weights(module).items()}
    norm = torch.nn.BatchNorm1d(24, eps=1e-3)
    with torch.no_grad():
        for own, name in zip(
            (norm.weight, norm.bias, norm.running_mean, norm.running_var), ("scale", "bias", "mean", "variance"),
            strict=True,
        ):  # fmt: skip
            own.copy_(weights[name].reshape(-1))
    given, wanted = (torch.from_numpy(x).requires_grad_() for _ in range(2))
    y, want = module.train()(given), norm(wanted.flatten(1)).reshape(5, 3, 2, 4)
    torch.testing.assert_close(y, want)
    for each in (y, want):
        each.square().sum().backward()
    torch.testing.assert_close(given.grad, wanted.grad, rtol=1e-4, atol=1e-5)
    after = named_weights(module)
    torch.testing.assert_close(after["scale"].grad.reshape(-1), norm.weight.grad)
    torch.testing.assert_close(after["mean"].reshape(-1), norm.running_mean)
    torch.testing.assert_close(after["variance"].reshape(-1), norm.running_var)
    assert not torch.equal(after["variance"], weights["variance"])
