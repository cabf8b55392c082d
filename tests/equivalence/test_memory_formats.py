"""Promise: weights that are stored channels-last train, stop and go on as those in the order of the file do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.verification import verify
from onward.trainer.config.sections.model import GraphConfig
from onward.trainer.model.channels_last import use_channels_last
from onward.trainer.onnx_graph.examples.small_models import build_resnet18
from onward.trainer.onnx_import.driver import to_module
from tests.support.runs import (
    assert_close,
    assert_equal_bits,
    final_tensors,
    losses,
    make_run,
    tiny_images,
    train_run,
    train_until,
)

MODEL = build_resnet18(num_classes=4, image_size=32, width=4)
SETTINGS: dict[str, dict[str, Any]] = {
    "train": {"global_batch_size": 16, "num_steps": 6, "seed": 5, "clip_norm": 0.1},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3},
    "average": {"kind": "ema"},
    "checkpoint": {"period": 3},
}


def test_the_default_stores_weights_of_this_model_channels_last() -> None:
    module = to_module(MODEL)
    use_channels_last(module, GraphConfig(), torch.device("cpu"), rows=8)
    assert any(not weight.is_contiguous() for weight in module.parameters())


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("data", "steps"), [(2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, 1), (1, 2), (2, 1)])]
)
def test_killed_and_resumed_it_has_the_same_bits_and_the_weights_that_conversion_in_each_step_gives(
    data: int, steps: int, tmp_path: Path
) -> None:
    def run_in(name: str, memory_format: str) -> Any:
        train = {**SETTINGS["train"], "gradient_accumulation_steps": steps}
        sections = {**SETTINGS, "train": train, "parallel": {"data": data}, "graph": {"memory_format": memory_format}}
        return make_run(tmp_path / name, MODEL, tiny_images(60, size=32), **sections)

    undisturbed, killed = run_in("undisturbed", "fastest"), run_in("killed", "fastest")
    train_run(undisturbed)
    train_until(killed, ("scalars", 5), rank=data - 1)
    assert train_run(killed).attempt == 2
    assert_equal_bits(final_tensors(killed), final_tensors(undisturbed))
    assert losses(killed) == losses(undisturbed)
    # the order in memory decides how the norm is summed, and which elements the optimizer's kernel computes one by one
    converted = run_in("converted", "channels_last")
    train_run(converted)
    # each step makes rounding greater, on some processors a thousand times in three
    found, wanted = (load(verify(run.checkpoint(3)))[1] for run in (killed, converted))
    assert_close(found, wanted, tolerance=1e-5)
