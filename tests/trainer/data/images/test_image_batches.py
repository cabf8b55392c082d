"""Batches of images are torchvision's, and the same bits over any ranks, resumes, shards and numbers of threads."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.images import AugmentConfig, ImageConfig
from onward.trainer.data.batches.batches import Batches, evaluation_batches
from onward.trainer.data.images.augmentation import Mixing, seeds
from onward.trainer.data.images.image_batches import ImageBatches
from onward.trainer.data.images.image_decoding import decode_image
from onward.trainer.data.images.image_inputs import image_inputs, mixed_labels
from onward.trainer.data.schema.batch_transforms import Samples
from onward.trainer.data.schema.label_axes import Dims
from onward.trainer.data.schema.signature import Signature, TensorInfo, read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from tests.support import graphs
from tests.support.images import encoded, picture

CPU = torch.device("cpu")
SIZE, NUM_ROWS = 16, 45
AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "random_resized_crop": {"random_resized_crop": 0.2},
    "crop_padding": {"crop_padding": 3},
    "flip": {"flip": 0.5},
    "vertical flip": {"flip": (0.0, 0.5)},
    "rand_augment": {"rand_augment": 9},
    "color_jitter": {"color_jitter": 0.4},
    "erasing": {"erasing": 0.5},
    "mixup": {"mixup": 0.4},
    "cutmix": {"cutmix": 1.0},
    "mixup and cutmix": {"mixup": 0.4, "cutmix": 1.0, "random_resized_crop": 0.3, "flip": 0.5},
    "all": {"crop_padding": 2, "flip": 0.5, "rand_augment": 9, "color_jitter": 0.2, "erasing": 0.5},
}


class Stored:
    """A table of JPEG files, sharded for a small network."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        self.contents = [encoded(picture(at, 18 + at % 9, 20 + at % 7)) for at in range(NUM_ROWS)]
        for at, content in enumerate(self.contents):
            (folder / "images" / f"{at}.jpg").write_bytes(content)
        with (folder / "table.csv").open("w") as file:
            rows = [(f"images/{at}.jpg", at % 4, at) for at in range(NUM_ROWS)]
            csv.writer(file).writerows([("image", "label", "number"), *rows])
        onnx.save(graphs.tiny_conv_net(image_size=SIZE), folder / "model.onnx")
        self.config: RunConfig = build_config(
            {
                "model": {"path": folder / "model.onnx"},
                "data": {"source": str(folder / "table.csv"), "evaluation_fraction": 0.2, "image": settings},
                "train": {"global_batch_size": 12, "gradient_accumulation_steps": 2, "num_epochs": 2},
            }
        )
        self.directory, self.manifest, _ = make_training_shards(self.config, folder / "cache")

    def batches(self, replica: int = 0, num_replicas: int = 1) -> Batches:
        size = self.config.train.global_batch_size // 2
        config = self.config.model_copy(
            update={"parallel": self.config.parallel.model_copy(update={"data": num_replicas})}
        )
        assert config.micro_batch_size * num_replicas == size
        signature = read_training_signature(config.model)
        shards = open_shards(self.directory, "train")
        return Batches(shards, config, signature, replica=replica, num_replicas=num_replicas, device=CPU)

    def stream(self, steps: Sequence[int], num_replicas: int = 1) -> dict[int, list[torch.Tensor]]:
        """Step -> image and label of each of its samples, as one tensor, in the order of the stream."""
        ranks = [self.batches(replica, num_replicas) for replica in range(num_replicas)]
        found = {}
        for step in steps:
            taken = [batch for rank in ranks for batch in rank.take(step * 12, 12)]
            found[step] = []
            for batch in taken:
                pairs = zip(batch.inputs[0], batch.labels[0], strict=True)  # type: ignore[arg-type]
                found[step] += [torch.cat([row.flatten(), label.flatten().float()]) for row, label in pairs]
        for rank in ranks:
            rank.close()
        return found


def same(one: dict[int, list[torch.Tensor]], other: dict[int, list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for step in other for a, b in zip(one[step], other[step], strict=True))


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_one_rank_two_ranks_a_resume_and_both_caches_read_the_same_bits(name: str, tmp_path: Path) -> None:
    augment = AUGMENTATIONS[name]
    stored = Stored(tmp_path, augment=augment, cache="encoded", workers=1)
    whole = stored.stream(range(6))
    assert same(stored.stream(range(6), num_replicas=2), whole)
    assert all(same(whole, stored.stream([step])) for step in range(1, 6))  # killed after the step before
    assert same(Stored(tmp_path, augment=augment, cache="encoded", workers=3).stream(range(6)), whole)
    if "random_resized_crop" not in augment:
        pixels = Stored(tmp_path, augment=augment)
        assert pixels.manifest.table["image"].kind == f"uint8 [{SIZE}, {SIZE}, 3]"
        assert same(pixels.stream(range(6)), whole)
    # 36 rows: an epoch has 3 steps, and the second shows the same rows in another order, changed otherwise
    first = {row.numpy().tobytes() for step in (0, 1, 2) for row in whole[step]}
    second = {row.numpy().tobytes() for step in (3, 4, 5) for row in whole[step]}
    assert (first == second) == (name == "none")


def transforms_of_torchvision(name: str) -> list[Any]:
    """What the names of AUGMENTATIONS stand for, up to `erasing`, which follows the normalisation."""
    from torchvision.transforms import v2

    def all_of() -> list[Any]:
        flip, jitter = v2.RandomHorizontalFlip(0.5), v2.ColorJitter(0.2, 0.2, 0.2, 0.05)
        return [v2.RandomCrop(SIZE, 2), flip, v2.RandAugment(magnitude=9), jitter]

    known: dict[str, Callable[[], list[Any]]] = {
        "random_resized_crop": lambda: [v2.RandomResizedCrop(SIZE, scale=(0.2, 1.0))],
        "crop_padding": lambda: [v2.RandomCrop(SIZE, 3)],
        "flip": lambda: [v2.RandomHorizontalFlip(0.5)],
        "vertical flip": lambda: [v2.RandomVerticalFlip(0.5)],
        "rand_augment": lambda: [v2.RandAugment(magnitude=9)],
        "color_jitter": lambda: [v2.ColorJitter(0.4, 0.4, 0.4, 0.1)],
        "all": all_of,
    }
    return known.get(name, list)()


@pytest.mark.parametrize("name", [name for name in AUGMENTATIONS if "mix" not in name])
def test_samples_are_those_of_a_composition_of_torchvision(name: str, tmp_path: Path) -> None:
    import_torchvision()
    from torchvision.transforms import v2

    stored = Stored(tmp_path, augment=AUGMENTATIONS[name], crop_ratio=0.8)
    resize = [] if name == "random_resized_crop" else [v2.Resize(20), v2.CenterCrop(SIZE)]
    expected = v2.Compose(
        [
            *resize,
            *transforms_of_torchvision(name),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
            *([v2.RandomErasing(0.5)] if "erasing" in AUGMENTATIONS[name] else []),
        ]
    )
    batches = stored.batches()
    files = open_shards(Stored(tmp_path, cache="encoded").directory, "train")
    with torch.random.fork_rng():
        for step in range(4):
            rows, position = [], step * 12
            for batch in batches.take(position, 12):
                rows += list(zip(batch.rows.tolist(), batch.inputs[0], strict=True))
            for at, (row, found) in enumerate(rows):
                content_of_row = files.read(np.array([row]))["image"][0]
                (seed,) = seeds(np.array([position + at]), seed=0, purpose="image augmentation")
                torch.manual_seed(seed)
                assert torch.equal(expected(decode_image(content_of_row, grey=False)), found)
    batches.close()


def test_mixed_pairs_are_torchvisions_and_their_labels_probabilities(tmp_path: Path) -> None:
    plain, mixed = Stored(tmp_path), Stored(tmp_path, augment={"mixup": 0.4, "cutmix": 1.0})
    mixing = Mixing(AugmentConfig(mixup=0.4, cutmix=1.0), 4)
    one, other = plain.batches(), mixed.batches()
    with torch.random.fork_rng():
        for step in range(3):
            for at, (before, after) in enumerate(zip(one.take(step * 12, 12), other.take(step * 12, 12), strict=True)):
                images, labels = after.inputs[0], after.labels[0]
                assert labels is not None
                assert (labels.dtype, labels.shape) == (torch.float32, (6, 4))
                for pair in range(3):
                    rows = slice(2 * pair, 2 * pair + 2)
                    number = (step * 12 + at * 6) // 2 + pair
                    torch.manual_seed(seeds(np.array([number]), seed=0, purpose="image mixing")[0])
                    expected = mixing.mix(before.inputs[0][rows], before.labels[0][rows])  # type: ignore[index]
                    assert torch.equal(images[rows], expected[0])
                    assert torch.equal(labels[rows], expected[1])
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"loss": "mse"}}, "which one cross-entropy on class numbers takes, not mse"),
        ({"loss": [{"weight": 0.5}, {}]}, "which one cross-entropy on class numbers takes, not cross_entropy, cross_"),
    ],
)
def test_labels_that_cannot_be_mixed_are_refused(sections: Any, message: str, tmp_path: Path) -> None:
    config = Stored(tmp_path, augment={"mixup": 0.4}).config
    settings = config.model_dump(mode="json")
    for name, section in sections.items():
        settings[name] = section if isinstance(section, list) else (settings.get(name) or {}) | section
    with pytest.raises(ConfigError) as refused:
        build_config(settings, check=check_files_and_data)
    assert message in str(refused.value)


TWO = Signature(
    (TensorInfo("left", "float32", (None, 3, 4, 4)), TensorInfo("right", "float32", (None, 4, 4, 3))),
    (TensorInfo("logits", "float32", (None, 4)),),
)


def two_images(augment: dict[str, float], **sections: Any) -> RunConfig:
    image = {"inputs": ["left", "right"], "augment": augment}
    inputs = {"left": "left", "right": "right"}
    return build_config(
        {
            "model": {"path": "m.onnx"},
            "data": {"source": "x.csv", "image": image, "inputs": inputs},
            "train": {"num_steps": 1},
            **sections,
        }
    )


@pytest.mark.parametrize("augment", [{"mixup": 0.4}, {"cutmix": 1.0}])
def test_two_images_of_a_sample_are_mixed_alike_whatever_their_layouts(augment: dict[str, float]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    values = {"left": pixels, "right": pixels, "label": np.arange(6) % 4}
    samples = Samples(np.arange(6), np.arange(6), lambda positions: {n: v[positions] for n, v in values.items()})
    found = []
    for config in (two_images(augment), two_images({"flip": 1e-9})):
        assert config.data.image
        images, mixed = image_inputs(config.data, TWO), mixed_labels(config.data, config.losses, TWO)
        found.append(ImageBatches(config.data.image, images, seed=0, mixed=mixed)(values, samples))
    after, before = found
    np.testing.assert_array_equal(after["left"], np.asarray(after["right"]).transpose(0, 3, 1, 2))
    assert not np.array_equal(after["left"], before["left"])
    mixing = Mixing(AugmentConfig(**augment), 4)
    for pair in range(3):
        rows, (seed,) = slice(2 * pair, 2 * pair + 2), seeds(np.array([pair]), seed=0, purpose="image mixing")
        (image,), soft = mixing([torch.from_numpy(before["left"][rows])], torch.arange(6)[rows] % 4, seed)
        np.testing.assert_array_equal(after["left"][rows], image)
        np.testing.assert_array_equal(after["label"][rows], soft)


def test_images_that_cannot_be_mixed_are_refused_with_the_reason() -> None:
    mixup, cutmix = two_images({"mixup": 0.2}), two_images({"cutmix": 1.0})
    integers = Signature((TensorInfo("left", "uint8", (None, 3, 4, 4)), TWO.inputs[1]), TWO.outputs)
    with pytest.raises(ConfigError, match="input left takes integers, which have no mean of two"):
        mixed_labels(mixup.data, mixup.losses, integers)
    sizes = Signature((TensorInfo("left", "float32", (None, 3, 8, 8)), TWO.inputs[1]), TWO.outputs)
    with pytest.raises(ConfigError, match=r"different sizes \(left 8 x 8, right 4 x 4\); use mixup"):
        mixed_labels(cutmix.data, cutmix.losses, sizes)
    assert mixed_labels(mixup.data, mixup.losses, sizes)


def test_evaluation_and_the_example_batch_are_never_augmented(tmp_path: Path) -> None:
    def evaluated(stored: Stored) -> torch.Tensor:
        split, signature = open_shards(stored.directory, "evaluation"), read_training_signature(stored.config.model)
        found = evaluation_batches(split, stored.config, signature, replica=0, num_replicas=1, device=CPU)
        return torch.cat([batch.inputs[0] for batch in found])

    plain, augmented = Stored(tmp_path), Stored(tmp_path, augment=AUGMENTATIONS["all"])
    assert torch.equal(evaluated(plain), evaluated(augmented))
    examples = [stored.batches().example().inputs[0] for stored in (plain, augmented)]
    assert torch.equal(*examples)


def test_layout_order_of_channels_and_integers_are_those_of_the_model() -> None:
    pixels = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)

    def made(shape: Dims, dtype: str = "float32", **settings: Any) -> np.ndarray[Any, Any]:
        config = ImageConfig(**settings)
        raw = {"model": {"path": "m.onnx"}, "data": {"source": "x.csv", "image": config}, "train": {"num_steps": 1}}
        images = image_inputs(build_config(raw).data, Signature((TensorInfo("x", dtype, shape),), ()))
        return np.asarray(ImageBatches(config, images, seed=0)({"image": pixels}, Samples(np.arange(2)))["image"])

    plain = made((None, 3, 4, 5))
    assert plain.dtype == np.float32
    np.testing.assert_array_equal(made((None, 4, 5, 3)), plain.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(made((None, 3, 4, 5), color="bgr"), plain[:, ::-1])
    np.testing.assert_array_equal(made((None, 4, 5, 3), "uint8"), pixels)
    scaled = made((None, 4, 5, 3), mean=[1, 2, 3], std=[2, 2, 2], scale=1)
    np.testing.assert_array_equal(scaled, (pixels - np.float32([1, 2, 3])) / 2)
