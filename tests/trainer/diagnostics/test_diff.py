"""onward diff: exactly what distinguishes two files, and nothing else."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from onward.flows.cli import app
from onward.trainer.diagnostics.diff import compare
from onward.trainer.errors import ConfigError, UnsupportedModel
from onward.trainer.onnx_graph.files.stored_protos import stored_protos
from onward.trainer.onnx_graph.surgery.strip_training import strip_training
from tests.support.graphs import MODELS, tiny_conv_net, tiny_mlp, tiny_transformer


def pair(a: onnx.ModelProto, b: onnx.ModelProto, folder: Path) -> tuple[Path, Path]:
    paths = folder / "a.onnx", folder / "b.onnx"
    for model, path in zip((a, b), paths, strict=True):
        path.write_bytes(model.SerializeToString())
    return paths


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_itself_and_no_other(name, tmp_path):
    same = compare(*pair(MODELS[name](), MODELS[name](), tmp_path))
    assert same.same
    assert same.same_bytes
    assert same.equal_tensors == len(dict(stored_protos(MODELS[name]().graph)))
    other = next(model for key, model in MODELS.items() if key != name)
    assert not compare(*pair(MODELS[name](), other(), tmp_path)).same


def test_the_change_of_a_tensor_is_measured(tmp_path):
    a = tiny_mlp()
    b = copy.deepcopy(a)
    tensor = b.graph.initializer[0]
    was = numpy_helper.to_array(tensor).astype(np.float64)
    now = was.astype(np.float32)
    now[0, 0] += 0.25
    tensor.raw_data = now.tobytes()
    [change] = compare(*pair(a, b, tmp_path)).tensors
    assert (change.name, change.change, change.changed) == (tensor.name, "values", 1)
    assert change.greatest == pytest.approx(0.25, abs=1e-6)
    assert change.relative == pytest.approx(np.linalg.norm(now - was) / np.linalg.norm(was))
    cosine = (now * was).sum() / np.linalg.norm(now.astype(np.float64)) / np.linalg.norm(was)
    assert change.cosine == pytest.approx(cosine)


def test_nodes_that_an_export_strips_are_explained_and_others_are_not(tmp_path):
    a = tiny_transformer(dropout=0.1)
    b = copy.deepcopy(a)
    strip_training(b)
    found = compare(*pair(a, b, tmp_path))
    assert (found.stripped, found.nodes, found.tensors) == ({"Dropout": 7}, (), ())
    assert not found.same
    shown = CliRunner().invoke(app, ["diff", str(found.a), str(found.b)])
    assert shown.exit_code == 1
    assert "7 training-only nodes removed, or without training mode: 7 Dropout" in shown.stdout
    assert "nodes:" not in shown.stdout
    changed = copy.deepcopy(b)
    changed.graph.node[-1].op_type = "Add"
    found = compare(*pair(a, changed, tmp_path))
    assert found.stripped == {"Dropout": 7}
    assert next(change.change for change in found.nodes).startswith("operator ")
    assert not compare(*pair(b, a, tmp_path)).stripped, "what is added was not stripped"


def test_tensors_that_come_go_or_change_their_type_are_named(tmp_path):
    a = tiny_mlp()
    b = copy.deepcopy(a)
    one, two = b.graph.initializer[0], b.graph.initializer[1]
    one.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(one).astype(np.float16), one.name))
    two.name = "renamed"
    found = {change.name: change for change in compare(*pair(a, b, tmp_path)).tensors}
    assert found[one.name].change == "another shape or type"
    assert (found[one.name].before, found[one.name].after) == ("float32 [16, 4]", "float16 [16, 4]")
    assert found["renamed"].change == "added"
    assert found[a.graph.initializer[1].name].change == "removed"


def test_structure_metadata_and_interface_are_compared(tmp_path):
    a = tiny_conv_net()
    b = copy.deepcopy(a)
    b.opset_import[0].version += 1
    helper.set_model_props(b, {"trained": "yes"})
    b.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    pool = next(node for node in b.graph.node if node.op_type == "MaxPool")
    next(attribute for attribute in pool.attribute if attribute.name == "strides").ints[:] = [1, 1]
    relu = next(node for node in b.graph.node if node.op_type == "Relu")
    relu.op_type = "Tanh"
    b.graph.node.append(helper.make_node("Identity", ["logits"], ["again"], name="extra"))
    found = compare(*pair(a, b, tmp_path))
    assert found.model == ("opset of ai.onnx: 20 -> 21", "metadata trained: none -> yes")
    assert found.interface == ("input: image float32 [batch, 3, 8, 8] -> image float32 [4, 3, 8, 8]",)
    changes = {change.node: change.change for change in found.nodes}
    assert changes[pool.name] == "strides [2, 2] -> [1, 1]"
    assert changes[relu.name] == "operator Relu -> Tanh"
    assert changes["extra"] == "added"
    assert len(changes) == 3
    assert found.tensors == ()


def test_a_node_that_reads_something_else_is_told(tmp_path):
    a = tiny_mlp()
    b = copy.deepcopy(a)
    b.graph.node[-1].input[1] = "fc9.weight"
    b.graph.initializer.append(numpy_helper.from_array(np.ones((1, 16), np.float32), "fc9.weight"))
    found = compare(*pair(a, b, tmp_path))
    [change] = found.nodes
    assert "fc2.weight" in change.change
    assert "fc9.weight" in change.change


def test_the_same_in_other_bytes_is_the_same(tmp_path):
    a = tiny_mlp()
    b = copy.deepcopy(a)
    tensor = b.graph.initializer[0]
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.FLOAT, values.shape, values.reshape(-1)))
    found = compare(*pair(a, b, tmp_path))
    assert found.same
    assert not found.same_bytes


def test_tensors_in_other_files_are_compared_by_value(tmp_path):
    inside, outside = tmp_path / "a.onnx", tmp_path / "out" / "b.onnx"
    outside.parent.mkdir()
    onnx.save(tiny_mlp(), inside)
    onnx.save(tiny_mlp(), outside, save_as_external_data=True, location="b.bin", size_threshold=0)
    assert compare(inside, outside).same
    data = bytearray((outside.parent / "b.bin").read_bytes())
    data[3] ^= 1
    (outside.parent / "b.bin").write_bytes(data)
    assert [change.changed for change in compare(inside, outside).tensors] == [1]


def test_weights_in_constant_nodes_are_compared_as_tensors(tmp_path):
    a = tiny_mlp()
    for tensor in list(a.graph.initializer):
        a.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
        a.graph.initializer.remove(tensor)
    b = copy.deepcopy(a)
    held = b.graph.node[0].attribute[0].t
    held.raw_data = (numpy_helper.to_array(held) + np.float32(1)).tobytes()
    found = compare(*pair(a, b, tmp_path))
    assert found.nodes == ()
    assert [change.name for change in found.tensors] == [b.graph.node[0].output[0]]


def test_a_tensor_that_cannot_be_what_it_says_is_refused_by_name(tmp_path):
    for harm, why in (
        (lambda tensor: setattr(tensor, "raw_data", tensor.raw_data[:-4]), "holds 63 values, but its shape takes 64"),
        (lambda tensor: setattr(tensor, "data_type", 99), "is of type number 99"),
    ):
        damaged = tiny_mlp()
        harm(damaged.graph.initializer[0])
        with pytest.raises(UnsupportedModel, match=f"'{damaged.graph.initializer[0].name}' {why}"):
            compare(*pair(tiny_mlp(), damaged, tmp_path))


def test_texts_are_compared_by_what_they_say(tmp_path):
    a = tiny_mlp()
    a.graph.initializer.append(helper.make_tensor("words", TensorProto.STRING, [2], [b"a long one" * 9, b"b"]))
    b = copy.deepcopy(a)
    assert compare(*pair(a, b, tmp_path)).same
    b.graph.initializer[-1].string_data[1] = b"c"
    assert [change.name for change in compare(*pair(a, b, tmp_path)).tensors] == ["words"]


def test_the_command_exits_with_0_1_or_2(tmp_path):
    a, b = pair(tiny_mlp(seed=0), tiny_mlp(seed=1), tmp_path)
    assert CliRunner().invoke(app, ["diff", str(a), str(a)]).exit_code == 0
    shown = CliRunner().invoke(app, ["diff", str(a), str(b), "--json"])
    assert shown.exit_code == 1
    assert {change["name"] for change in json.loads(shown.output)["tensors"]} == {
        "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias",
    }  # fmt: skip
    assert "fc1.weight" in CliRunner().invoke(app, ["diff", str(a), str(b)]).output
    with pytest.raises(ConfigError, match="cannot read"):
        compare(a, tmp_path / "absent.onnx")
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(UnsupportedModel, match="not an ONNX file"):
        compare(a, tmp_path / "text.onnx")


def test_a_comparison_imports_no_torch():
    program = "import sys, onward.trainer.diagnostics.diff; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("element_type", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.BOOL])
def test_values_of_other_types_are_compared_as_numbers(element_type, tmp_path):
    a = tiny_mlp()
    b = copy.deepcopy(a)
    for model, second in ((a, 0.0), (b, 1.0)):
        model.graph.initializer.append(helper.make_tensor("t", element_type, [3], [1.0, second, 1.0]))
    [change] = compare(*pair(a, b, tmp_path)).tensors
    assert (change.name, change.changed, change.greatest) == ("t", 1, 1.0)
    assert change.relative == pytest.approx(0.5**0.5)


@pytest.mark.filterwarnings("error")
def test_infinite_values_and_nan_are_differences(tmp_path):
    a = tiny_mlp()
    b = copy.deepcopy(a)
    for model, values in ((a, [np.inf, 1.0]), (b, [-np.inf, np.nan])):
        model.graph.initializer.append(helper.make_tensor("t", TensorProto.FLOAT, [2], values))
    [change] = compare(*pair(a, b, tmp_path)).tensors
    assert change.changed == 2
    assert np.isnan(change.greatest)


def test_weights_are_listed_before_the_shapes_that_follow_from_them(tmp_path):
    a = tiny_mlp()
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [-1, 4])
    a.graph.initializer.insert(0, shape)
    b = copy.deepcopy(a)
    b.graph.initializer[0].CopyFrom(helper.make_tensor("shape", TensorProto.INT64, [2], [-1, 900]))
    weight = b.graph.initializer[1]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
    assert [each.name for each in compare(*pair(a, b, tmp_path)).tensors] == [weight.name, "shape"]
