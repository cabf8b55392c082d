"""A teacher beside the model: every layout trains what one rank trains; checkpoints and files hold nothing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.digits import digits_block
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.exported_model import Checkpoint, export
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.run.directory import RunDir
from tests.equivalence.layouts import ALONE, MODELS, TOLERANCE, Case, differences, exported, tensors, trained
from tests.support import graphs
from tests.support.runs import (
    Array,
    assert_equal_bits,
    events,
    final_tensors,
    losses,
    make_run,
    tiny_text,
    train_run,
    train_until,
)

GPT2, BERT, LLAMA, CONV = MODELS
LARGER = graphs.tiny_transformer(width=48, seed=7)
MATCHED = {"Add_35": ["Add_62", 0.1]}
"""The results of the first layer of the model, 32 wide, and of the second layer of the teacher, 48 wide."""


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


# -- better than without: the example of docs/how-to/distil.md, shortened


def perceptron(weights: Mapping[str, Array]) -> onnx.ModelProto:
    """`pixels` [batch, 64] -> `logits` [batch, 10], with one hidden layer."""
    g = GraphWriter("perceptron")
    names = {name: g.weight(name, value) for name, value in weights.items()}
    hidden = g.op("Relu", g.op("Gemm", g.input("pixels", ("batch", 64)), names["w1"], names["b1"]))
    g.op("Gemm", hidden, names["w2"], names["b2"], outputs="logits")
    g.output("logits", ("batch", 10))
    return g.model()


def untrained(hidden: int, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    shapes = {"w1": (64, hidden), "b1": (hidden,), "w2": (hidden, 10), "b2": (10,)}
    return {name: (random.normal(size=size) / size[0] ** 0.5).astype(np.float32) for name, size in shapes.items()}


def trained_by_torch(pixels: Array, label: Array) -> dict[str, Array]:
    """The weights of a wide network that knows all labels."""
    weights = {name: torch.from_numpy(value).requires_grad_() for name, value in untrained(128, 1).items()}
    optimizer = torch.optim.Adam(weights.values(), lr=0.01)
    inputs, targets = torch.from_numpy(pixels), torch.from_numpy(label)
    for _ in range(100):
        logits = (inputs @ weights["w1"] + weights["b1"]).relu() @ weights["w2"] + weights["b2"]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach().numpy() for name, value in weights.items()}


@pytest.mark.mpi
@pytest.mark.slow
def test_a_student_with_few_labels_is_better_with_a_teacher_on_one_rank_and_over_two(tmp_path: Path) -> None:
    block = digits_block(DataConfig(source="digits", image_size=8))
    pixels, label = np.asarray(block.cells["image"])[:, 0].reshape(-1, 64), np.asarray(block.cells["label"])
    rows = np.random.default_rng(0).permutation(len(label))
    train, held_out = rows[:1296], rows[1296:]
    np.savez(tmp_path / "held-out.npz", pixels=pixels[held_out], label=label[held_out])
    few = {"pixels": pixels[train], "label": np.where(np.arange(1296) < 60, label[train], -100)}
    given = teacher(tmp_path, perceptron(trained_by_torch(pixels[train], label[train])), unlabelled=True)
    layouts: dict[str, dict[str, int]] = {"alone": {}, "1": {}, "data 2": {"data": 2}, "pipeline 2": {"pipeline": 2}}
    accuracy = {}
    for name, layout in layouts.items():
        run = make_run(
            tmp_path / name,
            perceptron(untrained(16, 10)),
            few,
            data={"evaluation_source": str(tmp_path / "held-out.npz")},
            teacher={} if name == "alone" else given,
            train={
                "num_epochs": 10,
                "global_batch_size": 48,
                "gradient_accumulation_steps": 4 // layout.get("data", 1),
            },
            optimizer={"learning_rate": 5e-3},
            parallel=layout,
        )
        accuracy[name] = train_run(run).metrics["evaluation/accuracy"]
        if name != "alone":
            assert losses(run) == pytest.approx(losses(RunDir(tmp_path / "1" / "run")), rel=1e-4)
    # over five seeds and 30 epochs it was 0.82 to 0.85 alone, and 0.97 to 0.98 with a teacher
    assert accuracy["1"] > accuracy["alone"] + 0.05, accuracy
    assert [accuracy["data 2"], accuracy["pipeline 2"]] == pytest.approx([accuracy["1"]] * 2, abs=0.003)


# -- every layout


@pytest.mark.mpi
@pytest.mark.slow
def test_two_replicas_and_two_stages_learn_from_a_teacher_what_one_rank_learns(tmp_path: Path) -> None:
    sections = {"teacher": teacher(tmp_path, LARGER, temperature=3.0, weight=50.0)}
    runs = compared(GPT2, [("dp2", 0), ("pp2", 0)], sections, tmp_path)
    alone = next(iter(runs.values()))
    before, after = (event.values for event in events(alone, "evaluation"))
    assert after["evaluation/distillation"] < before["evaluation/distillation"]
    names = {tensor.name for tensor in graphs.tiny_transformer().graph.initializer}
    for run in runs.values():
        assert not [key for key in tensors(run, 3, "") if "teacher" in key or "projection" in key]
        assert exported(run).keys() == names


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_layout_learns_from_a_teacher_what_one_rank_learns(tmp_path: Path) -> None:
    sections = {"teacher": teacher(tmp_path / "gpt2", LARGER, match=MATCHED)}
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
def test_soft_labels_that_are_computed_once_teach_what_the_teacher_beside_the_model_teaches(tmp_path: Path) -> None:
    sections = {"teacher": teacher(tmp_path, LARGER, match=MATCHED)}
    (beside,) = compared(GPT2, [], sections, tmp_path / "beside").values()
    sections["teacher"]["cache"] = "float32"
    cases = [Case(GPT2, layout, 0, sections) for layout in (ALONE, "dp2", "pp2", "tp2")]
    for run in trained(cases, tmp_path / "cached").values():
        found = differences(run, beside)
        assert max(found[name] for name in ("loss", "evaluation", "gradients", "parameters")) <= TOLERANCE, found
        assert len(list((run.root / "teacher").glob("*.npy"))) == 4
    sections["teacher"]["cache"] = "float16"
    (halves,) = compared(GPT2, [], sections, tmp_path / "halves").values()
    assert losses(halves) == pytest.approx(losses(beside), rel=1e-3)


# -- killed and resumed


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["none", "float32"])
def test_a_run_with_a_teacher_that_is_killed_and_resumed_ends_with_the_same_bits(tmp_path: Path, cache: str) -> None:
    section = teacher(tmp_path, LARGER, match=MATCHED, cache=cache)
    settings: dict[str, Any] = {
        "train": {"global_batch_size": 8, "num_steps": 16, "gradient_accumulation_steps": 2, "seed": 5},
        "parallel": {"data": 2},
        "checkpoint": {"period": 5},
        "teacher": section,
        "graph": {"dropout": 0.2},
    }
    student, rows = graphs.tiny_transformer(), tiny_text(60)
    undisturbed = make_run(tmp_path / "undisturbed", student, rows, **settings)
    train_run(undisturbed)
    killed = make_run(tmp_path / "killed", student, rows, **settings)
    for step in (3, 7):
        train_until(killed, lambda event, step=step: event.step >= step and event.kind == "scalars", rank=step % 2)
    assert train_run(killed).attempt == 3
    assert_equal_bits(final_tensors(killed), final_tensors(undisturbed))
    assert losses(killed) == losses(undisturbed)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_soft_label_that_has_changed_on_the_disk_is_refused(tmp_path: Path) -> None:
    section = teacher(tmp_path, LARGER, cache="float16")
    run = make_run(tmp_path, graphs.tiny_transformer(), tiny_text(20), teacher=section, train={"num_steps": 2})
    train_run(run)
    file = next((run.root / "teacher").glob("train-*.npy"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(AssertionError, match="does not have the content that was written"):
        train_run(run)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_student_learns_without_labels_and_its_file_is_exported(tmp_path: Path) -> None:
    larger = graphs.tiny_mlp(outputs=3, hidden=48, seed=6)
    run = make_run(
        tmp_path,
        graphs.tiny_mlp(outputs=3),
        {"features": np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)},
        model={"loss": "teacher"},
        teacher=teacher(tmp_path, larger, loss="mse"),
        train={"num_steps": 60, "global_batch_size": 32},
        optimizer={"learning_rate": 0.02},
        export={"promote_if": "never"},
    )
    metrics = train_run(run).metrics
    first = events(run, "evaluation")[0].values
    assert metrics["evaluation/loss"] == metrics["evaluation/distillation"] < 0.2 * first["evaluation/loss"]
    trained_weights = Checkpoint(step=60, weights=tensors(run, 60, "model/"))
    made = export(run, trained_weights, data=evaluation_data(run), folder=tmp_path / "export")
    assert made.after == {}
    assert made.changed == 4
    assert [value.name for value in onnx.load(made.path).graph.output] == ["prediction"]
