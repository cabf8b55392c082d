"""The part that is trained begins where numbers begin; what is in front is found from the types of the values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.files.index import Index
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import (
    begin_at_numbers,
    find_preprocessing,
    preprocessing_model,
)
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph
from tests.support.graphs import MODELS

FOREIGN = Path(__file__).resolve().parents[3] / "support" / "foreign"
HEAD = '<ir_version: 10, opset_import: ["" : 20, "ai.onnx.ml" : 4]>\n'
WEIGHTS = "<float[3, 2] table = {1, 2, 3, 4, 5, 6}, float[2, 2] w = {1, 2, 3, 4}>"
EMBEDDING_IN_FRONT = (
    HEAD
    + f"""g (string[N] text) => (float[N, 2] y) {WEIGHTS} {{
    parts = SplitToSequence <axis = 0> (text)
    vectors = SequenceMap <body = each (string[1] word) => (float[1, 2] vector) {{
        id = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_int64s = [1, 2], default_int64 = 0> (word)
        vector = Gather (table, id)
    }}> (parts)
    joined = ConcatFromSequence <axis = 0> (vectors)
    y = MatMul (joined, w)
}}"""
)


def settings(**changes: object) -> ModelConfig:
    return ModelConfig(path=Path("model.onnx"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "output", "nodes", "start"),
    [
        ("text-sentences", "", ["StringNormalizer", "StringSplit", "LabelEncoder"], ["ids"]),
        ("text-columns", "", ["OneHotEncoder", "RegexFullMatch"], ["encoded", "is_new"]),
        (
            "text-skl2onnx-words",
            "probabilities",
            ["Tokenizer", "Flatten", "TfIdfVectorizer"],
            ["output"],
        ),
        (
            "text-skl2onnx-columns",
            "add_result1",
            ["Gather", "LabelEncoder", "OneHotEncoder"],
            ["label_encoder", "color01out"],
        ),
    ],
)
def test_the_trained_part_begins_behind_the_last_strings(
    name: str, output: str, nodes: list[str], start: list[str]
) -> None:
    model = onnx.load(FOREIGN / f"{name}.onnx")
    found = find_preprocessing(model, settings(output=output))
    assert found is not None
    assert [node.op_type for node in found.nodes] == nodes
    assert list(found.tensors) == start
    part = extract_subgraph(model, begin_at_numbers(model, settings(output=output)))
    stored = Index(model.graph).stored
    assert not set(nodes) & {node.op_type for node in part.graph.node}
    # every weight is behind, and the front runs alone
    assert {n for n, t in stored.items() if t.data_type == 1} == {
        t.name for t in part.graph.initializer if t.data_type == 1
    }
    front = onnxruntime.InferenceSession(preprocessing_model(model, found).SerializeToString())
    assert [value.name for value in front.get_outputs()] == start


def test_numbers_in_front_of_the_network_are_read_as_they_are() -> None:
    signature = read_training_signature(ModelConfig(path=FOREIGN / "text-columns.onnx"))
    assert [info.name for info in signature.inputs] == ["size", "encoded", "is_new"]
    assert [info.name for info in signature.fed] == ["color", "size", "code"]
    assert signature.computed == ("encoded", "is_new")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_numbers_has_no_pre_processing(name: str) -> None:
    assert find_preprocessing(MODELS[name](), settings()) is None


def test_a_given_start_wins() -> None:
    model = onnx.load(FOREIGN / "text-sentences.onnx")
    given = settings(start=("mean",))
    assert begin_at_numbers(model, given) is given


def test_shapes_of_strings_stay_in_front_with_what_they_shape() -> None:
    model = parser.parse_model(
        HEAD
        + f"""g (string[N, 2] text) => (float[N, 2] y) {WEIGHTS} {{
        values = ai.onnx.ml.LabelEncoder <keys_strings = ["a"], values_floats = [1.5]> (text)
        shape = Shape (text)
        shaped = Reshape (values, shape)
        y = MatMul (shaped, w)
    }}"""
    )
    assert begin_at_numbers(model, settings()).start == ("shaped",)


def test_numbers_that_are_made_into_strings_are_in_front_too() -> None:
    model = parser.parse_model(
        HEAD
        + f"""g (int64[N, 2] code) => (float[N, 2] y) {WEIGHTS} {{
        text = Cast <to = 8> (code)
        values = ai.onnx.ml.LabelEncoder <keys_strings = ["7"], values_floats = [1.5]> (text)
        y = MatMul (values, w)
    }}"""
    )
    assert begin_at_numbers(model, settings()).start == ("values",)


TREE = """ai.onnx.ml.TreeEnsembleRegressor <
    n_targets = 1, nodes_treeids = [0, 0, 0], nodes_nodeids = [0, 1, 2], nodes_featureids = [0, 0, 0],
    nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values = [0.5, 0.0, 0.0], nodes_truenodeids = [1, 0, 0],
    nodes_falsenodeids = [2, 0, 0], target_treeids = [0, 0], target_nodeids = [1, 2], target_ids = [0, 0],
    target_weights = [1.0, 2.0]>"""


def test_trees_are_in_front_of_the_network_that_reads_them() -> None:
    model = parser.parse_model(
        HEAD
        + f"""g (float[N, 1] x) => (float[N, 2] y) {WEIGHTS} {{
        score = {TREE} (x)
        both = Concat <axis = 1> (x, score)
        y = MatMul (both, w)
    }}"""
    )
    found = find_preprocessing(model, settings())
    assert found is not None
    assert begin_at_numbers(model, settings()).start == ("score",)
    front = onnxruntime.InferenceSession(preprocessing_model(model, found).SerializeToString())
    scores = front.run(None, {"x": np.array([[0.25], [0.75]], np.float32)})[0]
    assert scores.tolist() == [[1.0], [2.0]]


def test_trees_behind_a_weight_and_trees_alone_are_refused() -> None:
    model = parser.parse_model(
        HEAD
        + f"""g (float[N, 2] x) => (float[N, 1] y) {WEIGHTS} {{
        features = MatMul (x, w)
        y = {TREE} (features)
    }}"""
    )
    with pytest.raises(UnsupportedModel, match=r"needed for strings, sequences or trees.*computes with the weight 'w'"):
        begin_at_numbers(model, settings())
    with pytest.raises(UnsupportedModel, match="trees and support vectors have no weights that a gradient changes"):
        begin_at_numbers(model, settings(freeze=("w",)))


def test_a_weight_among_the_strings_is_refused_unless_it_is_frozen() -> None:
    model = parser.parse_model(EMBEDDING_IN_FRONT)
    with pytest.raises(UnsupportedModel) as caught:
        begin_at_numbers(model, settings())
    assert "SequenceMap 'vectors' is needed for strings" in str(caught.value)
    assert "weight 'table' [3, 2]: freeze it (model.freeze = ['table'])" in str(caught.value)
    behind = begin_at_numbers(model, settings(freeze=("table",)))
    # a pattern that matches nothing in the trained part would be refused there
    assert (behind.start, behind.freeze) == (("joined",), ())
    found = find_preprocessing(model, settings(freeze=("table",)))
    assert found is not None
    front = onnxruntime.InferenceSession(preprocessing_model(model, found).SerializeToString())
    assert front.run(None, {"text": np.array(["b", "?"], object)})[0].tolist() == [[5, 6], [1, 2]]


def test_an_output_of_strings_is_refused_with_the_outputs_of_numbers() -> None:
    model = parser.parse_model(
        HEAD
        + f"""g (string[N, 2] text) => (string[N] name, float[N, 2] y) {WEIGHTS} {{
        values = ai.onnx.ml.LabelEncoder <keys_strings = ["a"], values_floats = [1.5]> (text)
        y = MatMul (values, w)
        best = ArgMax <axis = 1, keepdims = 0> (y)
        name = ai.onnx.ml.LabelEncoder <keys_int64s = [0, 1], values_strings = ["no", "yes"]> (best)
    }}"""
    )
    with pytest.raises(UnsupportedModel, match=r"cannot read output 'name' \(string\).*set model\.output to 'y'"):
        begin_at_numbers(model, settings())
    assert begin_at_numbers(model, settings(output="y")).start == ("values",)
