"""The losses of single rows are those that the evaluation adds up, are bounded, and never end an evaluation."""

from __future__ import annotations

import base64
import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from onward.trainer.data.batches.batches import Batch
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.exported_model import _origins, _worst_samples
from onward.trainer.export.measuring import samples as module
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.measuring.samples import MOST_PICTURES, MOST_SHOWN, NUM_ORDINARY, WorstSamples
from onward.trainer.export.model_file import ModelFile
from onward.trainer.export.run_as_read import RunAsRead
from onward.trainer.model.metrics.measured import Measured
from onward.trainer.run.directory import read_config
from onward.trainer.run.recorded.sample_records import LEAST_SCORE, Samples
from tests.equivalence.test_detectors import detector_run
from tests.support.graphs import tiny_conv_net, tiny_mlp, tiny_transformer, tiny_two_outputs
from tests.support.runs import make_run, tiny_images, tiny_text
from tests.trainer.data.images.test_boxes import annotate, pictures


def examined(folder: Path, proto: Any, columns: Any, **sections: Any) -> tuple[Samples, dict[str, float]]:
    """The samples and the metrics of an untrained model."""
    run = make_run(folder, proto, columns, train={"num_steps": 1, "global_batch_size": 8}, **sections)
    data = evaluation_data(run)
    runner = OnnxRunner(ModelFile.read(read_config(run).model.path), data)
    assert data.rows is not None
    samples = WorstSamples(data.new_metrics(runner.outputs).losses, data.rows)
    metrics = runner.evaluate(samples.add)
    return samples.record(runner.runtime), metrics


def test_of_classes_the_mean_is_the_evaluations_loss_and_the_worst_rows_have_their_images(tmp_path: Path) -> None:
    images = tiny_images(200)
    found, metrics = examined(tmp_path, tiny_conv_net(), images)
    assert found.mean == pytest.approx(metrics["evaluation/loss"], rel=1e-5)
    assert found.num_rows == found.of_rows == sum(found.counts)
    assert found.why_not_all == ""
    assert len(found.worst) == MOST_SHOWN
    assert all(one.loss >= two.loss for one, two in itertools.pairwise(found.worst))
    for sample in found.worst:
        assert sample.num_right == (sample.target == sample.predicted)
        assert Image.open(io.BytesIO(base64.b64decode(sample.image))).size == (8, 8)
        assert sample.inputs == {"label": str(int(sample.target or 0))}


def test_of_a_regression_the_pairs_give_the_metrics(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(100, 4)).astype(np.float32)
    columns = {"features": features, "label": features.sum(1, keepdims=True)}
    found, metrics = examined(tmp_path, tiny_mlp(), columns, model={"loss": "mse"})
    errors = [predicted - target for target, predicted in found.values]
    assert len(errors) == found.num_rows
    assert np.mean(np.abs(errors)) == pytest.approx(metrics["evaluation/mae"], rel=1e-5)
    worst = found.worst[0]
    assert worst.num_right is None
    assert worst.loss == pytest.approx(max(error**2 for error in errors), rel=1e-4)
    assert len(worst.inputs["features"].split()) == 4


def test_of_sequences_each_row_has_the_share_of_targets_that_are_right(tmp_path: Path) -> None:
    found, metrics = examined(tmp_path, tiny_transformer(), tiny_text(60))
    assert found.mean == pytest.approx(metrics["evaluation/loss"], rel=1e-5)  # all rows have as many targets
    assert {sample.num_targets for sample in found.worst} == {12}
    assert found.worst[0].target is None
    assert found.values == ()


def test_of_several_losses_it_is_their_weighted_sum(tmp_path: Path) -> None:
    columns = {
        "features": np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32),
        "kind": np.arange(60) % 2,
        "size": np.linspace(0, 1, 360, dtype=np.float32).reshape(60, 6),
    }
    proto = tiny_two_outputs()
    one, two = (output.name for output in proto.graph.output)
    losses = [{"output": one, "label": "kind"}, {"output": two, "label": "size", "name": "mse", "weight": 0.5}]
    found, metrics = examined(tmp_path, proto, columns, loss=losses)
    assert found.mean == pytest.approx(metrics["evaluation/loss"], rel=1e-4)


def test_rows_and_time_are_bounded_and_the_record_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 10)
    found, _ = examined(tmp_path / "rows", tiny_conv_net(), tiny_images(200))
    assert 10 <= found.num_rows < found.of_rows
    assert found.why_not_all == "the losses of at most 10 rows are computed"
    monkeypatch.setattr(module, "BUDGET_S", 0.0)
    found, _ = examined(tmp_path / "time", tiny_conv_net(), tiny_images(200))
    assert found.num_rows < found.of_rows
    assert found.why_not_all == "the time for the losses of single rows is 0 s"


def test_an_error_ends_the_losses_of_rows_and_not_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> float:
        raise ValueError("boom")

    monkeypatch.setattr(WorstSamples, "_loss", broken)
    found, metrics = examined(tmp_path, tiny_conv_net(), tiny_images(200))
    assert metrics["evaluation/loss"] > 0
    assert (found.num_rows, found.worst) == (0, ())
    assert found.why_not_all == "the loss of single rows cannot be computed: ValueError: boom"


def test_pictures_have_their_own_colours_and_rows_their_files(tmp_path: Path) -> None:
    colours = {"red": (250, 10, 20), "blue": (10, 30, 240)}
    for name, colour in colours.items():
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (8, 8), colour).save(tmp_path / "pictures" / name / f"{number:02d}.png")
    run = make_run(
        tmp_path / "run",
        tiny_conv_net(num_classes=2),
        {},
        data={
            "source": str(tmp_path / "pictures"),
            "image": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
        },
        train={"num_steps": 1, "global_batch_size": 8},
    )
    opened = RunAsRead.of(run)
    data = evaluation_data(run, opened=opened)
    assert data.rows is not None
    runner = OnnxRunner(ModelFile.read(opened.source.path), data)
    samples = _worst_samples(opened, data.new_metrics(runner.outputs).losses, data.rows)
    runner.evaluate(samples.add)
    found = samples.record(runner.runtime, _origins(opened, data, samples.shown_rows))
    assert found.worst
    for sample in found.worst:
        name = ("blue", "red")[int(sample.target or 0)]
        assert Image.open(io.BytesIO(base64.b64decode(sample.image))).getpixel((3, 3)) == colours[name]
        assert Path(sample.where).parent.name == name, sample.where


def test_images_with_boxes_show_objects_and_what_each_file_finds(tmp_path: Path) -> None:
    annotate(tmp_path, pictures(tmp_path, 60))
    run = detector_run(tmp_path / "run", tmp_path)
    opened = RunAsRead.of(run)
    data = evaluation_data(run, opened=opened)
    runner = OnnxRunner(ModelFile.read(opened.source.path), data)
    losses = data.new_metrics(runner.outputs).losses
    assert data.rows is not None
    samples = _worst_samples(opened, losses, data.rows)
    runner.evaluate(samples.add)

    def nothing(batch: Batch, start: int, stop: int) -> list[Tensor]:
        return [torch.zeros_like(each) for each in runner.outputs_of(batch, start, stop)]

    found = samples.record(runner.runtime, before=nothing, after=runner.outputs_of)
    # also images without objects have a loss
    assert found.num_rows == data.rows.num_rows
    assert (len(found.worst), len(found.ordinary)) == (MOST_PICTURES, NUM_ORDINARY)
    shown = [*found.worst, *found.ordinary]
    assert len({sample.row for sample in shown}) == len(shown)
    assert sorted(samples.shown_rows) == sorted(sample.row for sample in shown)
    for sample in shown:
        batch = next(each for each in data.batches() if sample.row in each.rows)
        place = batch.rows.tolist().index(sample.row)
        own_labels = batch.labels[0]
        assert own_labels is not None
        wanted = [row for row in own_labels[place].reshape(-1, 6).tolist() if row[0] >= 0]
        assert sample.objects is not None
        assert [[box.of_class, *box.corners] for box in sample.objects] == [
            pytest.approx(row[:5], abs=1e-4) for row in wanted
        ]
        outputs = runner.outputs_of(batch, place, place + 1)
        boxes = Measured(losses.each[0], outputs, own_labels[place : place + 1], task="objects").objects[0][0]
        best = [pytest.approx(score, abs=1e-5) for score in boxes[:, 1].tolist()]
        assert [box.score for box in sample.after] == best[: len(sample.after)]
        assert len(sample.after) == max(len(wanted), int((boxes[:, 1] >= LEAST_SCORE).sum()))
        # equal scores of two classes and of no object
        assert [box.score for box in sample.before] == [pytest.approx(1 / 3)] * 6
        assert Image.open(io.BytesIO(base64.b64decode(sample.image))).size == sample.image_size == (48, 48)
