"""A teacher beside the model: every layout trains what one rank trains; checkpoints and files hold nothing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest

from onward.trainer.run.directory import RunDir
from tests.equivalence.layouts import ALONE, MODELS, TOLERANCE, Case, differences, exported, tensors, trained
from tests.support import graphs
from tests.support.runs import events, losses

GPT2, BERT, LLAMA, CONV = MODELS


def teacher(folder: Path, model: onnx.ModelProto, **settings: Any) -> dict[str, Any]:
    """The section [teacher] for a teacher that is written into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "teacher.onnx"
    onnx.save_model(model, path)
    return {"path": str(path), **settings}


def compared(
    model: str, layouts: Sequence[tuple[str, int]], sections: Mapping[str, Any], folder: Path
) -> dict[Case, RunDir]:
    """Train in each layout (with its ZeRO) and on one rank; all must agree."""
    alone, *cases = [Case(model, *each, sections) for each in ((ALONE, 0), *layouts)]
    runs = trained([alone, *cases], folder)
    found = {case.name: differences(runs[case], runs[alone]) for case in cases}
    assert {name: each for name, each in found.items() if max(each.values()) > TOLERANCE} == {}
    return runs


@pytest.mark.mpi
def test_two_replicas_and_two_stages_learn_from_a_teacher_what_one_rank_learns(tmp_path: Path) -> None:
    larger = graphs.tiny_transformer(width=48, seed=7)
    sections = {"teacher": teacher(tmp_path, larger, temperature=3.0, weight=50.0)}
    runs = compared(GPT2, [("dp2", 0), ("pp2", 0)], sections, tmp_path)
    alone = next(iter(runs.values()))
    before, after = (event.fields["values"] for event in events(alone, "evaluation"))
    assert after["evaluation/distillation"] < before["evaluation/distillation"]
    names = {tensor.name for tensor in graphs.tiny_transformer().graph.initializer}
    for run in runs.values():
        assert not [key for key in tensors(run, 3, "") if "teacher" in key or "projection" in key]
        assert exported(run).keys() == names


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_layout_learns_from_a_teacher_what_one_rank_learns(tmp_path: Path) -> None:
    larger, matched = (
        graphs.tiny_transformer(width=48, seed=7),
        {"student": "Add_35", "teacher": "Add_62", "weight": 0.1},
    )
    sections = {"teacher": teacher(tmp_path / "gpt2", larger, match=[matched])}
    wanted = [("dp2", 3), ("tp2", 0), ("pp2 interleaved", 0), ("2x2x2", 0), ("dp2 x pp2", 3)]
    runs = compared(GPT2, wanted, sections, tmp_path / "texts")
    for run in runs.values():
        kept = [key for key in tensors(run, 3, "") if "teacher" in key or "projection" in key]
        assert "projection:1" in kept
        assert not [key for key in kept if "teacher" in key]
        assert exported(run).keys() == {tensor.name for tensor in graphs.tiny_transformer().graph.initializer}
    sections = {"teacher": teacher(tmp_path / "conv", graphs.tiny_resnet(seed=3))}
    wanted = [("dp2", 0), ("tp2", 0), ("pp2", 0), ("dp2 x pp2", 3)]
    compared(CONV, wanted, sections, tmp_path / "images")


@pytest.mark.mpi
@pytest.mark.slow
def test_a_teacher_in_bf16_teaches_alike_in_every_layout_that_divides_no_product(tmp_path: Path) -> None:
    larger = graphs.tiny_transformer(width=48, seed=7)
    in_bf16 = {"teacher": teacher(tmp_path, larger, compute="bf16", weight=50.0)}
    runs = compared(GPT2, [("dp2", 0), ("dp2", 3), ("pp2", 0)], in_bf16, tmp_path / "bf16")
    in_fp32 = compared(GPT2, [], {"teacher": teacher(tmp_path, larger, weight=50.0)}, tmp_path / "fp32")
    (bf16, *_), (fp32,) = runs.values(), in_fp32.values()
    assert losses(bf16)[1] != losses(fp32)[1]
    assert losses(bf16) == pytest.approx(losses(fp32), rel=1e-2)
