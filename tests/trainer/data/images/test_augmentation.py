"""Augmentations are torchvision's under torch.manual_seed of the same seed, in any thread, and use no other seed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from onward.trainer.config.sections.images import AugmentConfig, ImageConfig
from onward.trainer.data.images.augmentation import Augmentation, Mixing, seeds
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from tests.support.images import picture

ALL: dict[str, dict[str, Any]] = {
    "random_resized_crop": {"random_resized_crop": 0.08},
    "crop_padding": {"crop_padding": 4},
    "flips": {"flip": (0.5, 0.5)},
    "rand_augment": {"rand_augment": 9},
    "color_jitter": {"color_jitter": 0.4},
    "erasing": {"erasing": 0.5},
    "all": {
        "random_resized_crop": 0.08,
        "crop_padding": 2,
        "flip": 0.5,
        "rand_augment": 9,
        "color_jitter": 0.4,
        "erasing": 0.5,
    },
}


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_each_augmentation_is_torchvisions_in_threads_and_leaves_the_global_generator_alone(
    name: str, grey: bool
) -> None:
    import_torchvision()
    from torchvision.transforms import v2

    augmentation = Augmentation(ImageConfig(augment=AugmentConfig(**ALL[name])), (24, 24))
    image = picture(1, 24, 24, grey=grey)
    floats = v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])

    def own(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        changed, _, _ = augmentation.change_image(image, [], [], generator)
        return augmentation.change_tensor(floats(changed), generator)

    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(own, range(30)))
    assert torch.equal(torch.get_rng_state(), before)
    expected = v2.Compose([*augmentation.before, floats, *augmentation.after])
    with torch.random.fork_rng():
        for seed in range(30):
            torch.manual_seed(seed)
            assert torch.equal(expected(image), found[seed])
    assert any(not torch.equal(each, floats(image)) for each in found)


def test_masks_follow_their_images_and_the_borders_of_crops_are_ignored() -> None:
    config = ImageConfig(augment=AugmentConfig(crop_padding=6, flip=(0.5, 0.5), color_jitter=0.3))
    augmentation = Augmentation(config, (24, 24), ignore_index=-7)
    mask = np.arange(24 * 24, dtype=np.int16).reshape(24, 24)
    # red holds the upper and green the lower byte of the mask's value
    pixels = np.stack([mask >> 8, mask & 255, np.zeros_like(mask)], axis=2).astype(np.uint8)
    plain = ImageConfig(augment=config.augment.model_copy(update={"color_jitter": 0.0}))
    from PIL import Image

    changed = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        geometry = Augmentation(plain, (24, 24), -7)
        image, (found,), _ = geometry.change_image(Image.fromarray(pixels), [mask], [], generator)
        values = np.asarray(image).astype(np.int16)
        inside = found != -7
        np.testing.assert_array_equal(found[inside], (values[:, :, 0] * 256 + values[:, :, 1])[inside])
        changed += not np.array_equal(found, mask)
        assert augmentation.change_image(Image.fromarray(pixels), [mask], [], generator)[1][0].shape == (24, 24)
    assert changed


@pytest.mark.parametrize("settings", [{"mixup": 0.2}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}])
def test_mixed_pairs_are_torchvisions(settings: dict[str, float]) -> None:
    mixing = Mixing(AugmentConfig(**settings), num_classes=5)
    images, labels = torch.rand(2, 3, 8, 8), torch.tensor([1, 3])
    before = torch.get_rng_state()
    found = [mixing([images], labels, seed) for seed in range(30)]
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        for seed, ((pixels,), soft) in enumerate(found):
            torch.manual_seed(seed)
            expected = mixing.mix(images, labels)
            assert torch.equal(pixels, expected[0])
            assert torch.equal(soft, expected[1])
            assert soft.sum(1).allclose(torch.ones(2))


@pytest.mark.parametrize("settings", [{"mixup": 0.2}, {"cutmix": 1.0}])
def test_several_images_of_a_sample_are_mixed_alike(settings: dict[str, float]) -> None:
    mixing = Mixing(AugmentConfig(**settings), num_classes=5)
    left, labels = torch.rand(2, 3, 8, 8), torch.tensor([1, 3])
    for seed in range(10):
        (one, other), soft = mixing([left, 1 - left], labels, seed)
        (alone,), expected = mixing([left], labels, seed)
        assert torch.equal(one, alone)
        assert torch.equal(soft, expected)
        torch.testing.assert_close(other, 1 - one)
        assert type(other) is torch.Tensor


def test_seeds_depend_on_the_seed_and_the_position_alone() -> None:
    several = seeds(np.arange(1000), seed=3, purpose="a")
    assert len(set(several)) == 1000
    assert seeds(np.array([7]), seed=3, purpose="a") == several[7:8]
    assert not set(several) & set(seeds(np.arange(1000), seed=4, purpose="a"))
    assert not set(several) & set(seeds(np.arange(1000), seed=3, purpose="b"))
