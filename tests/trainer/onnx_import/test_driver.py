"""An ONNX graph in torch is the same function, with the same weights under the same names, and goes back exactly."""

import copy
import pickle
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.errors import CheckpointError, ConfigError, UnsupportedModel
from onward.trainer.model.trainable import load_weights
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2, build_squeezenet
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.onnx_import.train_selection import select_trained
from tests.support.graphs import (
    MODELS,
    feed,
    tiny_bert,
    tiny_conv_net,
    tiny_conv_net_with_batch_norm,
    tiny_mlp,
    tiny_transformer,
)
from tests.support.trained_models import model_with_weights, running_statistics
from tests.support.weight_roles import describe_weights

SUBJECTS = {
    **MODELS,
    "squeezenet": lambda: build_squeezenet(num_classes=10, image_size=32),
    "gpt2": lambda: build_gpt2(vocab_size=64, sequence_length=16, num_layers=2, num_heads=4, width=32),
}


def under_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)


def tensors(module: ImportedGraph, feeds: dict[str, np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(feeds[name]) for name in module.input_names]


def outputs(module: ImportedGraph, feeds: dict[str, np.ndarray]) -> tuple[torch.Tensor, ...]:
    result = module(*tensors(module, feeds))
    return result if isinstance(result, tuple) else (result,)


def assert_same(module: ImportedGraph, model: onnx.ModelProto, *, batch: int, within: float = 1e-5) -> None:
    feeds = feed(model, batch, seed=batch)
    for got, want in zip(outputs(module.eval(), feeds), under_onnxruntime(model, feeds), strict=True):
        assert got.shape == want.shape
        assert np.abs(got.detach().numpy() - want).max() <= within * np.abs(want).max()


def stored(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def train_steps(module: ImportedGraph, model: onnx.ModelProto, steps: int = 3) -> None:
    module.train()
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        loss = sum(output.square().mean() for output in outputs(module, feed(model, 4, seed=step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# -- the same function


@pytest.mark.parametrize("name", SUBJECTS)
def test_forward_equals_onnxruntime_at_any_batch_size(name):
    model = SUBJECTS[name]()
    module = to_module(model)
    for batch in (1, 2, 3):
        assert_same(module, model, batch=batch)


@pytest.mark.parametrize("name", SUBJECTS)
def test_fused_equals_unfused(name):
    model = SUBJECTS[name]()
    feeds = feed(model, 2)
    plain = outputs(to_module(model, fuse=False).eval(), feeds)
    for a, b in zip(outputs(to_module(model).eval(), feeds), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_gpt2_attention_and_linear_layers_become_single_calls():
    module = to_module(SUBJECTS["gpt2"]())
    attention = [child for name, child in module.named_children() if name.startswith("attention_")]
    assert [(child.causal, child.dropout) for child in attention] == [(True, pytest.approx(0.1))] * 2
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert calls.count(torch.nn.functional.linear) == 4 * 2
    assert torch.nn.functional.softmax not in calls


def test_padding_stays_masked_when_attention_is_fused():
    model = tiny_bert()
    module = to_module(model)
    assert [child.causal for name, child in module.named_children() if name.startswith("attention_")] == [False, False]
    assert_same(module, model, batch=3)  # its masks hold zeros and ones


def test_outputs_come_in_graph_order():
    model = MODELS["tiny_two_outputs"]()
    module = to_module(model)
    assert module.output_names == ("late", "early")
    assert [output.shape[1] for output in outputs(module, feed(model, 2))] == [2, 6]


def test_a_file_with_a_fixed_batch_size_trains_at_any_batch_size():
    g = GraphWriter("fixed", seed=0)
    x = g.op("Reshape", g.input("x", (2, 3, 4)), g.weight("flat", [2, 12]))
    x = g.op("MatMul", x, g.weight("w", g.normal(1, 12, 6)))
    x = g.op("Reshape", x, g.weight("rows", [4, 3]))  # twice the batch: merged into the leading dimension
    g.op("Softmax", x, outputs="y")
    g.output("y", (4, 3))
    module = to_module(g.model())
    assert_same(module, g.model(), batch=2)
    assert module(torch.randn(5, 3, 4)).shape == (10, 3)


# -- the same weights


@pytest.mark.parametrize("name", SUBJECTS)
def test_parameters_are_named_after_their_initializers_and_all_get_gradients(name):
    model = SUBJECTS[name]()
    module = to_module(model).train()
    floats = {key for key, array in stored(model).items() if array.dtype == np.float32 and array.ndim}
    statistics = {key for key in floats if "running" in key}
    assert {key for key, _ in module.named_parameters()} == floats - statistics
    assert set(running_statistics(module)) == statistics
    assert set(module.state_dict()) == floats
    sum(output.square().sum() for output in outputs(module, feed(model, 4))).backward()
    assert [key for key, parameter in module.named_parameters() if parameter.grad is None] == []
    assert [key for key, parameter in module.named_parameters() if not parameter.grad.any()] == []


def test_a_shared_initializer_is_one_parameter():
    model = tiny_transformer()
    module = to_module(model).eval()
    inputs = tensors(module, feed(model, 2))
    module(*inputs).sum().backward()
    table = module.transformer.wte.weight
    reads = [n for n in module.graph.nodes if n.op == "get_attr" and n.target == "transformer.wte.weight"]
    assert len(reads) == 1
    assert len(reads[0].users) == 2
    unseen = np.setdiff1d(np.arange(32), inputs[0].numpy())
    assert table.grad[unseen].abs().sum() > 0  # rows no input looked up still get a gradient: from the output layer


def test_initializer_names_that_are_no_attribute_paths_are_mapped():
    g = GraphWriter("names", seed=0)
    x = g.input("x.1", ("batch", 4))
    for name in ("onnx::MatMul_7", "a", "a.b", "x..y", "forward", "/m/w.0", "class", "self", "graph", "code", "meta"):
        x = g.op("MatMul", x, g.weight(name, g.normal(1, 4, 4)))
    g.op("Relu", x, outputs="y")
    g.output("y", ("batch", 4))
    model = g.model()
    module = to_module(model)
    assert set(named_weights(module)) == set(stored(model))
    assert_same(module, model, batch=2, within=1e-4)
    train_steps(module, model, 1)
    assert_same(module, model_with_weights(module, model), batch=2, within=1e-4)


@pytest.mark.parametrize("name", ["self", "torch", "inf", "class", "1 a"])
def test_an_input_may_be_named_like_a_python_keyword_or_builtin(name):
    g = GraphWriter("names", seed=0)
    x = g.op("Identity", g.input(name, ("batch", 4)))
    g.op("Clip", g.op("MatMul", x, g.weight("w", g.normal(1, 4, 4))), "", g.weight("most", np.inf), outputs="y")
    g.output("y", ("batch", 4))
    assert_same(to_module(g.model()), g.model(), batch=2, within=1e-4)


def test_constants_are_not_parameters():
    g = GraphWriter("roles", seed=0)
    x, ids = g.input("x", ("batch", 3, 3)), g.input("ids", ("batch",), TensorProto.INT64)
    positions = g.op("Unsqueeze", g.op("Cast", ids, to=TensorProto.FLOAT), g.weight("axes", [1, 2]))
    waves = g.op("Sin", g.op("Mul", positions, g.weight("frequency", g.normal(1, 3))))
    mask = g.weight("mask", np.triu(np.full((3, 3), -1e9, np.float32), 1))
    x = g.op("Add", g.op("Mul", x, g.weight("half", 0.5)), mask)
    x = g.op("Mul", x, g.weight("lower", np.tril(np.ones((3, 3), np.float32))))
    x = g.op("Mul", g.op("Add", x, waves), g.weight("scale", np.ones((3, 3), np.float32)))
    x = g.op("Add", g.op("MatMul", x, g.weight("w", g.normal(1, 3, 1))), g.weight("b", np.zeros(1, np.float32)))
    g.op("Relu", x, outputs="y")
    g.output("y", ("batch", 3, 1))
    module = to_module(g.model())
    assert {name for name, _ in module.named_parameters()} == {"scale", "w", "b"}
    reasons = {name: why for name, kind, why in describe_weights(module) if kind == "frozen"}
    assert reasons["frequency"] == "only combined with integers: a table of positions or a mask"
    assert reasons["half"] == "a single number"
    assert reasons["mask"] == reasons["lower"] == "a mask"


def test_a_weight_expanded_to_the_shape_of_the_input_is_trained():
    g = GraphWriter("vit", seed=0)
    x = g.input("x", ("batch", "sequence", 4))
    sizes = g.op("Shape", x)
    batch = g.op("Gather", sizes, g.weight("index_0", [0]))
    length = g.op("Gather", sizes, g.weight("index_1", [1]))
    token = g.op(
        "Expand", g.weight("token", g.normal(1, 1, 1, 4)), g.op("Concat", batch, g.weight("ones", [1, 1]), axis=0)
    )
    places = g.op("Slice", g.weight("places", g.normal(1, 1, 16, 4)), "index_0", length, "index_1")
    g.op("Concat", token, g.op("Add", x, places), axis=1, outputs="y")
    g.output("y", ("batch", "longer", 4))
    module = to_module(g.model())
    assert {name for name, _ in module.named_parameters()} == {"token", "places"}
    assert_same(module, g.model(), batch=3)


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_pickled_graph_makes_the_same_calls_and_keeps_its_names(name):
    model = SUBJECTS[name]()
    module = to_module(model).eval()
    again = pickle.loads(pickle.dumps(module))
    assert isinstance(again, ImportedGraph)
    calls = [sorted(str(node.target) for node in each.graph.nodes) for each in (again, module)]
    assert calls[0] == calls[1]
    assert copy.deepcopy(again).state_dict().keys() == again.state_dict().keys() == module.state_dict().keys()
    assert model_with_weights(copy.deepcopy(again), model) == model
    feeds = feed(model, 2, seed=0)
    assert all(map(torch.equal, outputs(again, feeds), outputs(module, feeds)))


def test_a_deep_copy_keeps_initializer_names():
    module = copy.deepcopy(to_module(tiny_mlp()))
    assert set(named_weights(module)) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert module.input_names == ("features",)


@pytest.mark.parametrize("name", SUBJECTS)
def test_weights_and_constants_move_to_the_device_of_the_module(name):
    model = SUBJECTS[name]()
    module = to_module(model).to("meta")  # a device that meets no other, like a GPU
    for tensor in (*module.parameters(), *module.buffers()):
        assert tensor.is_meta
    results = module(*(tensor.to("meta") for tensor in tensors(module, feed(model, 2))))
    assert all(output.is_meta for output in (results if isinstance(results, tuple) else (results,)))


@pytest.mark.parametrize("name", SUBJECTS)
def test_mixed_precision_stays_close_and_gives_gradients(name):
    model = SUBJECTS[name]()
    module, feeds = to_module(model).eval(), feed(model, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = outputs(module, feeds)
    sum(output.float().square().sum() for output in rough).backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    for a, b in zip(rough, outputs(module, feeds), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.05, atol=0.05 * float(b.detach().abs().max()))


# -- training


def test_batch_norm_uses_batch_statistics_in_training_and_running_statistics_in_evaluation():
    model = tiny_conv_net_with_batch_norm()
    module = to_module(model).train()
    x = torch.from_numpy(feed(model, 8)["image"])
    before = {name: tensor.clone() for name, tensor in running_statistics(module).items()}
    module(x)
    seen = torch.nn.functional.conv2d(x, getattr(module.features, "0").weight, padding=1)
    want = 0.9 * before["features.1.running_mean"] + 0.1 * seen.mean((0, 2, 3))
    torch.testing.assert_close(running_statistics(module)["features.1.running_mean"], want)
    assert_same(module, model_with_weights(module, model), batch=3)


def test_dropout_follows_train_and_eval():
    model = SUBJECTS["gpt2"]()
    module = to_module(model)
    inputs = tensors(module, feed(model, 2))
    module.train()
    assert not torch.equal(module(*inputs), module(*inputs))
    module.eval()
    assert torch.equal(module(*inputs), module(*inputs))


@pytest.mark.parametrize("name", SUBJECTS)
def test_after_training_only_trained_tensors_differ_and_onnxruntime_agrees(name):
    model = SUBJECTS[name]()
    module = to_module(model)
    train_steps(module, model)
    written = model_with_weights(module, model)
    before, after = stored(model), stored(written)
    changed = {key for key in before if before[key].tobytes() != after[key].tobytes()}
    assert changed == set(named_weights(module))
    for proto in (blank := copy.deepcopy(written)).graph.initializer:
        if proto.name in changed:
            proto.raw_data = before[proto.name].tobytes()
    assert blank.SerializeToString() == model.SerializeToString()  # nothing but those bytes
    for batch in (2, 3):
        assert_same(module, written, batch=batch)


def test_patterns_select_the_trained_weights():
    model = tiny_transformer()
    module = to_module(model)
    select_trained(module, train=("*",), freeze=("*.wpe.*", "*.ln_?.*"))
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert frozen == {n for n in named_weights(module) if fnmatchcase(n, "*.wpe.*") or fnmatchcase(n, "*.ln_?.*")}
    train_steps(module, model, 1)
    before, after = stored(model), stored(model_with_weights(module, model))
    assert {n for n in before if before[n].tobytes() == after[n].tobytes()} >= frozen
    assert ("transformer.wpe.weight", "frozen", "by model.train or model.freeze") in describe_weights(module)


def test_every_pattern_without_a_match_is_reported():
    module = to_module(tiny_mlp())
    with pytest.raises(ConfigError) as refusal:
        select_trained(module, train=("fc1.*", "fc9.wieght"), freeze=("head.*",))
    assert len(refusal.value.problems) == 2
    assert "'fc9.wieght'" in refusal.value.problems[0]
    with pytest.raises(ConfigError, match="leave none of the 4 weights"):
        select_trained(module, train=("*",), freeze=("*",))


def test_weights_of_another_model_are_refused():
    module = to_module(tiny_mlp())
    other = named_weights(to_module(tiny_mlp(hidden=8)))
    with pytest.raises(CheckpointError, match=r"fc1.bias is \[8\], the model's is \[16\]"):
        load_weights(module, other)
    with pytest.raises(ConfigError, match="not the one imported"):
        model_with_weights(module, tiny_conv_net())


def test_loaded_weights_are_written():
    model, module = tiny_mlp(seed=0), to_module(tiny_mlp(seed=1))
    load_weights(module, named_weights(to_module(model)))
    assert model_with_weights(module, tiny_mlp(seed=1)).graph.initializer == model.graph.initializer


# -- every way a file can store a weight


def rewritten(model: onnx.ModelProto, how: str) -> onnx.ModelProto:
    """The model with its float tensors in another type or place."""
    model = copy.deepcopy(model)
    floats = [tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT and tensor.dims]
    for tensor in floats:
        array = numpy_helper.to_array(tensor)
        if how == "float_data":
            tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.FLOAT, array.shape, array.reshape(-1)))
        elif how == "Constant nodes":
            model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
            model.graph.initializer.remove(tensor)
        elif how == "lists of floats" and array.ndim == 1:
            model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value_floats=array.tolist()))
            model.graph.initializer.remove(tensor)
    return model


@pytest.mark.parametrize("how", ["float_data", "Constant nodes", "lists of floats"])
def test_weights_are_written_back_where_they_were_stored(how):
    model = rewritten(tiny_conv_net(), how)
    module = to_module(model)
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()
    assert len(list(module.parameters())) == 6
    train_steps(module, model)
    written = model_with_weights(module, model)
    assert_same(module, written, batch=2)
    assert [node.op_type for node in written.graph.node] == [node.op_type for node in model.graph.node]
    assert all(not tensor.raw_data for tensor in written.graph.initializer if tensor.float_data)


def test_a_number_of_a_constant_node_is_written_back() -> None:
    g = GraphWriter("number", seed=0)
    slope = g.op("Constant", value_float=0.1)  # which float64 does not represent as float32 does
    g.op("Mul", g.op("MatMul", g.input("x", ("n", 3)), g.weight("w", g.normal(1.0, 3, 2))), slope, outputs="y")
    g.output("y", ("n", 2))
    model = g.model()
    module = to_module(model, train=[slope])
    assert named_weights(module)[slope].shape == ()
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()
    with torch.no_grad():
        named_weights(module)[slope].fill_(1.7)
    written = model_with_weights(module, model)
    assert_same(module, written, batch=2)
    module = to_module(written, train=[slope])
    assert named_weights(module)[slope].item() == np.float32(1.7)


@pytest.mark.parametrize("fed", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_file_in_half_precision_takes_inputs_of_its_type(kind, fed) -> None:
    module = to_module(half_product(kind))
    x = torch.randn(5, 4).to(fed)
    torch.testing.assert_close(module(x), x.float() @ module.w, rtol=1e-5, atol=1e-5)
    module(x).sum().backward()
    assert module.w.grad.dtype == torch.float32
    assert module.double()(x).dtype == torch.float64
    assert module.half()(x.half()).dtype == torch.float16


def half_product(kind: int, *, typed: bool = False) -> onnx.ModelProto:
    """x [batch, 4] times w [4, 3], all in half precision. typed: w is in a field of its type, not in raw_data."""
    weight = np.random.default_rng(0).standard_normal((4, 3), np.float32)
    halves = weight.astype(helper.tensor_dtype_to_np_dtype(kind))
    proto = numpy_helper.from_array(halves, "w")
    if typed:
        bits = halves.view(np.uint16).reshape(-1).tolist()
        proto = TensorProto(name="w", data_type=kind, dims=[4, 3], int32_data=bits)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    ends = [helper.make_tensor_value_info(name, kind, ["batch", width]) for name, width in (("x", 4), ("y", 3))]
    return helper.make_model(helper.make_graph([node], "half", ends[:1], ends[1:], [proto]))


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("typed", [False, True])
def test_half_precision_files_are_trained_in_fp32_and_rounded_once(kind, typed):
    model = half_product(kind, typed=typed)
    halves = numpy_helper.to_array(model.graph.initializer[0])
    module = to_module(model)
    assert module.w.dtype == torch.float32
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()
    with torch.no_grad():
        module.w += 0.1
    back = model_with_weights(module, model).graph.initializer[0]
    assert bool(back.int32_data) == typed
    rounded = module.w.detach().numpy().astype(halves.dtype)
    assert numpy_helper.to_array(back).tobytes() == rounded.tobytes()


def test_external_data_is_read(tmp_path: Path):
    model = tiny_mlp()
    onnx.save(copy.deepcopy(model), tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    loaded = load_model(tmp_path / "m.onnx")
    assert_same(to_module(loaded, base=tmp_path), model, batch=2)
    with pytest.raises(UnsupportedModel, match=r"'fc1.weight' is in another file; say in which directory"):
        to_module(loaded)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(UnsupportedModel, match=r"m\.bin"):
        load_model(tmp_path / "m.onnx")


def test_a_file_that_is_not_onnx_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read the model"):
        load_model(tmp_path / "absent.onnx")
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(UnsupportedModel, match="is not an ONNX file"):
        load_model(tmp_path / "text.onnx")
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 20]> none (float[1] x) => () { y = Abs(x) }')
    onnx.save(model, tmp_path / "none.onnx")
    with pytest.raises(UnsupportedModel, match="has no outputs"):
        load_model(tmp_path / "none.onnx")


# -- refusals


def test_everything_that_cannot_be_imported_is_listed_at_once():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20, "acme" : 3]>
        refused (float[batch, 4] x) => (float[batch, 4] y, float[batch, 4] z) {
            a = acme.Twist(x)
            y = acme.Stretch(a)
            z = Softmax <axis: int = 1, temperature: float = 2.0> (x)
        }""")
    with pytest.raises(UnsupportedModel) as refusal:
        to_module(model)
    assert list(refusal.value.problems) == [
        "node 'a': acme.Twist-3: it is not implemented",
        "node 'y': acme.Stretch-3: it is not implemented",
        "node 'z': Softmax-13: attribute temperature is not implemented",
    ]


def test_a_layer_that_reads_integers_as_features_is_trained() -> None:
    """One-hot rows, pixels and counts come as integers; a row of frequencies times positions stays a table."""
    g = GraphWriter("integers", seed=0)
    tokens = g.input("tokens", ["batch"], TensorProto.INT64)
    depth, values = g.weight("depth", np.array([5], np.int64)), g.weight("values", [0.0, 1.0])
    rows = g.op("OneHot", tokens, depth, g.op("Cast", values, to=TensorProto.FLOAT), axis=-1)
    x = g.op("MatMul", rows, g.weight("table", np.ones((5, 4), np.float32)))
    counts = g.op("Cast", g.input("counts", ["batch", 3], TensorProto.INT32), to=TensorProto.FLOAT)
    y = g.op("Gemm", counts, g.weight("w", np.ones((3, 4), np.float32)), g.weight("b", np.ones(4, np.float32)))
    axis = g.weight("axis", np.array([1], np.int64))
    position = g.op("Unsqueeze", g.op("Cast", tokens, to=TensorProto.FLOAT), axis)
    angles = g.op("MatMul", position, g.weight("frequencies", np.ones((1, 4), np.float32)))
    g.op("Sum", x, y, g.op("Cos", angles), outputs="out")
    g.output("out", ["batch", 4])
    module = to_module(g.model())
    assert {name for name, _ in module.named_parameters()} == {"table", "w", "b"}


def test_a_frozen_batch_norm_keeps_its_statistics_and_uses_them() -> None:
    module = to_module(tiny_conv_net_with_batch_norm())
    norms = [name for name in named_weights(module) if "features" in name]
    select_trained(module, freeze=["features.*"])
    assert norms
    before = {name: tensor.clone() for name, tensor in running_statistics(module).items()}
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(module.train()(x), module.eval()(x))
    assert all(torch.equal(before[name], tensor) for name, tensor in running_statistics(module).items())
    select_trained(module)
    assert not torch.equal(module.train()(x), module.eval()(x)), "trained again, it learns again"


def test_batch_norm_of_a_single_value_per_channel_changes_no_statistics() -> None:
    from onward.trainer.onnx_import.ops.batch_norm import BatchNorm

    norm = BatchNorm(0.1, 1e-5).train()
    mean, variance = torch.zeros(2), torch.ones(2)
    assert norm(torch.ones(1, 2), torch.ones(2), torch.zeros(2), mean, variance).shape == (1, 2)
    assert torch.equal(mean, torch.zeros(2))
