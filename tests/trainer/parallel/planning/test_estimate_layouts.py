"""What the estimates of one model share changes none of their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onward.trainer.config.run_config import RunConfig
from onward.trainer.model.trainable import open_with_teacher
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.parallel.planning import estimate_layouts as estimator
from onward.trainer.parallel.planning import planner
from onward.trainer.parallel.planning.estimate_layouts import Estimator
from onward.trainer.parallel.planning.layout_estimate import Estimate
from onward.trainer.parallel.planning.planner import plan
from onward.trainer.run.directory import read_config
from tests.support import graphs
from tests.support.runs import make_run, tiny_images, tiny_text

CPU = torch.device("cpu")


class Alone(Estimator):
    """Analyses the graph again for each configuration."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._all = given

    def estimate(self, config: RunConfig) -> Estimate:
        alone = Estimator(*self._all)
        found = alone.estimate(config)
        self.whole = self.whole or alone.whole
        return found


def gpt2(folder: Path, gib: float) -> RunConfig:
    model = build_gpt2(vocab_size=96, sequence_length=12, num_layers=8, num_heads=4, width=32, dropout=0.1)
    return configured(folder, model, tiny_text(40), gib, precision={"compute": "bf16"})


def resnet(folder: Path, gib: float) -> RunConfig:
    return configured(folder, graphs.tiny_resnet(), tiny_images(40), gib)


def configured(folder: Path, model: Any, data: Any, gib: float, **sections: Any) -> RunConfig:
    parallel = {"sizes": "auto", "memory_gib": gib, "convolutions": "always"}
    train = {"global_batch_size": 16, "gradient_accumulation_steps": 2, "num_steps": 1}
    return read_config(
        make_run(folder, model, data, train=train, launch={"num_ranks": 4}, parallel=parallel, **sections)
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", [gpt2, resnet])
def test_auto_plans_the_same_as_if_each_configuration_were_analysed_alone(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = model(tmp_path / "roomy", 1.0)
    found = plan(roomy)
    # with little memory several configurations of a division are estimated: micro-batches, ZeRO, recomputation
    tight = model(tmp_path / "tight", 0.6 * max(memory.peak for memory in found.memory) / 2**30)
    scarce = plan(tight)
    monkeypatch.setattr(planner, "Estimator", Alone)
    assert found == plan(roomy)
    assert scarce == plan(tight)
    assert found.considered != scarce.considered


@pytest.mark.slow
def test_equal_stages_are_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = estimator.dry_run

    def counted(stage: Any, *arguments: Any, **named: Any) -> Any:
        runs.append(stage.index)
        return run(stage, *arguments, **named)

    monkeypatch.setattr(estimator, "dry_run", counted)
    config = gpt2(tmp_path, 1.0)
    parallel = config.parallel.model_copy(update={"sizes": "given", "pipeline": 4, "memory_gib": 0.0})
    four = config.model_copy(update={"parallel": parallel})
    shared = Estimator(open_with_teacher(config).module, CPU)
    first = shared.estimate(four)
    # the last stage has the head and half a layer less; the first has the tables
    assert runs == sorted(set(runs))
    assert len(runs) < 4
    assert shared.estimate(four).ranks[1].memory == first.ranks[1].memory
    # units that are computed again are another stage
    again = four.model_copy(update={"recompute": config.recompute.model_copy(update={"mode": "whole"})})
    before = len(runs)
    assert shared.estimate(again).ranks[1].memory.activations < first.ranks[1].memory.activations
    assert len(runs) > before
