"""A whole run with a moving average of the weights: measured in MLflow, chosen by it, exported with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.verification import verify
from onward.trainer.distributed.weights import averages_in
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, read_record
from tests.support.runs import events
from tests.support.workshop import Workshop

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("workshop"))
    yield workshop
    workshop.close()


def test_the_average_is_in_mlflow_chooses_the_checkpoint_and_is_the_file_that_comes_out(workshop: Workshop) -> None:
    settings = ["average.kind=ema", "average.decay=0.9", "checkpoint.best_metric=evaluation/average/loss"]
    settings += ["train.num_steps=60", "train.evaluation_period=20", "checkpoint.period=20", "checkpoint.keep_newest=9"]
    settings += ["optimizer.layer_decay=0.9", 'export.variants=["fp16_compute"]']
    facts = workshop.onward("run", str(workshop.root / "config.toml"), *settings)
    run = RunDir(Path(facts["directory"]))
    exported = read_record(run.exported, ExportedModel)
    evaluated = {event.step: event.values for event in events(run, "evaluation")}
    best = min((step for step in evaluated if step), key=lambda step: evaluated[step]["evaluation/average/loss"])
    assert exported.step == best
    assert exported.after["evaluation/loss"] == pytest.approx(evaluated[best]["evaluation/average/loss"], rel=1e-4)
    (mlflow_run,) = workshop.mlflow_runs(run)
    assert {"evaluation/loss", "evaluation/average/loss"} <= mlflow_run.data.metrics.keys()
    averages = averages_in(load(verify(run.checkpoint(best)))[1], "ema")
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(exported.path).graph.initializer}
    assert averages
    for name, average in averages.items():
        np.testing.assert_array_equal(stored[name], average.numpy(), err_msg=name)
    (half,) = exported.variants
    assert not half.refused


def test_contradictions_are_refused_at_once_before_anything_is_launched(workshop: Workshop) -> None:
    settings = ["average.decay=0.9", "export.weights=average", "optimizer.layer_decay=2"]
    for wrong, expected in ((settings[:2], ("average.decay", "export.weights")), (settings[2:], ("layer_decay",))):
        refused = workshop.start("run", str(workshop.root / "config.toml"), *wrong)
        _, error = refused.communicate()
        assert refused.returncode == 2
        for part in expected:
            assert part in error
