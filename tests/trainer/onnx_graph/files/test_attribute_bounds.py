"""Attributes that no operator may have are refused when a file is read, all at once, before anything computes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper, parser

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.files.attribute_bounds import attribute_problems
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.onnx_import.driver import load_model
from tests.support.graphs import tiny_conv_net


@pytest.mark.parametrize(
    ("operator", "attribute", "value", "allowed"),
    [
        ("Conv", "strides", [0, 0], "1 to 2,147,483,647"),
        ("Conv", "dilations", [1, -1], "1 to 2,147,483,647"),
        ("ConvTranspose", "group", 0, "1 to 2,147,483,647"),  # onnxruntime ends its process when it opens the file
        ("MaxPool", "pads", [0, 0, 0, -(2**62)], "0 to 2,147,483,647"),
        ("AveragePool", "kernel_shape", [2**40, 1], "1 to 2,147,483,647"),
        ("Split", "num_outputs", 0, "1 to 2,147,483,647"),
        ("Split", "split", [2, -2], "0 to 2,147,483,647"),
        ("Concat", "axis", 2**62, "-64 to 63"),
        ("SpaceToDepth", "blocksize", -1, "1 to 2,147,483,647"),
        ("TfIdfVectorizer", "ngram_indexes", [2**40], "0 to 16,777,216"),
        ("Pad", "pads", [-(2**40), 0], "-2,147,483,648 to 2,147,483,647"),
    ],
)
def test_an_attribute_outside_its_bounds_is_named_with_its_node_and_what_is_allowed(
    operator: str, attribute: str, value: int | list[int], allowed: str
) -> None:
    node = helper.make_node(operator, ["x"], ["y"], "the node", **{attribute: value})
    model = helper.make_model(helper.make_graph([node], "g", [], []))
    assert list(attribute_problems(model)) == [
        f"node 'the node': {operator} has {attribute} = {value}; allowed is {allowed}"
    ]


def test_an_attribute_of_another_type_is_refused_also_inside_of_functions() -> None:
    wrong = helper.make_node("LinearClassifier", ["x"], ["a", "b"], "l", domain="ai.onnx.ml", intercepts=3)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    function = helper.make_function("own", "f", ["x"], ["a"], [wrong], opsets)
    inner = helper.make_node("Relu", ["x"], ["y"], "r", alpha=1.0)  # no attribute of Relu: the import says so
    model = helper.make_model(
        helper.make_graph([wrong, inner], "g", [], []), functions=[function], opset_imports=opsets
    )
    sentence = "node 'l': LinearClassifier has intercepts of the type INT; it takes FLOATS"
    assert list(attribute_problems(model)) == [sentence, sentence]
    early = helper.make_node("Cast", ["x"], ["y"], "c", to="FLOAT")
    first = helper.make_model(helper.make_graph([early], "g", [], []), opset_imports=[helper.make_opsetid("", 1)])
    assert not list(attribute_problems(first)), "a string in the first opsets"
    cast = helper.make_node("Cast", ["x"], ["y"], "c", to=1)
    for domain in ("ai.onnx", "another"):  # the long name of the same domain; no opset at all
        named = helper.make_model(
            helper.make_graph([cast], "g", [], []), opset_imports=[helper.make_opsetid(domain, 20)]
        )
        assert not list(attribute_problems(named))


def test_what_operators_allow_is_accepted() -> None:
    nodes = [
        helper.make_node("Pad", ["x"], ["a"], pads=[0, -1, 0, -1]),
        helper.make_node("Concat", ["a"], ["b"], axis=-2),
        helper.make_node("QuantizeLinear", ["b"], ["c"], block_size=0),
        helper.make_node("Own", ["c"], ["d"], domain="example.org", group=0),
    ]
    assert not list(attribute_problems(helper.make_model(helper.make_graph(nodes, "g", [], []))))


def test_a_file_is_refused_with_all_of_its_wrong_attributes(tmp_path: Path) -> None:
    model = tiny_conv_net()
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    for node in convolutions:
        kept = [each for each in node.attribute if each.name != "strides"]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("strides", [0, 0]), helper.make_attribute("group", -1)])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModel) as refused:
        read_model(tmp_path / "model.onnx")
    assert len(refused.value.problems) >= 2 * len(convolutions) >= 2


def test_an_attribute_that_is_passed_to_a_function_is_bounded_as_its_operators_are(tmp_path: Path) -> None:
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20, "own" : 1]>
        net (float[batch, 3, 4, 4] x) => (float[batch, 3, m, n] y)
        <float[3, 3, 2, 2] k = {{{", ".join(["0.1"] * 36)}}}>
        {{ y = own.up <number = 0> (x, k) }}
        <domain: "own", opset_import: ["" : 20]>
        up <number> (x, k) => (y) {{ y = ConvTranspose <group : int = @number> (x, k) }}""")
    onnx.save_model(model, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModel, match=r"ConvTranspose has group = 0; allowed is 1 to"):
        load_model(tmp_path / "model.onnx")
