"""What onnxruntime runs is imported although ONNX's checker refuses it, or is refused by name with a remedy."""

import copy
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.trainer.data.schema.signature import read_signature
from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph import beyond_onnx
from onward.trainer.onnx_graph.beyond_onnx import departures
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.write_back import write_model
from tests.support.graphs import MODELS

ROWS = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
W = (np.random.default_rng(0).normal(size=(4, 5)) * 0.5).astype(np.float32)


def plain(width: int = 5) -> onnx.ModelProto:
    """y = relu(x w)."""
    weight = np.random.default_rng(0).normal(size=(4, width)) * 0.5
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], "product"), helper.make_node("Relu", ["h"], ["y"], "relu")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", width])],
        [numpy_helper.from_array(weight.astype(np.float32), "w")],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


# -- what becomes of each


def no_graph_name(model):
    model.graph.name = ""


def no_output_shape(model):
    model.graph.output[0].type.tensor_type.ClearField("shape")


def no_output_type(model):
    model.graph.output[0].ClearField("type")


def no_input_shape(model):
    model.graph.input[0].type.tensor_type.ClearField("shape")


def no_shape_of_a_listed_weight(model):
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, None))


def weight_not_listed_at_ir_3(model):
    model.ir_version = 3


def second_name_of_the_domain(model):
    for node in model.graph.node:
        node.domain = "ai.onnx"


def norm_of_onnxruntime(model):
    scale = [numpy_helper.from_array(np.linspace(0.5, 1.5, 5).astype(np.float32), "scale")]
    model.graph.initializer.extend(scale)
    norm = helper.make_node("SimplifiedLayerNormalization", ["h", "scale"], ["n"], axis=-1, epsilon=1e-5)
    model.graph.node.insert(1, norm)
    model.graph.node[2].input[0] = "n"


def metadata_key_twice(model):
    for value in ("1", "2"):
        model.metadata_props.add(key="author", value=value)


def weight_without_name(model):
    model.graph.initializer.add().CopyFrom(numpy_helper.from_array(W, ""))


KEPT = {
    no_graph_name: "the graph has no name",
    no_output_shape: "output 'y' declares no shape",
    no_output_type: "output 'y' declares no type",
    no_input_shape: "input 'x' declares no shape",
    no_shape_of_a_listed_weight: "input 'w' declares no shape",
    weight_not_listed_at_ir_3: "not listed as inputs ('w')",
    second_name_of_the_domain: "2 operators are written with the domain 'ai.onnx'",
    norm_of_onnxruntime: "norms of onnxruntime",
    metadata_key_twice: "metadata has 'author' twice",
    weight_without_name: "an initializer has no name",
}


def weight_stored_twice(model):
    model.graph.initializer.append(copy.deepcopy(model.graph.initializer[0]))


def weight_listed_twice(model):
    model.graph.input.extend([helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 5])] * 2)


def no_version_of_a_domain(model):
    model.graph.node[1].op_type, model.graph.node[1].domain = "Gelu", "com.microsoft"


def no_version_of_a_domain_of_onnx(model):
    model.graph.node[1].op_type, model.graph.node[1].domain = "Scaler", "ai.onnx.ml"
    values = {"offset": [0.5], "scale": [2.0]}
    model.graph.node[1].attribute.extend(helper.make_attribute(name, value) for name, value in values.items())


def nodes_out_of_order(model):
    nodes = [copy.deepcopy(node) for node in model.graph.node][::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


PUT_RIGHT = {
    weight_stored_twice: "1 initializers are stored a second time",
    weight_listed_twice: "1 initializers are listed as inputs twice",
    no_version_of_a_domain: "'com.microsoft' is not given",
    no_version_of_a_domain_of_onnx: "'ai.onnx.ml' is not given",
    nodes_out_of_order: "not in an order",
}


def two_weights_of_one_name(model):
    model.graph.initializer.append(numpy_helper.from_array(W + 1, "w"))


def values_in_two_fields(model):
    model.graph.initializer[0].float_data.extend([0.0] * 20)


def no_version_of_operators_that_changed(model):
    model.opset_import[0].domain, model.opset_import[0].version = "com.microsoft", 1


def function_of_another_version(model):
    body = helper.make_node("Softmax", ["a"], ["b"])
    model.functions.append(helper.make_function("own", "F", ["a"], ["b"], [body], [helper.make_opsetid("", 12)]))
    model.graph.node[1].op_type, model.graph.node[1].domain = "F", "own"
    model.opset_import.append(helper.make_opsetid("own", 1))


REFUSED = {
    two_weights_of_one_name: "initializer 'w' is stored twice, differently; onnxruntime takes the last one. Remove",
    values_in_two_fields: "initializer 'w' has values in raw_data and in float_data.*; clear the others",
    no_version_of_operators_that_changed: "'ai.onnx', and MatMul, Relu changed between versions.*Add the one",
    function_of_another_version: "function 'F' is written for version 12.*model for 17.*Softmax changed.*Export both",
}
NAMES = {"ids": lambda case: case.__name__ if callable(case) else ""}


def saved(change, folder: Path, model: onnx.ModelProto | None = None) -> Path:
    model = model or plain()
    change(model)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def under_onnxruntime(path: Path, *feeds: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options)
    # a weight that is listed as an input has a value without one
    return session.run(None, dict(zip([each.name for each in session.get_inputs()], feeds, strict=False)))[0]


def is_refused_by_the_checker(path: Path) -> bool:
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError:
        return True
    return False


def directional_difference(path: Path, folder: Path, upstream: np.ndarray, direction: np.ndarray) -> float:
    """Of sum(upstream * y) along a direction of w, by onnxruntime itself."""
    found = []
    for sign in (1, -1):
        model = onnx.load(path)
        for tensor in model.graph.initializer:
            if tensor.name == "w":
                moved = numpy_helper.to_array(tensor) + sign * 1e-2 * direction
                tensor.CopyFrom(numpy_helper.from_array(moved.astype(np.float32), "w"))
        (folder / "moved.onnx").write_bytes(model.SerializeToString())
        found.append(float((upstream * under_onnxruntime(folder / "moved.onnx", ROWS).astype(np.float64)).sum()))
    return (found[0] - found[1]) / 2e-2


@pytest.mark.parametrize("change", [*KEPT, *PUT_RIGHT], **NAMES)
def test_what_onnxruntime_runs_has_its_values_and_gradients_and_goes_back(change, tmp_path):
    path = saved(change, tmp_path)
    assert is_refused_by_the_checker(path)
    module = onward.to_module(path)
    wanted = under_onnxruntime(path, ROWS)
    result = module(torch.from_numpy(ROWS))
    np.testing.assert_allclose(result.detach().numpy(), wanted, rtol=1e-5, atol=1e-6)
    rng = np.random.default_rng(2)
    upstream, direction = rng.normal(size=wanted.shape), rng.normal(size=W.shape)
    (result.double() * torch.from_numpy(upstream)).sum().backward()
    gradient = named_weights(module)["w"].grad
    slope = directional_difference(path, tmp_path, upstream, direction)
    assert float((gradient.double().numpy() * direction).sum()) == pytest.approx(slope, rel=2e-2, abs=1e-2)
    with torch.no_grad():
        named_weights(module)["w"].mul_(1.5).add_(0.1)
    target, *_ = onward.write(module, path, tmp_path / "out" / "trained.onnx")
    after = module(torch.from_numpy(ROWS)).detach().numpy()
    np.testing.assert_allclose(under_onnxruntime(target, ROWS), after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", KEPT, **NAMES)
def test_what_the_import_needs_nothing_of_stays_in_the_written_file(change, tmp_path):
    path = saved(change, tmp_path)
    model = load_model(path)
    module = to_module(model, base=tmp_path)
    same, *_ = write_model(module, model, path, tmp_path / "same.onnx")
    assert same.read_bytes() == path.read_bytes()
    with torch.no_grad():
        named_weights(module)["w"].add_(1)
    target, *_ = write_model(module, model, path, tmp_path / "trained.onnx")
    before, after = onnx.load(path), onnx.load(target)
    [place] = [i for i, tensor in enumerate(before.graph.initializer) if tensor.name == "w"]
    assert before != after
    after.graph.initializer[place].CopyFrom(before.graph.initializer[place])
    assert before == after


@pytest.mark.parametrize("change", PUT_RIGHT, **NAMES)
def test_what_nothing_could_work_with_is_in_the_form_of_onnx_in_the_written_file(change, tmp_path):
    path = saved(change, tmp_path)
    target, *_ = onward.write(onward.to_module(path), path, tmp_path / "trained.onnx")
    onnx.checker.check_model(str(target))
    assert np.array_equal(under_onnxruntime(target, ROWS), under_onnxruntime(path, ROWS))


@pytest.mark.parametrize(("change", "why"), REFUSED.items(), **NAMES)
def test_what_can_be_read_in_two_ways_is_refused_by_name_with_a_remedy(change, why, tmp_path):
    path = saved(change, tmp_path)
    assert is_refused_by_the_checker(path)
    under_onnxruntime(path, ROWS)
    for read in (onward.to_module, read_signature):
        with pytest.raises(UnsupportedModel, match=why):
            read(path)


def test_onnxruntime_takes_the_last_of_two_weights_and_the_opset_of_the_model_for_functions(tmp_path):
    # what the refusals say of it
    path = saved(two_weights_of_one_name, tmp_path)
    np.testing.assert_allclose(under_onnxruntime(path, ROWS), np.maximum(ROWS @ (W + 1), 0), rtol=1e-5, atol=1e-6)
    model = plain()
    function_of_another_version(model)
    product = helper.make_node("Unsqueeze", ["h", "axes"], ["h3"])
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axes"))
    model.graph.node.insert(1, product)
    model.graph.node[2].input[0] = "h3"
    model.graph.output[0].type.tensor_type.ClearField("shape")
    h = (ROWS @ W)[None].astype(np.float64)
    along_last = np.exp(h) / np.exp(h).sum(-1, keepdims=True)
    path = saved(lambda _: None, tmp_path, model)
    np.testing.assert_allclose(
        under_onnxruntime(path, ROWS), along_last, rtol=1e-5
    )  # version 12: along all but the first


def test_a_file_without_an_ir_version_is_refused_with_a_remedy(tmp_path):
    path = saved(lambda model: model.ClearField("ir_version"), tmp_path)
    with pytest.raises(Exception, match="Missing model IR version"):
        under_onnxruntime(path, ROWS)
    with pytest.raises(UnsupportedModel, match=r"does not give its IR version.*set model\.ir_version"):
        load_model(path)


# -- that nothing else is touched


@pytest.mark.parametrize(("change", "clause"), (KEPT | PUT_RIGHT).items(), **NAMES)
def test_every_departure_is_said(change, clause, tmp_path):
    model = plain()
    change(model)
    before = copy.deepcopy(model)
    assert [clause in found for found in departures(model)] == [True]
    assert model == before


def test_a_shape_that_is_not_declared_is_inferred_where_it_can_be(tmp_path):
    for change in (no_output_shape, no_output_type):
        [output] = read_signature(saved(change, tmp_path)).outputs
        assert (output.dtype, output.shape) == ("float32", (None, 5))


def test_every_rule_of_the_table_has_a_case():
    for rules, cases in ((beyond_onnx.KEPT, KEPT), (beyond_onnx.PUT_RIGHT, PUT_RIGHT), (beyond_onnx.REFUSED, REFUSED)):
        for rule in rules:
            found = []
            for change in cases:
                model = plain()
                change(model)
                found += rule(model)
            assert found or rule is beyond_onnx._no_ir_version, rule


@pytest.mark.parametrize("name", MODELS)
def test_a_valid_model_departs_in_nothing(name):
    model = MODELS[name]()
    assert departures(model) == [] == beyond_onnx.refused(model)


def test_what_both_refuse_stays_refused(tmp_path):
    def circle(model):
        model.graph.node[0].input[0] = "y"

    def unknown_input(model):
        model.graph.node[1].input[0] = "absent"

    def no_node_computes_an_output(model):
        model.graph.output[0].name = "absent"

    for change in (circle, unknown_input, no_node_computes_an_output):
        path = saved(change, tmp_path)
        with pytest.raises(UnsupportedModel, match="is not valid ONNX"):
            load_model(path)


def test_nodes_are_put_in_order_around_a_branch_that_reads_outer_values(tmp_path):
    model = plain()
    branches = {
        f"{kind}_branch": helper.make_graph(
            [helper.make_node(operator, ["h"], [kind])],
            kind,
            [],
            [helper.make_tensor_value_info(kind, TensorProto.FLOAT, None)],
        )
        for kind, operator in (("then", "Relu"), ("else", "Neg"))
    }
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "condition"))
    # the name of a value inside a branch, later again in the main graph, is no dependence
    nodes = [
        helper.make_node("If", ["condition"], ["b"], **branches),
        helper.make_node("Neg", ["b"], ["n"]),
        helper.make_node("Neg", ["n"], ["y"]),
        model.graph.node[0],
    ]
    nodes = [copy.deepcopy(node) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    path = saved(lambda _: None, tmp_path, model)
    wanted = under_onnxruntime(path, ROWS)
    assert [node.op_type for node in load_model(path).graph.node] == ["MatMul", "If", "Neg", "Neg"]
    np.testing.assert_allclose(onward.to_module(path)(torch.from_numpy(ROWS)).detach(), wanted, rtol=1e-5, atol=1e-6)


def test_large_weights_are_compared_too_also_where_they_are_left_in_the_file(tmp_path):
    def twice(model):
        model.graph.initializer.append(copy.deepcopy(model.graph.initializer[0]))

    wide = 40_000  # 640 kB, which `by_parts` leaves in the file
    path = saved(twice, tmp_path, plain(wide))
    for by_parts in (False, True):
        assert len(load_model(path, by_parts=by_parts).graph.initializer) == 1
    model = plain(wide)
    model.graph.initializer.append(copy.deepcopy(model.graph.initializer[0]))
    model.graph.initializer[1].raw_data = model.graph.initializer[0].raw_data[:-1] + b"\x01"
    path = saved(lambda _: None, tmp_path, model)
    for by_parts in (False, True):
        with pytest.raises(UnsupportedModel, match="'w' is stored twice, differently"):
            load_model(path, by_parts=by_parts)


def test_doctor_says_what_is_beyond_onnx_and_what_becomes_of_it(tmp_path):
    def both(model):
        no_output_shape(model)
        nodes_out_of_order(model)

    found = onward.doctor(saved(both, tmp_path))
    [warning] = [each for each in found.warnings if each.key == "beyond_onnx"]
    assert found.importable
    assert "output 'y' declares no shape" in warning.what
    assert "not in an order" in warning.what
    assert found.outputs == ("y float of any shape",)
    assert not [each for each in onward.doctor(saved(lambda _: None, tmp_path)).warnings if each.key == "beyond_onnx"]
