"""Surgery on the ONNX graph: what is asked for changes, under onnxruntime, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_graph.surgery.surgery import apply_surgery, extract_subgraph
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.write_back import write_model
from tests.support import graphs

Array = np.ndarray[Any, np.dtype[Any]]


def settings(**model: Any) -> ModelConfig:
    return ModelConfig(path=Path("model.onnx"), **model)


def run(model: onnx.ModelProto, feed: Mapping[str, Array], *names: str) -> list[Array]:
    onnx.checker.check_model(model, full_check=True)
    return list(open_session(model).run(list(names) or None, dict(feed)))


def operated(model: onnx.ModelProto, seed: int = 0, **wanted: Any) -> onnx.ModelProto:
    """A copy after surgery."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    apply_surgery(result, settings(**wanted), seed=seed)
    return result


def stored(model: onnx.ModelProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def refused(model: onnx.ModelProto, **wanted: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        operated(model, **wanted)
    return raised.value.problems


# -- heads


def linear_with_reshapes(computed: bool = False) -> onnx.ModelProto:
    """[batch, 6, 8] -> Reshape [-1, 8] -> MatMul -> bias + . -> Reshape [-1, 6, 5] -> Softmax."""
    g = GraphWriter("reshapes")
    x = g.op("Reshape", g.input("x", ("batch", 6, 8)), g.weight("rows", [-1, 8]))
    x = g.op("MatMul", x, g.weight("fc.weight", g.normal(0.5, 8, 5)))
    x = g.op("Add", g.weight("fc.bias", g.normal(0.5, 5)), x)
    shape = g.weight("back", [-1, 6, 5])
    if computed:
        batch = g.op("Slice", g.op("Shape", "x"), g.weight("zero", [0]), g.weight("one", [1]))
        shape = g.op("Concat", batch, g.weight("six", [6]), g.weight("five", [5]), axis=0)
    g.op("Softmax", g.op("Reshape", x, shape), axis=-1, outputs="probabilities")
    g.output("probabilities", ("batch", 6, 5))
    return g.model()


def convolution_with_a_bias_of_its_own() -> onnx.ModelProto:
    """A segmentation head: 1x1 Conv, Add [5, 1, 1], Resize; the image's size is dynamic."""
    g = GraphWriter("segmentation")
    x = g.op("Conv", g.input("x", ("batch", 3, "h", "w")), g.weight("head.weight", g.normal(0.5, 5, 3, 1, 1)))
    x = g.op("Add", x, g.weight("head.bias", g.normal(0.5, 5, 1, 1)))
    g.op("Resize", x, "", g.weight("scales", np.array([1, 1, 2, 2], np.float32)), mode="nearest", outputs="mask")
    g.output("mask", ("batch", 5, "h2", "w2"))
    return g.model()


HEADS: dict[str, tuple[Callable[[], onnx.ModelProto], tuple[str, ...], int]] = {
    "Gemm": (graphs.tiny_conv_net, ("classifier.weight", "classifier.bias"), 1),
    "a pooled convolution": (
        lambda: build_squeezenet(image_size=17, num_classes=5),
        ("classifier.1.weight", "classifier.1.bias"),
        1,
    ),
    "one output becomes many": (graphs.tiny_mlp, ("fc2.weight", "fc2.bias"), 1),
    "MatMul, bias, Reshape": (linear_with_reshapes, ("fc.weight", "fc.bias", "back"), 2),
    "MatMul, bias, computed shape": (lambda: linear_with_reshapes(True), ("fc.weight", "fc.bias", "five"), 2),
    "Conv, bias, Resize": (convolution_with_a_bias_of_its_own, ("head.weight", "head.bias"), 1),
    "a classifier on tokens": (graphs.tiny_bert, ("classifier.weight", "classifier.bias"), 1),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_head_gets_the_wanted_number_of_outputs_and_other_tensors_keep_their_bytes(case: str) -> None:
    build, changed, axis = HEADS[case]
    before = onnx.shape_inference.infer_shapes(build())
    for tensor in before.graph.initializer:  # as the dynamo exporter writes
        before.graph.value_info.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    after = operated(before, num_classes=7)
    was, now = stored(before), stored(after)
    assert {name for name in was if was[name].tobytes() != now[name].tobytes()} == set(changed)
    assert list(was) == list(now)
    feed = {"x": np.ones((2, 3, 4, 4), np.float32)} if case.startswith("Conv") else graphs.feed(before, 2)
    (result,) = run(after, feed)
    assert result.shape[axis] == 7
    declared = [dim.dim_value or dim.dim_param for dim in after.graph.output[0].type.tensor_type.shape.dim]
    original = [dim.dim_value or dim.dim_param for dim in before.graph.output[0].type.tensor_type.shape.dim]
    assert declared == [7 if place == axis else dim for place, dim in enumerate(original)]
    assert to_module(after).output_names == (before.graph.output[0].name,)


def test_a_new_head_is_initialised_like_torch_and_determined_by_the_seed() -> None:
    model = graphs.tiny_conv_net()
    first, again, other = (stored(operated(model, seed, num_classes=300)) for seed in (1, 1, 2))
    weight = first["classifier.weight"]
    bound = 1 / np.sqrt(weight.shape[1])  # torch.nn.Linear.reset_parameters
    assert 0.99 * bound < np.abs(weight).max() <= bound
    assert np.isclose(weight.std(), bound / np.sqrt(3), rtol=0.02)
    assert 0.9 * bound < np.abs(first["classifier.bias"]).max() <= bound
    assert np.array_equal(weight, again["classifier.weight"])
    assert not np.array_equal(weight, other["classifier.weight"])


def test_a_tied_head_gets_a_new_weight_and_the_embedding_stays() -> None:
    before = graphs.tiny_transformer()
    after = operated(before, num_classes=3)
    was, now = stored(before), stored(after)
    assert all(was[name].tobytes() == now[name].tobytes() for name in was)
    assert {name: now[name].shape for name in now.keys() - was.keys()} == {"transformer.wte.weight.head": (32, 3)}
    (result,) = run(after, graphs.feed(before, 2))
    assert result.shape == (2, 7, 3)
    assert len(after.graph.node) == len(before.graph.node) - 1, "the Transpose that only the old head read is left"


def test_a_head_keeps_the_type_it_was_stored_in() -> None:
    g = GraphWriter("half")
    g.op(
        "MatMul",
        g.input("x", ("batch", 4), TensorProto.FLOAT16),
        g.weight("w", np.ones((4, 2), np.float16)),
        outputs="y",
    )
    g.output("y", ("batch", 2), TensorProto.FLOAT16)
    assert stored(operated(g.model(), num_classes=3))["w"].dtype == np.float16


def test_model_head_names_the_layer_that_is_replaced() -> None:
    assert stored(operated(graphs.tiny_mlp(), num_classes=9, head="fc2.weight"))["fc2.weight"].shape == (9, 16)


def grouped() -> onnx.ModelProto:
    g = GraphWriter("grouped")
    g.op("Conv", g.input("x", ("batch", 4, 5)), g.weight("w", g.normal(1, 4, 2, 1)), group=2, outputs="y")
    g.output("y", ("batch", 4, 5))
    return g.model()


def scaled_head() -> onnx.ModelProto:
    g = GraphWriter("scaled")
    x = g.op("MatMul", g.input("x", ("batch", 4)), g.weight("w", g.normal(1, 4, 3)))
    g.op("Mul", x, g.weight("per_class", g.normal(1, 3)), outputs="y")
    g.output("y", ("batch", 3))
    return g.model()


def two_heads_added() -> onnx.ModelProto:
    g = GraphWriter("two")
    x = g.input("x", ("batch", 4))
    parts = [g.op("MatMul", x, g.weight(name, g.normal(1, 4, 3))) for name in ("w1", "w2")]
    g.op("Add", *parts, outputs="y")
    g.output("y", ("batch", 3))
    return g.model()


def no_layer() -> onnx.ModelProto:
    g = GraphWriter("none")
    g.op("Einsum", g.input("x", ("batch", 4)), g.weight("w", g.normal(1, 4, 3)), equation="bi,io->bo", outputs="y")
    g.output("y", ("batch", 3))
    return g.model()


@pytest.mark.parametrize(
    ("build", "wanted", "words"),
    [
        (no_layer, {}, ["last layer before 'y' was not found", "no MatMul, Gemm or Conv"]),
        (two_heads_added, {}, ["2 layers lead to it", "w1", "w2", "model.head"]),
        (grouped, {}, ["'w' is a convolution of 2 groups"]),
        (graphs.tiny_two_outputs, {}, ["'late' is [?, 2], also when the layer before it has 9 outputs"]),
        (scaled_head, {}, ["Mul", "'per_class', made for 3 outputs"]),
        (graphs.tiny_mlp, {"head": "fc1.weight"}, ["'fc2.weight', made for 16 outputs", "fc1.weight"]),
        (
            graphs.tiny_mlp,
            {"head": "fc2.weigth"},
            ["not a weight of a MatMul, Gemm or Conv", "did you mean 'fc2.weight'?"],
        ),
    ],
)
def test_a_head_that_cannot_be_replaced_is_refused_with_the_reason(
    build: Callable[[], onnx.ModelProto], wanted: dict[str, str], words: list[str]
) -> None:
    problems = refused(build(), num_classes=9, **wanted)
    for word in words:
        assert word in " ".join(problems)


# -- untying


def test_untying_gives_each_reader_its_own_weight_and_changes_no_result() -> None:
    before = graphs.tiny_transformer()
    after = operated(before, untie=["*.wte.*"])
    assert stored(after).keys() - stored(before).keys() == {"transformer.wte.weight.untied.1"}
    feed = graphs.feed(before, 2)
    assert np.array_equal(*(run(model, feed)[0] for model in (before, after)))
    names = named_weights(to_module(after, tie=True)).keys()
    assert {"transformer.wte.weight", "transformer.wte.weight.untied.1"} <= names


def test_untying_a_weight_that_is_not_shared_is_refused() -> None:
    problems = refused(graphs.tiny_transformer(), untie=["*.wpe.*", "transformer.wt.weight"])
    assert problems[0] == "model.untie: 'transformer.wpe.weight' is read by one node only; there is nothing to untie"
    assert "no initializer matches 'transformer.wt.weight'; did you mean 'transformer.wte.weight'?" in problems[1]


def test_untied_weights_in_external_data_are_written_to_separate_bytes(tmp_path: Path) -> None:
    source, target = tmp_path / "m.onnx", tmp_path / "out" / "m.onnx"
    target.parent.mkdir()
    onnx.save(graphs.tiny_transformer(), source, save_as_external_data=True, location="m.data", size_threshold=512)
    model = load_model(source)
    apply_surgery(model, settings(untie=["*.wte.*"]), seed=0)
    module = to_module(model, base=tmp_path)
    weights = named_weights(module)
    weights["transformer.wte.weight.untied.1"].data.fill_(0.5)
    write_model(module, model, source, target)
    written = stored(onnx.load(target))
    assert (written["transformer.wte.weight.untied.1"] == 0.5).all()
    assert np.array_equal(written["transformer.wte.weight"], weights["transformer.wte.weight"].detach().numpy())


# -- the part that is trained


def test_a_subgraph_computes_what_the_full_graph_computes() -> None:
    model = graphs.tiny_bert()
    start = next(node.output[0] for node in model.graph.node if node.op_type == "Softmax")  # of the first layer
    inner = next(node.output[0] for node in model.graph.node if node.op_type == "Tanh")
    part = extract_subgraph(model, settings(start=[start], output=inner))
    assert [value.name for value in part.graph.output] == [inner]
    assert {start} < {value.name for value in part.graph.input}  # other paths still need the tokens
    assert len(part.graph.node) < len(model.graph.node)
    with_inner = onnx.ModelProto()
    with_inner.CopyFrom(model)
    for name, dims in ((start, ["b", 2, "s", "s"]), (inner, ["b", 16])):
        with_inner.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
    feed = graphs.feed(model, 2)
    at_start, wanted = run(with_inner, feed, start, inner)
    own = {value.name for value in part.graph.input}
    given = {name: array for name, array in feed.items() if name in own} | {start: at_start}
    assert np.array_equal(run(part, given)[0], wanted)


def test_a_subgraph_has_only_the_inputs_and_weights_that_it_needs() -> None:
    model = graphs.tiny_mlp()
    hidden = model.graph.node[1].output[0]
    part = extract_subgraph(model, settings(start=[hidden]))
    (value,) = part.graph.input
    assert (value.name, value.type.tensor_type.elem_type) == (hidden, TensorProto.FLOAT)
    assert [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim] == ["batch", 16]
    assert stored(part).keys() == {"fc2.weight", "fc2.bias"}
    before = extract_subgraph(model, settings(output=hidden))
    assert stored(before).keys() == {"fc1.weight", "fc1.bias"}


def test_without_start_and_output_the_model_itself_is_returned() -> None:
    model = graphs.tiny_two_outputs()
    assert extract_subgraph(model, settings(output="early")) is model


def test_a_node_may_compute_a_start_tensor_and_another_one_that_is_read() -> None:
    g = GraphWriter("split")
    g.op("Split", g.input("x", ("batch", 4)), outputs=["left", "right"], axis=-1, num_outputs=2)
    g.op("Add", "left", "right", outputs="y")
    g.output("y", ("batch", 2))
    part = extract_subgraph(g.model(), settings(start=["left"]))
    left = np.full((1, 2), 10, np.float32)
    (result,) = run(part, {"x": np.arange(4, dtype=np.float32)[None], "left": left})
    assert result.tolist() == [[12.0, 13.0]]


def test_all_unknown_or_unreachable_tensors_are_reported_at_once() -> None:
    problems = refused(graphs.tiny_mlp(), start=["feature", "fc1.weight"], output="predictoin", untie=["fc9.*"])
    assert "model.output 'predictoin' is not a tensor of the model; did you mean 'prediction'?" in problems
    assert "model.start 'feature' is not a tensor of the model; did you mean 'features'?" in problems
    assert "model.start 'fc1.weight' is a weight; name a tensor that is computed from the inputs" in problems
    assert len(problems) == 4
    model = graphs.tiny_two_outputs()
    (problem,) = refused(model, start=["rest"], output="early")
    assert problem == "model.start 'rest' is not on the way to 'early'; leave it out"
    (problem,) = refused(model, start=["early"], output="early")
    assert "no node is left to train" in problem
