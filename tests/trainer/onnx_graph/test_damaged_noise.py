"""Files that draw random numbers are searched before they are checked, and so may be damaged in any way."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.scores_read import losses_of_scores, with_scores
from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.onnx_graph.surgery.stochastic_depth import draws_noise, find_branches, random_nodes


def model(*nodes: onnx.NodeProto, opset: int = 17) -> onnx.ModelProto:
    noise = helper.make_node("RandomUniformLike", ["x"], ["noise"])
    graph = helper.make_graph(
        [noise, *nodes],
        "damaged",
        [helper.make_tensor_value_info("x", 1, ["batch", 4])],
        [helper.make_tensor_value_info("y", 1, ["batch", 4])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Mul", ["noise"], ["y"])],
        [helper.make_node("Mul", ["x", "a"], ["y"]), helper.make_node("Cast", [], ["a"], to=1)],
        [helper.make_node("Cast", ["a"], ["a"], to=1), helper.make_node("Mul", ["x", "a"], ["y"])],
        [helper.make_node("Floor", [], ["a"]), helper.make_node("Mul", ["x", "a"], ["y"])],
        [helper.make_node("Mul", ["x", "noise"], [])],
    ],
    ids=["one operand", "none", "a circle", "no operand of Floor", "no result"],
)
def test_a_damaged_graph_has_no_masks_and_no_error_of_python(nodes: list[onnx.NodeProto]) -> None:
    damaged = model(*nodes)
    assert find_branches(damaged) == []
    assert draws_noise(damaged, None)
    assert random_nodes(damaged)


def test_external_tensors_whose_place_cannot_be_read_stay_where_they_are(tmp_path: Path) -> None:
    damaged = model(helper.make_node("Mul", ["noise", "w"], ["y"]))
    for name, entries in (("w", {"location": "w.bin", "length": "9" * 5000}), ("v", {"location": "../v.bin"})):
        tensor = TensorProto(name=name, data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
        damaged.graph.initializer.append(tensor)
    assert draws_noise(damaged, tmp_path)


def test_an_opset_that_no_number_holds_is_refused_with_its_number(tmp_path: Path) -> None:
    onnx.save(model(helper.make_node("Mul", ["x", "noise"], ["y"]), opset=2**40), tmp_path / "model.onnx")
    read_model(tmp_path / "model.onnx")  # what needs the operators refuses the version
    from onward.trainer.onnx_import.driver import load_model

    with pytest.raises(UnsupportedModel, match=str(2**40)):
        load_model(tmp_path / "model.onnx")


def test_a_file_without_outputs_names_no_scores_and_is_refused_elsewhere(tmp_path: Path) -> None:
    damaged = model(helper.make_node("Mul", ["x", "noise"], ["y"]))
    del damaged.graph.output[:]
    assert losses_of_scores(damaged) == ()
    onnx.save(damaged, tmp_path / "model.onnx")
    config = RunConfig.model_validate(
        {"model": {"path": tmp_path / "model.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 1}}
    )
    assert with_scores(config) is config
