"""On the device: killed and resumed gives the same bits under deterministic algorithms; checkpoints fit any device."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.run.directory import RunDir
from tests.equivalence.layouts import MODELS
from tests.gpu import ranks
from tests.gpu.device import DEVICE, REASON, REHEARSAL, available
from tests.support import graphs, zoo
from tests.support.runs import Array, assert_equal_bits, final_tensors, losses, make_run, tiny_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason=REASON)]

Record = Callable[[str, object], None]
DETERMINISTIC = {"deterministic": True} if "deterministic" in TrainConfig.model_fields else {}
NUM_STEPS = 6
ZOO = ("resnet", "unet", "swin", "convnext", "t5", "lstm_tagger_of_7", "mamba", "detr", "gathered_experts", "siamese")
NAMES = ("GPT-2: fused QKV, tied",) if REHEARSAL else (*MODELS, *ZOO)
SECTIONS: dict[str, Any] = {
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.01},
    "checkpoint": {"period": 2, "keep_newest": 9},
}


def make(name: str, folder: Path) -> RunDir:
    """A run of 6 steps with a checkpoint after every second one; dropout wherever the model has it."""
    train = {"num_steps": NUM_STEPS, "global_batch_size": 4, "seed": 5, **DETERMINISTIC}
    sections = SECTIONS | {"train": train, "launch": {"device": DEVICE.type}}
    if name.startswith("GPT-2"):
        return make_run(folder, graphs.tiny_transformer(dropout=0.2), tiny_text(40), **sections)
    if name in MODELS:
        build, columns = MODELS[name]
        return make_run(folder, build(), columns(40), **sections)
    model, columns_of_zoo = zoo_task(name)
    return make_run(folder, model, columns_of_zoo, model={"loss": "mse"}, **sections)


def zoo_task(name: str) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model of the zoo, and ten rows whose labels are noise of the shape of its first output."""
    entry = zoo.ARCHITECTURES[name]
    exporter = "dynamo-20" if "dynamo-20" in entry.exporters else entry.exporters[0]
    inputs = zoo.feed(name, 10)
    with torch.no_grad():
        output = zoo.build(name)(*inputs.values())
    first = output[0] if isinstance(output, tuple) else output
    label = torch.randn(first.shape, generator=torch.Generator().manual_seed(0))
    return zoo.export(name, exporter, folded=False), {
        **{key: value.numpy() for key, value in inputs.items()},
        "label": label.numpy(),
    }


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.split(":")[0])
def test_killed_and_resumed_equals_never_interrupted_bit_for_bit(
    name: str, tmp_path: Path, record_property: Record
) -> None:
    if not DETERMINISTIC:
        pytest.skip("this Onward has no setting train.deterministic")
    undisturbed, killed = make(name, tmp_path / "undisturbed"), make(name, tmp_path / "killed")
    try:
        ranks.train(undisturbed)
    except AssertionError as error:
        if found := re.search(r"torch has no deterministic implementation of \S+", str(error)):
            pytest.skip(found[0])
        raise
    ranks.train_until(killed, lambda event: event.step >= 3 and event.kind == "scalars")
    assert not killed.result(1).exists()
    result = ranks.train(killed)
    record_property("attempts", result.attempt)
    assert (result.attempt, result.step) == (2, NUM_STEPS)
    assert_equal_bits(final_tensors(killed), final_tensors(undisturbed))
    assert losses(killed) == losses(undisturbed)


@pytest.mark.parametrize("name", ["GPT-2: fused QKV, tied", "conv net: skips, BatchNorm"][: 1 if REHEARSAL else 2])
def test_a_checkpoint_goes_from_the_cpu_to_the_device_and_back(
    name: str, tmp_path: Path, record_property: Record
) -> None:
    """The losses of 12 steps, of which the middle ones are made on the device, equal those of the CPU to 1e-4."""
    build, columns = MODELS[name]

    def run(folder: str, device: str, num_steps: int, load: str = "") -> RunDir:
        made = make_run(
            tmp_path / folder,
            build(),
            columns(60),
            optimizer=SECTIONS["optimizer"],
            train={"num_steps": num_steps, "global_batch_size": 4, "seed": 5},
            launch={"device": device},
            checkpoint={"period": 4, "keep_newest": 9, "load": load},
        )
        ranks.train(made)
        return made

    on_the_cpu = run("cpu", "cpu", 12)
    first = run("first", "cpu", 4)
    second = run("second", DEVICE.type, 8, str(first.checkpoint(4)))
    third = run("third", "cpu", 12, str(second.checkpoint(8)))
    found, wanted = {**losses(first), **losses(second), **losses(third)}, losses(on_the_cpu)
    assert found.keys() == wanted.keys() == set(range(1, 13))
    difference = max(abs(found[step] / wanted[step] - 1) for step in wanted)
    record_property("loss_difference", difference)
    assert difference <= 1e-4
