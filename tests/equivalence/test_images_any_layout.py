"""A folder of images, augmented, trains the same weights killed and resumed, and the same to rounding on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onward.trainer.run.directory import RunDir
from tests.support.graphs import tiny_conv_net
from tests.support.images import write_classes
from tests.support.runs import final_tensors, make_run, train_run, train_until

pytestmark = pytest.mark.mpi

AUGMENT = {
    "random_resized_crop": 0.3,
    "flip": 0.5,
    "color_jitter": 0.3,
    "rand_augment": 5,
    "erasing": 0.3,
    "mixup": 0.3,
}


def image_run(folder: Path, augment: dict[str, Any], **parallel: Any) -> RunDir:
    source = write_classes(folder / "images", ("cat", "dog", "eel"), 12)
    return make_run(
        folder,
        tiny_conv_net(image_size=16),
        {},
        data={"source": str(source), "image": {"augment": augment}},
        train={"num_steps": 40, "global_batch_size": 8, "gradient_accumulation_steps": 2},
        optimizer={"learning_rate": 1e-3},
        checkpoint={"period": 5},
        parallel=parallel,
    )


def test_augmented_images_train_alike_on_one_rank_and_two_and_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    weights = {}
    for name, parallel in (("one", {}), ("two", {"data": 2}), ("killed", {"data": 2})):
        run = image_run(tmp_path / name, AUGMENT, **parallel)
        if name == "killed":
            train_until(run, lambda event: event.kind == "scalars" and event.step >= 12)
        train_run(run)
        weights[name] = final_tensors(run)
    assert all(torch.equal(weights["two"][key], weights["killed"][key]) for key in weights["two"])
    for key, value in weights["one"].items():
        torch.testing.assert_close(weights["two"][key], value, rtol=1e-3, atol=1e-5)
