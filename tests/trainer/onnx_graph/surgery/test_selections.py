"""Of a detector that chooses among its boxes, the tensors before the choice are proposed to be trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onward.trainer.config.loading import load_config
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.surgery.selections import selection_before
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.proposal.propose import propose

SPLIT = "t = Transpose<perm=[0, 2, 1]>(r)  boxes, c = Split<axis=2>(t, parts)  p = Sigmoid(c)"
SCORES = "scores = Transpose<perm=[0, 2, 1]>(p)"
NMS = "indices = NonMaxSuppression(boxes, scores, most, overlap, least)"
CHOSEN = "at = Gather<axis=1>(indices, third)  own = Squeeze(boxes, first)  chosen = Gather<axis=0>(own, at)"
TOP = (
    "best = ReduceMax<axes=[1], keepdims=0>(scores)  v, i = TopK<axis=1>(best, most)  own = Squeeze(boxes, first)  "
    "at = Squeeze(i, first)  chosen = Gather<axis=0>(own, at)"
)
STORED = {
    "w": np.random.default_rng(0).normal(size=(6, 3, 3, 3)).astype(np.float32),
    "shape": np.array([1, 6, 64]),
    "parts": np.array([4, 2]),
    "most": np.array([10]),
    "overlap": np.float32([0.5]),
    "least": np.float32([0.1]),
    "first": np.array([0]),
    "third": np.array(2),
    "half": np.float32(0.5),
    "head": np.ones((4, 5), np.float32),
}


def saved(folder: Path, output: str, *parts: str) -> Path:
    body = "\n".join("  ".join(parts).split("  "))
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 3, 8, 8] image) => ({output}) {{
            f = Conv<kernel_shape=[3, 3], pads=[1, 1, 1, 1]>(image, w)
            r = Reshape(f, shape)
            {body}
        }}""")
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(each), name) for name, each in STORED.items())
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "d.npz", image=np.zeros((10, 3, 8, 8), np.float32), label=np.zeros((10, 4), np.float32))
    return folder / "m.onnx"


ONE = "set model.output to 't', the tensor before {}"
TWO = (
    "set model.output to 'decoded' or 'scores', the tensors before NonMaxSuppression; a [[loss]] for each of them "
    "trains both"
)
INDICES, BOXES = "int64[n, 3] indices", "float[n, 4] chosen"
DECODED = NMS.replace("(boxes", "(decoded")


@pytest.mark.parametrize(
    ("output", "parts", "remedy"),
    [
        (INDICES, (SPLIT, SCORES, NMS), ONE.format("NonMaxSuppression")),
        (BOXES, (SPLIT, SCORES, NMS, CHOSEN), ONE.format("NonMaxSuppression")),
        (BOXES, (SPLIT, SCORES, TOP), ONE.format("TopK")),
        (INDICES, (SPLIT, SCORES, "decoded = Mul(boxes, half)", DECODED), TWO),
    ],
)
def test_the_tensors_before_a_choice_are_proposed_and_can_be_trained(
    output: str, parts: tuple[str, ...], remedy: str, tmp_path: Path
) -> None:
    path, name = saved(tmp_path, output, *parts), output.rpartition(" ")[2]
    model = load_model(path)
    found = selection_before(model.graph, name)
    assert found is not None
    assert found.remedy == remedy
    part = extract_subgraph(model, ModelConfig(path=path, output=found.tensors))
    assert to_module(part).output_names == found.tensors
    assert remedy in [warning.remedy for warning in diagnose(path).warnings]


def test_indices_are_refused_and_chosen_boxes_are_told_by_init_and_where_something_does_not_fit(tmp_path: Path) -> None:
    data, train = {"source": str(tmp_path / "d.npz")}, {"num_steps": 1}

    def problems(path: Path) -> list[str]:
        model = {"path": str(path), "loss": "cross_entropy"}
        with pytest.raises(ConfigError) as raised:
            load_config({"model": model, "data": data, "train": train}, check=check_files_and_data)
        return list(raised.value.problems)

    path = saved(tmp_path, INDICES, SPLIT, SCORES, NMS)
    assert problems(path) == [
        "the loss cannot read output 'indices' (int64), which has no gradient; " + ONE.format("NonMaxSuppression")
    ]
    with pytest.raises(ConfigError, match=r"set model\.output to 't', the tensor before NonMaxSuppression"):
        propose(path, data["source"])
    path = saved(tmp_path, BOXES, SPLIT, SCORES, NMS, CHOSEN)
    told = (
        "output 'chosen' holds what NonMaxSuppression has chosen, not a result for each row; no gradient reaches how "
        "it chooses; " + ONE.format("NonMaxSuppression")
    )
    assert problems(path)[-1] == told
    assert told in propose(path, data["source"]).notes


def test_a_choice_in_the_middle_of_a_network_is_a_part_of_it(tmp_path: Path) -> None:
    path = saved(tmp_path, "float[n, 5] y", SPLIT, SCORES, NMS, CHOSEN, "y = MatMul(chosen, head)")
    model = load_model(path)
    assert selection_before(model.graph, "y") is None
    assert selection_before(model.graph, "chosen") is not None


def test_a_top_k_of_scores_alone_is_no_choice_among_boxes(tmp_path: Path) -> None:
    path = saved(tmp_path, "float[1, 2, k] v", SPLIT, SCORES, "v, i = TopK<axis=2>(scores, most)")
    assert selection_before(load_model(path).graph, "v") is None
