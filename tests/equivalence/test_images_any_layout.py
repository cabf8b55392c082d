"""Images train the same weights killed and resumed, bit for bit, and the same to rounding on any layout.

That each sample has the same bits on one rank, on two and after a resume is tested for every augmentation in
tests/trainer/data/images/test_image_batches.py; here real ranks train on them, killed at different steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.parallel.tensor.vocabulary import find_vocabulary_sharding
from onward.trainer.run.directory import RunDir, read_config
from tests.equivalence.layouts import NUM_STEPS, TOLERANCE, differences
from tests.equivalence.loss_cases import BATCH, WEIGHTS, Case
from tests.equivalence.test_losses import assert_step_as_by_hand
from tests.support.graphs import tiny_conv_net
from tests.support.images import write_classes
from tests.support.ranks import run_ranks
from tests.support.runs import final_tensors, make_run, train_run, train_until
from tests.trainer.data.images.test_image_sources import write_tar
from tests.trainer.data.images.test_masks import segmenter, write_pairs

pytestmark = pytest.mark.mpi
CLASSES = ("cat", "dog", "eel")


@dataclass(frozen=True)
class Images:
    """Images of one kind, how they are augmented, and after which step the run is killed."""

    augment: dict[str, Any]
    killed_at: int
    source: Callable[[Path], Path] = lambda folder: write_classes(folder / "images", CLASSES, 12)
    model: Callable[[], onnx.ModelProto] = lambda: tiny_conv_net(image_size=16)
    data: dict[str, Any] = field(default_factory=dict)
    image: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)


def tar_file(folder: Path) -> Path:
    """A tar file of WebDataset."""
    members: dict[str, bytes] = {}
    for number, path in enumerate(sorted(write_classes(folder / "images", CLASSES, 12).rglob("*.jpg"))):
        members |= {f"{number:04d}.jpg": path.read_bytes(), f"{number:04d}.cls": b"%d" % (number % 3)}
    return write_tar(folder / "images.tar", members)


def table(folder: Path, *, structs: bool = False) -> Path:
    """A Parquet table of encoded images: bytes, or Hugging Face's structs."""
    contents = [path.read_bytes() for path in sorted(write_classes(folder / "images", CLASSES, 12).rglob("*.jpg"))]
    cells = [{"bytes": each, "path": "x.jpg"} for each in contents] if structs else contents
    frame = pd.DataFrame({"image": cells, "label": [number % 3 for number in range(len(cells))]})
    frame.to_parquet(folder / "images.parquet")
    return folder / "images.parquet"


ALL = {
    "random_resized_crop": 0.3,
    "flip": 0.5,
    "color_jitter": 0.3,
    "rand_augment": 5,
    "erasing": 0.3,
    "mixup": 0.3,
}
WEIGHTED: dict[str, Any] = {"class_weights": (0.2, 1.0, 3.0, 1.0), "label_smoothing": 0.1}
PATHS: dict[str, Images] = {
    "a folder, all": Images(ALL, 12),
    "a folder of pixels": Images(
        {
            "crop_padding": 3,
            "flip": (0.0, 0.5),
            "rand_augment": 9,
            "color_jitter": 0.2,
            "erasing": 0.5,
            "cutmix": 1.0,
        },
        7,
    ),
    "a folder of files": Images({"flip": 0.5, "crop_padding": 2}, 3, image={"cache": "encoded"}),
    "mixed, with weights of classes": Images({"mixup": 0.4, "cutmix": 1.0}, 23, loss=WEIGHTED),
    "a tar file": Images({"flip": 0.5, "cutmix": 1.0}, 31, tar_file, data={"label": "cls"}),
    "a table of bytes": Images({"crop_padding": 2, "mixup": 0.2}, 18, table),
    "a table of structs": Images({"random_resized_crop": 0.4}, 38, lambda folder: table(folder, structs=True)),
    "masks": Images(
        {"crop_padding": 3, "flip": (0.5, 0.5), "color_jitter": 0.3, "erasing": 0.3},
        9,
        lambda folder: write_pairs(folder, 36),
        segmenter,
        data={"label": "mask"},
        image={"masks": "../masks"},
    ),
    "masks of whole images": Images(
        {"random_resized_crop": 0.3, "flip": 0.5},
        27,
        lambda folder: write_pairs(folder, 36),
        segmenter,
        data={"label": "mask"},
        image={"masks": "../masks", "resize": "stretch"},
    ),
}
QUICK = "a folder, all"


def image_run(folder: Path, images: Images, **parallel: Any) -> RunDir:
    folder.mkdir(parents=True)
    image = {"augment": images.augment, **images.image}
    return make_run(
        folder,
        images.model(),
        {},
        data={"source": str(images.source(folder)), "image": image, **images.data},
        loss=images.loss,
        train={"num_steps": 40, "global_batch_size": 8, "gradient_accumulation_steps": 2},
        optimizer={"learning_rate": 1e-3},
        checkpoint={"period": 5},
        parallel=parallel,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow) for name in PATHS]
)
def test_augmented_images_train_alike_on_one_rank_and_two_and_bit_for_bit_after_a_kill(
    name: str, tmp_path: Path
) -> None:
    weights, images = {}, PATHS[name]
    for layout, parallel in (("one", {}), ("two", {"data": 2}), ("killed", {"data": 2})):
        run = image_run(tmp_path / layout, images, **parallel)
        if layout == "killed":
            train_until(run, lambda event: event.kind == "scalars" and event.step >= images.killed_at)
        train_run(run)
        weights[layout] = final_tensors(run)
    assert all(torch.equal(weights["two"][key], weights["killed"][key]) for key in weights["two"])
    for key, value in weights["one"].items():
        torch.testing.assert_close(weights["two"][key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_every_augmentation_is_in_a_run_that_is_killed_and_resumed() -> None:
    from onward.trainer.config.sections.images import AugmentConfig

    # mosaics are of images with boxes (test_detectors.py)
    assert {name for images in PATHS.values() for name in images.augment} == {*AugmentConfig.model_fields} - {"mosaic"}


LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "two replicas": {"data": 2},
    "two tensor-parallel ranks": {"tensor": 2},
    "two stages": {"pipeline": 2},
}


def many_classes() -> onnx.ModelProto:
    """One convolution and a layer of 12 classes, more than its width, so that tensor parallelism shards the classes."""
    g = GraphWriter("many_classes", seed=0)
    x = g.input("image", ("batch", 3, 16, 16))
    x = g.op("Tanh", g.op("Conv", x, g.weight("conv", g.normal(0.3, 8, 3, 3, 3))))
    x = g.op("Flatten", g.op("GlobalAveragePool", x))
    weight, bias = g.weight("head.weight", g.normal(0.5, 12, 8)), g.weight("head.bias", g.normal(0.1, 12))
    g.op("Gemm", x, weight, bias, transB=1, outputs="logits")
    g.output("logits", ("batch", 12))
    return g.model()


@pytest.mark.parametrize("weights", [(), (*WEIGHTS, *(1.0,) * 9)], ids=["plain", "weights of classes"])
@pytest.mark.slow
def test_mixed_labels_have_the_loss_and_the_gradients_of_torchs_cross_entropy_on_any_layout(
    weights: tuple[float, ...], tmp_path: Path
) -> None:
    runs = {}
    for number, (layout, parallel) in enumerate(LAYOUTS.items()):
        folder = tmp_path / str(number)
        runs[layout] = make_run(
            folder,
            many_classes(),
            {},
            data={
                "source": str(write_classes(folder / "images", CLASSES, 25)),
                "image": {"augment": {"mixup": 0.4, "cutmix": 1.0}},
            },
            loss={"class_weights": weights},
            train={
                "global_batch_size": 20,
                "gradient_accumulation_steps": 4 // parallel.get("data", 1),
                "num_steps": NUM_STEPS,
                "clip_norm": 0.0,
            },
            optimizer={"name": "adamw", "epsilon": 1e-3},
            parallel={**parallel, "convolutions": "always"},
            checkpoint={"period": 1, "keep_newest": 9},
        )
        run_ranks(2 if parallel else 1, "tests.equivalence.layouts:train_all", [str(runs[layout].root)], timeout_s=120)

    def formula(outputs: Any, labels: Any) -> torch.Tensor:
        assert labels[0].shape == outputs[0].shape
        return F.cross_entropy(outputs[0], labels[0], weight=torch.tensor(weights) if weights else None)

    sharding = find_vocabulary_sharding(to_module(many_classes()), 2, read_config(runs["one"]).losses)
    assert (sharding.head is None) == bool(weights)
    case = Case(many_classes, {}, {}, formula)
    for step in range(1, NUM_STEPS + 1):
        assert_step_as_by_hand(case, runs["one"], step, BATCH)
    for layout, run in runs.items():
        found = differences(run, runs["one"])
        assert max(found.values()) <= TOLERANCE, (layout, found)
