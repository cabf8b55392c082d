"""What exporters wrote about the tensors of a file is read: kinds, origins, modules; and nothing is guessed."""

import onnx
import pytest
from onnx import helper

from onward.trainer.onnx_import.roles.exporter_records import FOLDED_FROM, SIGNATURE, ExporterRecords, read_records
from tests.support import foreign_files, zoo

HEADER = '<ir_version: 10, opset_import: ["" : 20]'


def parsed(body: str, producer: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'{HEADER}, producer_name: "{producer}">\n{body}')


def dense(*names: str, producer: str = "", node: str = "") -> onnx.ModelProto:
    """A MatMul for each initializer name."""
    values = ["x", *(f"h{i}" for i in range(len(names) - 1)), "y"]
    nodes = [helper.make_node("MatMul", [values[i], name], [values[i + 1]], name=node) for i, name in enumerate(names)]
    model = parsed("dense (float[batch, 2] x) => (float[batch, 2] y) { y = Identity(x) }", producer)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(helper.make_tensor(name, 1, [2, 2], [1.0, 2.0, 3.0, 4.0]) for name in names)
    return model


@pytest.mark.slow
def test_the_kind_and_the_module_of_every_weight_of_a_torch_export_are_read():
    module, records = zoo.build("resnet"), read_records(zoo.export("resnet", "dynamo-20", folded=False))
    for name, _ in module.named_parameters():
        assert (records.kinds[name], records.modules[name]) == ("parameter", name.rpartition(".")[0])
    statistics = [name for name, _ in module.named_buffers() if "running" in name]
    assert statistics
    assert {records.kinds[name] for name in statistics} == {"buffer"}


@pytest.mark.slow
def test_a_folded_tensor_has_the_kind_and_the_module_of_the_weight_it_was_computed_from():
    records = read_records(zoo.export("swin", "dynamo-20", folded=True))
    [product] = [name for name, of in records.originals.items() if of == "block1.qkv.weight"]
    assert (records.kinds[product], records.modules[product]) == ("parameter", "block1.qkv")
    # a table looked up by a buffer of integers changes with the table
    [bias] = [name for name, of in records.folded.items() if of == ("block1.relative_position_index", "block1.table")]
    assert (records.kinds[bias], records.originals[bias]) == ("parameter", "block1.table")
    [mask] = [name for name, of in records.originals.items() if of == "block2.attn_mask"]
    assert records.kinds[mask] == "buffer"
    assert "constant" in {records.kinds[name] for name, of in records.folded.items() if not of}


def test_a_tensor_folded_from_two_weights_has_no_single_original():
    model = dense("val_1")
    model.graph.metadata_props.add(key=SIGNATURE, value="p_a: PARAMETER target='m.a'\np_b: PARAMETER target='m.b'\n")
    value = model.graph.value_info.add(name="val_1")
    value.metadata_props.add(key=FOLDED_FROM, value="['m.a', 'm.b', 'val_0']")
    records = read_records(model)
    assert records.folded == {"val_1": ("m.a", "m.b")}
    assert (records.kinds, records.originals) == ({"val_1": "parameter"}, {})


@pytest.mark.parametrize("text", ["['m.a'", "3", "", "{'m.a': 1}"])
def test_a_record_that_cannot_be_read_gives_no_origin(text):
    model = dense("val_1")
    model.graph.metadata_props.add(key=SIGNATURE, value="p_a: PARAMETER target='m.a'\n")
    model.graph.value_info.add(name="val_1").metadata_props.add(key=FOLDED_FROM, value=text)
    assert read_records(model).originals == {}


def test_a_tensor_whose_origins_have_no_kind_has_none_either():
    model = dense("val_1")
    model.graph.value_info.add(name="val_1").metadata_props.add(key=FOLDED_FROM, value="['m.a']")
    assert read_records(model).kinds == {}


def test_names_of_tensorflow_say_which_tensors_are_variables_and_which_are_constants():
    head, scale = "StatefulPartitionedCall/model_1/head/Cast/ReadVariableOp:0", "scale/mul/ReadVariableOp_1:0"
    model = dense(head, scale, "model_1/norm/Sub/y:0", "model_1/Const_2:0", "const_fold_opt__7", producer="tf2onnx")
    records = read_records(model)
    assert records.variables == {head, scale}
    assert records.modules == {head: "model_1.head", scale: "scale"}
    assert records.kinds == {"model_1/norm/Sub/y:0": "constant", "model_1/Const_2:0": "constant"}
    assert not read_records(dense(head)).variables, "another exporter may mean something else by the name"


def test_names_of_paddle_say_which_tensors_are_variables():
    records = read_records(dense("linear_0.w_0", "helper.constant.3"))
    assert (records.variables, records.modules) == ({"linear_0.w_0"}, {"linear_0.w_0": "linear_0"})
    assert records.kinds == {}, "a statistic has such a name, too"


def test_names_of_nodes_say_the_module_in_a_file_of_torchs_older_exporter():
    model = dense("onnx::MatMul_7", node="/blocks/blocks.0/conv1/conv1.0/MatMul")
    assert read_records(model).modules == {"onnx::MatMul_7": "blocks.0.conv1.0"}


@pytest.mark.parametrize(("weight", "kinds"), [("fc.weight", {"/fc/Constant_1_output_0": "constant"}), ("val_1", {})])
def test_constant_nodes_of_the_torchscript_exporter_hold_no_parameters(weight, kinds):
    """But for a frozen TorchScript module, in which everything is a constant and nothing has a name of its own."""
    model = dense("/fc/Constant_1_output_0", weight, producer="pytorch")
    tensor = model.graph.initializer.pop(0)
    model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    assert read_records(model).kinds == kinds


def test_names_say_which_tensors_are_variables_where_other_tools_removed_the_records_of_torch():
    """onnxruntime's optimiser writes files without metadata."""
    model = dense("h0", "layers.0.weight", "mul_8", "linalg_vector_norm_1", "val_3", producer="pytorch", node="node_mm")
    records = read_records(model)
    assert (records.variables, records.kinds) == ({"h0", "layers.0.weight"}, {})


def test_names_of_skl2onnx_say_what_is_a_weight_of_a_network_and_what_a_document_frequency():
    network, words = (
        onnx.load(foreign_files.FOLDER / f"{name}.onnx") for name in ("skl2onnx-mlp", "text-skl2onnx-words")
    )
    assert set(read_records(network).kinds.values()) == {"parameter"}
    assert read_records(words).kinds == {"idfcst": "constant"}


def test_a_file_in_which_nothing_is_written_has_no_records():
    assert read_records(dense("const_1", "const_2", producer="jax2onnx")) == ExporterRecords()
