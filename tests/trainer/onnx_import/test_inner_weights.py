"""Weights stored inside If, Loop and Scan and in local functions: trained, and written back in their own place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

from onward.tasks.export import export_file
from onward.trainer.config.loading import build_config
from onward.trainer.diagnostics.diff import compare
from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.errors import UnsupportedModel
from onward.trainer.export.file_verification import weight_problems
from onward.trainer.export.model_file import ModelFile
from onward.trainer.export.training.files import write_artifacts
from onward.trainer.onnx_graph.files.index import all_tensors
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.onnx_import.write_back import write_model
from tests.support import runs
from tests.support.trained_models import model_with_weights

RANDOM = np.random.default_rng(0)


def tensor(name: str, *shape: int) -> TensorProto:
    return numpy_helper.from_array((RANDOM.standard_normal(shape) * 0.5).astype(np.float32), name)


def constant(name: str, *shape: int) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=tensor(name, *shape))


def with_stored(model: onnx.ModelProto, *stored: TensorProto) -> onnx.ModelProto:
    model.graph.initializer.extend(stored)
    onnx.checker.check_model(model, full_check=True)
    return model


def bodies(model: onnx.ModelProto) -> dict[str, onnx.GraphProto]:
    """Return the inner graphs by name."""
    found: dict[str, onnx.GraphProto] = {}

    def collect(nodes: Iterator[onnx.NodeProto]) -> None:
        for attribute in (attribute for node in nodes for attribute in node.attribute if attribute.HasField("g")):
            found[attribute.g.name] = attribute.g
            collect(attribute.g.node)

    collect(model.graph.node)
    for function in model.functions:
        collect(function.node)
    return found


HEADER = '<ir_version: 9, opset_import: ["": 17, "my": 1]> '


def if_with_two_networks() -> onnx.ModelProto:
    """The condition is data; both branches have the same inner names."""
    branch = "{ h = MatMul(x, W) r = Tanh(h) %s = MatMul(r, V) }"
    model = parser.parse_model(
        HEADER
        + "g (float[n, 4] x) => (float[n, 3] y) { m = ReduceMean<keepdims = 0>(x) k = Constant<value_float = 0.0>() "
        f"c = Greater(m, k) y = If (c) <then_branch = t () => (float[n, 3] p) {branch % 'p'}, "
        f"else_branch = e () => (float[n, 3] q) {branch % 'q'}> }}"
    )
    for body in bodies(model).values():
        body.initializer.extend([tensor("W", 4, 5), tensor("V", 5, 3)])
    onnx.checker.check_model(model)
    return model


def nested_if() -> onnx.ModelProto:
    model = parser.parse_model(
        HEADER
        + "g (float[n, 4] x) => (float[n, 3] y) { m = ReduceMean<keepdims = 0>(x) k = Constant<value_float = 0.0>() "
        "c = Greater(m, k) d = Less(m, k) h = MatMul(x, W) y = If (c) <then_branch = t () => (float[n, 3] p) "
        "{ p = If (d) <then_branch = tt () => (float[n, 3] a) { a = MatMul(h, A) },"
        " else_branch = te () => (float[n, 3] b) { bh = Mul(h, s) b = MatMul(bh, B) }> }, "
        "else_branch = e () => (float[n, 3] q) { q = MatMul(h, B) }> }"
    )
    inner = bodies(model)
    inner["tt"].node.insert(0, constant("A", 5, 3))
    inner["te"].initializer.append(tensor("s", 5))
    inner["te"].node.insert(0, constant("B", 5, 3))
    inner["e"].initializer.append(tensor("B", 5, 3))
    return with_stored(model, tensor("W", 4, 5))


def loop() -> onnx.ModelProto:
    model = parser.parse_model(
        HEADER
        + "g (float[n, 4] x) => (float[n, 4] y) { k = Constant<value_int = 3>() t = Constant<value = bool {1}>() "
        "y = Loop (k, t, x) <body = b (int64 i, bool g, float[n, 4] s) => (bool h, float[n, 4] r) "
        "{ h = Identity(g) m = Mul(s, held) a = MatMul(m, W) r = Tanh(a) }> }"
    )
    [body] = bodies(model).values()
    body.node.insert(0, constant("held", 4))
    body.initializer.append(tensor("W", 4, 4))
    onnx.checker.check_model(model, full_check=True)
    return model


def scan() -> onnx.ModelProto:
    """A recurrent network over a dynamic number of steps."""
    model = parser.parse_model(
        HEADER + "g (float[n, t, 4] x) => (float[n, t, 3] y) { l = Shape<start = 0, end = 1>(x) "
        "d = Constant<value_ints = [3]>() s = Concat<axis = 0>(l, d) h0 = ConstantOfShape(s) "
        "hN, y = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1], "
        "body = b (float[n, 3] h, float[n, 4] xt) => (float[n, 3] h1, float[n, 3] yt) "
        "{ b0 = MatMul(xt, A) b1 = Tanh(b0) b2 = Mul(h, decay) h1 = Add(b1, b2) yt = Identity(h1) }>(h0, x) }"
    )
    [body] = bodies(model).values()
    body.initializer.extend([tensor("A", 4, 3), tensor("decay", 3)])
    onnx.checker.check_model(model, full_check=True)
    return model


def functions() -> onnx.ModelProto:
    """A function that is called twice, by the graph and by another function, and one with an If inside."""
    opset = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    dense = helper.make_function(
        "my", "Dense", ["x", "b"], ["y"],
        [constant("W", 4, 4), helper.make_node("MatMul", ["x", "W"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])],
        opset,
    )  # fmt: skip
    block = helper.make_function(
        "my", "Block", ["x"], ["y"],
        [
            constant("s", 4),
            helper.make_node("Mul", ["x", "s"], ["h"]),
            helper.make_node("Dense", ["h"], ["d"], domain="my"),
            helper.make_node("Add", ["d", "x"], ["y"]),
        ],
        opset,
    )  # fmt: skip
    branches = [
        helper.make_graph(
            [helper.make_node(op, ["x", "P"], [op])], op, [], [helper.make_tensor_value_info(op, 1, None)]
        )
        for op in ("Add", "Sub")
    ]
    for body in branches:
        body.initializer.append(tensor("P", 4))
    chosen = helper.make_function(
        "my", "Chosen", ["x", "c"], ["y"],
        [helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])],
        opset,
    )  # fmt: skip
    model = parser.parse_model(
        HEADER
        + "g (float[n, 4] x) => (float[n, 3] y) { m = ReduceMean<keepdims = 0>(x) k = Constant<value_float = 0.0>() "
        "c = Greater(m, k) a = my.Dense(x) b = my.Block(a) d = my.Chosen(b, c) y = MatMul(d, out) }"
    )
    model.functions.extend([dense, block, chosen])
    model.graph.initializer.append(tensor("out", 4, 3))
    onnx.checker.check_model(model)
    return model


MODELS = {each.__name__: each for each in (if_with_two_networks, nested_if, loop, scan, functions)}
WEIGHTS = {
    "if_with_two_networks": {"y/then_branch/W", "y/then_branch/V", "y/else_branch/W", "y/else_branch/V"},
    "nested_if": {"W", "y/p/A", "y/p/s", "y/p/B", "y/B"},
    "loop": {"y/held", "y/W"},
    "scan": {"hN/A", "hN/decay"},
    "functions": {"out", "Dense/W", "Block/s", "Chosen/y/then_branch/P", "Chosen/y/else_branch/P"},
}


def feed(name: str, sign: float = 1.0, rows: int = 6) -> np.ndarray:
    shape = (rows, 5, 4) if name == "scan" else (rows, 4)
    return (np.random.default_rng(7).standard_normal(shape) + sign).astype(np.float32)


def by_onnxruntime(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    # otherwise products of dequantized integers become products of integers
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(["y"], {"x": x})[0]


def bare(model: onnx.ModelProto) -> bytes:
    """Return the model without the values of its float tensors."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for each in all_tensors(copy):
        if each.data_type == TensorProto.FLOAT:
            each.ClearField("raw_data")
    return copy.SerializeToString(deterministic=True)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", MODELS)
def test_inner_weights_have_the_gradients_of_the_file_under_onnxruntime(name, sign):
    model, x = MODELS[name](), feed(name, sign)
    module = to_module(model)
    assert {each for each, p in named_weights(module).items() if p.requires_grad} == WEIGHTS[name]
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()
    y = module(torch.from_numpy(x))
    y = y[0] if isinstance(y, tuple) else y
    np.testing.assert_allclose(y.detach(), by_onnxruntime(model, x), atol=1e-5)
    y.square().sum().backward()
    weights = {each: p for each, p in named_weights(module).items() if p.grad is not None and bool(p.grad.any())}
    assert len(weights) >= 2
    # the slope along the gradient of each weight, by files that onnxruntime runs
    for each, p in weights.items():
        gradient = p.grad.clone()
        step, losses = 0.01 * gradient / gradient.norm(), []
        for side in (1, -1):
            with torch.no_grad():
                p += side * step
            losses.append(float(np.square(by_onnxruntime(model_with_weights(module, model), x).astype(float)).sum()))
            with torch.no_grad():
                p -= side * step
        assert (losses[0] - losses[1]) / 0.02 == pytest.approx(float(gradient.norm()), rel=2e-2), each


def learn(module: torch.nn.Module, name: str, count: int = 20) -> torch.nn.Module:
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.02)
    for number in range(count):
        optimizer.zero_grad()
        y = module.train()(torch.from_numpy(feed(name, 1.0 if number % 2 else -1.0)))
        (y - 1.0).square().mean().backward()
        optimizer.step()
    return module.eval()


@pytest.mark.parametrize("name", MODELS)
def test_trained_values_are_written_in_their_own_place_and_nothing_else_changes(name, tmp_path):
    model = MODELS[name]()
    module = learn(to_module(model), name)
    written = model_with_weights(module, model)
    for sign in (1.0, -1.0):
        x = feed(name, sign)
        np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), by_onnxruntime(written, x), atol=1e-5)
    assert bare(written) == bare(model)
    changed = [a.name for a, b in zip(all_tensors(model), all_tensors(written), strict=True) if a != b]
    # one of the networks of nested_if never runs
    trained = WEIGHTS[name] - {"y/p/A"}
    assert len(changed) == len(trained)
    for each, kept in (("before", model), ("after", written)):
        onnx.save(kept, tmp_path / f"{each}.onnx")
    found = compare(tmp_path / "before.onnx", tmp_path / "after.onnx")
    assert {change.name for change in found.tensors} == trained
    assert (found.nodes, found.model) == ((), ())
    weights = {each: p.detach() for each, p in named_weights(module).items()}
    assert weight_problems(ModelFile.read(tmp_path / "after.onnx"), weights) == []
    assert len(weight_problems(ModelFile.read(tmp_path / "before.onnx"), weights)) == len(trained)


def test_a_function_that_is_called_twice_has_one_weight_with_the_sum_of_the_gradients():
    model, x = functions(), torch.from_numpy(feed("functions"))
    module = to_module(model)
    module(x).sum().backward()
    w, s, p, out = (
        torch.from_numpy(numpy_helper.to_array(t).astype(np.float64)).requires_grad_()
        for t in (
            model.functions[0].node[0].attribute[0].t,
            model.functions[1].node[0].attribute[0].t,
            bodies(model)["Add"].initializer[0],
            model.graph.initializer[0],
        )
    )
    a = torch.tanh(x.double() @ w)
    ((torch.tanh((a * s) @ w) + a + p) @ out).sum().backward()
    torch.testing.assert_close(named_weights(module)["Dense/W"].grad.double(), w.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        named_weights(module)["Chosen/y/then_branch/P"].grad.double(), p.grad, rtol=1e-5, atol=1e-5
    )


def speech_network(prefix: str, kernel: int) -> onnx.GraphProto:
    """One network of a voice-activity model: convolution, LSTM with a given state, convolution."""
    n = helper.make_node
    one = numpy_helper.from_array(np.int64([1]), "one")
    nodes = [
        constant(f"{prefix}conv.weight", 6, 1, kernel), constant(f"{prefix}conv.bias", 6),
        constant(f"{prefix}ih", 1, 16, 6), constant(f"{prefix}hh", 1, 16, 4), constant(f"{prefix}b", 1, 32),
        constant(f"{prefix}out.weight", 1, 4, 1), constant(f"{prefix}out.bias", 1),
        n("Unsqueeze", ["input", "one"], [f"{prefix}u"]),
        n("Conv", [f"{prefix}u", f"{prefix}conv.weight", f"{prefix}conv.bias"], [f"{prefix}c"], strides=[4]),
        n("Relu", [f"{prefix}c"], [f"{prefix}r"]),
        n("Transpose", [f"{prefix}r"], [f"{prefix}t"], perm=[2, 0, 1]),
        n("Split", ["state"], [f"{prefix}h", f"{prefix}k"], axis=0),
        n("LSTM", [f"{prefix}t", f"{prefix}ih", f"{prefix}hh", f"{prefix}b", "", f"{prefix}h", f"{prefix}k"],
          [f"{prefix}y", f"{prefix}hn", f"{prefix}kn"], hidden_size=4),
        n("Concat", [f"{prefix}hn", f"{prefix}kn"], [f"{prefix}state"], axis=0),
        n("Transpose", [f"{prefix}hn"], [f"{prefix}f"], perm=[1, 2, 0]),
        n("Conv", [f"{prefix}f", f"{prefix}out.weight", f"{prefix}out.bias"], [f"{prefix}o"]),
        n("Sigmoid", [f"{prefix}o"], [f"{prefix}g"]),
        n("Squeeze", [f"{prefix}g", "one"], [f"{prefix}output"]),
    ]  # fmt: skip
    outputs = [helper.make_tensor_value_info(f"{prefix}{each}", 1, None) for each in ("output", "state")]
    return helper.make_graph(nodes, prefix, [], outputs, [one])


def voice_activity() -> onnx.ModelProto:
    """A network for each sample rate, all weights in the branches of an If."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.array(16000), "k")),
        helper.make_node("Equal", ["sr", "k"], ["c"]),
        helper.make_node(
            "If", ["c"], ["If_0_outputs_0", "If_0_outputs_1"], name="If_0",
            then_branch=speech_network("If_0_then_branch__", 8), else_branch=speech_network("If_0_else_branch__", 4),
        ),
        helper.make_node("Identity", ["If_0_outputs_0"], ["output"]),
        helper.make_node("Identity", ["If_0_outputs_1"], ["stateN"]),
    ]  # fmt: skip
    inputs = [info("input", 1, ["n", "samples"]), info("state", 1, [2, "n", 4]), info("sr", TensorProto.INT64, [])]
    outputs = [info("output", 1, ["n", 1]), info("stateN", 1, [2, "n", 4])]
    graph = helper.make_graph(nodes, "vad", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8)
    onnx.checker.check_model(model)
    return model


@pytest.mark.parametrize(("rate", "branch"), [(16000, "then"), (8000, "else")])
def test_a_voice_activity_model_with_a_network_in_each_branch_is_trained_whole(rate, branch, tmp_path):
    model = voice_activity()
    module = to_module(model)
    assert len(named_weights(module)) == 14
    x = {
        "input": RANDOM.standard_normal((5, 64)).astype(np.float32),
        "state": RANDOM.standard_normal((2, 5, 4)).astype(np.float32),
        "sr": np.array(rate),
    }
    given = [torch.from_numpy(np.asarray(value)) for value in x.values()]
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        (module(*given)[0] - 1.0).square().mean().backward()
        optimizer.step()
    moved = {each for each, p in named_weights(module).items() if p.grad is not None and bool(p.grad.any())}
    assert moved == {each for each in named_weights(module) if f"If_0_{branch}_branch__" in each}
    written = model_with_weights(module, model)
    assert bare(written) == bare(model)
    expected = onnxruntime.InferenceSession(written.SerializeToString()).run(None, x)
    before = onnxruntime.InferenceSession(model.SerializeToString()).run(None, x)
    assert np.abs(expected[0] - before[0]).max() > 0.001
    for ours, theirs in zip(module(*given), expected, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs, atol=1e-6)
    onnx.save(model, tmp_path / "vad.onnx")
    found = diagnose(tmp_path / "vad.onnx")
    assert found.importable
    assert (found.totals["trained"].tensors, found.totals["frozen"].values) == (14, 0)


def test_inner_weights_in_other_files_are_mapped_trained_and_written_there(tmp_path):
    model = if_with_two_networks()
    onnx.save(model, tmp_path / "in.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    (tmp_path / "to").mkdir()
    loaded = load_model(tmp_path / "in.onnx")
    module = learn(to_module(loaded, base=tmp_path), "if_with_two_networks")
    write_model(module, loaded, tmp_path / "in.onnx", tmp_path / "to" / "out.onnx")
    x = feed("if_with_two_networks")
    theirs = onnxruntime.InferenceSession(str(tmp_path / "to" / "out.onnx")).run(None, {"x": x})[0]
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), theirs, atol=1e-5)
    assert bare(onnx.load(tmp_path / "to" / "out.onnx")) == bare(onnx.load(tmp_path / "in.onnx"))


def test_single_weights_can_be_chosen_and_frozen_by_their_names():
    module = to_module(functions())
    select_trained(module, train=("*/*",), freeze=("Block/*",))
    trained = {each for each, p in named_weights(module).items() if p.requires_grad}
    assert trained == WEIGHTS["functions"] - {"out", "Block/s"}


def test_a_name_that_the_main_graph_has_is_refused_with_both():
    model = loop()
    model.graph.node[0].output[0] = model.graph.node[2].input[0] = "y/W"
    with pytest.raises(UnsupportedModel) as refusal:
        to_module(model)
    assert str(refusal.value) == (
        "'W', stored in the body of Loop, is known as 'y/W', which is also the name of a value of the main graph; "
        "rename one of them"
    )


def test_integers_inside_bodies_are_frozen_and_counted(tmp_path):
    model = loop()
    [body] = bodies(model).values()
    body.initializer[0].CopyFrom(numpy_helper.from_array(RANDOM.integers(-90, 90, (4, 4)).astype(np.int8), "q"))
    body.node.insert(0, helper.make_node("DequantizeLinear", ["q", "scale"], ["W"]))
    body.initializer.append(numpy_helper.from_array(np.float32(0.01), "scale"))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "model.onnx")
    found = diagnose(tmp_path / "model.onnx")
    assert {(w.name, w.kind, w.shape) for w in found.weights} == {
        ("y/held", "trained", (4,)),
        ("y/q", "frozen", (4, 4)),
    }
    assert (found.totals["trained"].values, found.totals["frozen"].values) == (4, 16)
    warned = next(warning for warning in found.warnings if warning.key == "mostly_frozen")
    assert warned.changes_training
    assert warned.what == (
        "16 of the 20 numbers of weights stay frozen, because of how the file stores them: "
        "y/q (16: stored as integers inside the body of Loop; move it to the main graph to train it)"
    )
    x = feed("loop")
    np.testing.assert_allclose(to_module(model)(torch.from_numpy(x)).detach(), by_onnxruntime(model, x), atol=1e-5)


@pytest.mark.slow
def test_files_that_continue_training_hold_inner_weights_under_their_names(tmp_path):
    model, x = loop(), feed("loop")
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=x, y=x)
    config = build_config(
        {
            "name": "files",
            "model": {"path": tmp_path / "model.onnx", "loss": "mse"},
            "data": {"source": str(tmp_path / "data.npz"), "label": "y"},
            "train": {"global_batch_size": 2, "num_steps": 2},
        }
    )
    found = write_artifacts(tmp_path, model, config, base=tmp_path)
    assert found.weights.keys() == WEIGHTS["loop"]
    session = onnxruntime.InferenceSession(str(tmp_path / "training.onnx"))
    gradients = [found.weights[each].gradient for each in sorted(WEIGHTS["loop"])]
    theirs = session.run(gradients, {"x": x, found.labels: x, **np.load(tmp_path / found.start)})
    module = to_module(model)
    (module(torch.from_numpy(x)) - torch.from_numpy(x)).square().mean().backward()
    for each, gradient in zip(sorted(WEIGHTS["loop"]), theirs, strict=True):
        np.testing.assert_allclose(named_weights(module)[each].grad, gradient, atol=1e-6)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("name", [pytest.param("scan", marks=pytest.mark.slow), "functions"])
def test_a_run_trains_and_exports_inner_weights(name, tmp_path):
    model = MODELS[name]()
    x = np.concatenate([feed(name, rows=24), feed(name, -1.0, rows=24)])
    target = np.full_like(by_onnxruntime(model, x), 0.5)
    run = runs.make_run(
        tmp_path,
        model,
        {"x": x, "y": target},
        model={"loss": "mse"},
        data={"label": "y"},
        train={"global_batch_size": 8, "num_steps": 12},
        optimizer={"learning_rate": 0.02},
    )
    exported = export_file(run, run.checkpoint(runs.train_run(run).step))
    losses = runs.losses(run)
    assert losses[12] < losses[1]
    assert exported.parity < 1e-5
    assert exported.changed == len(WEIGHTS[name])
    assert bare(onnx.load(exported.path)) == bare(model)


def test_constants_of_the_code_that_torch_writes_into_branches_stay_constants():
    """TorchScript stores parameters as initializers; a Constant is a number in the code of forward()."""
    model = parser.parse_model(
        HEADER + "g (float[n, 4] x, bool c) => (float[n, 4] y) { h = MatMul(x, fc_weight) "
        "y = If (c) <then_branch = t () => (float[n, 4] p) { p = Mul(h, scale) }, "
        "else_branch = e () => (float[n, 4] q) { q = Mul(h, gain) }> }"
    )
    model.producer_name = "pytorch"
    branches = bodies(model)
    branches["t"].node.insert(0, constant("/Constant_2_output_0", 4))
    branches["t"].node[1].input[1] = "/Constant_2_output_0"
    branches["e"].initializer.append(tensor("gain", 4))
    module = to_module(with_stored(model, tensor("fc_weight", 4, 4)))
    assert set(named_weights(module)) == {"fc_weight", "y/gain"}
    assert module.roles["y//Constant_2_output_0"].reason == "a constant in the module's code"
