"""Images and masks of any size become those of torchvision's Resize, CenterCrop and Pad, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.data.images.geometry import fitted_image, fitted_mask
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from tests.support.images import picture

INTERPOLATIONS = ["nearest", "bilinear", "bicubic", "lanczos", "box"]
RNG = np.random.default_rng(0)
SIZES = [tuple(RNG.integers(1, 80, 4).tolist()) for _ in range(60)]
"""Height and width, before and after."""


def steps(*given: Any) -> Any:
    import_torchvision()
    from torchvision.transforms import v2

    return v2.Compose([getattr(v2, name)(*arguments, **options) for name, arguments, options in given])


def as_mask(mask: Any) -> Any:
    from torchvision import tv_tensors

    return tv_tensors.Mask(torch.from_numpy(mask))


def resizing(name: str) -> dict[str, Any]:
    import_torchvision()
    from torchvision.transforms import v2

    return {"interpolation": v2.InterpolationMode(name)}


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_shorter_side_and_centre_crop_are_torchvisions(interpolation: Any) -> None:
    for height, width, size, _ in SIZES:
        config = ImageConfig(interpolation=interpolation)
        short = int(size / config.crop_ratio)
        expected = steps(("Resize", (short,), resizing(interpolation)), ("CenterCrop", (size,), {}))
        image = picture(height, height, width)
        np.testing.assert_array_equal(fitted_image(image, (size, size), config), expected(image))
        mask = RNG.integers(0, 9, (height, width)).astype(np.int16)
        np.testing.assert_array_equal(fitted_mask(mask, (size, size), config, -100), expected(as_mask(mask)))


def test_stretched_images_are_torchvisions_also_without_antialiasing() -> None:
    for height, width, rows, columns in SIZES:
        image, mask = picture(height, height, width), RNG.integers(0, 9, (height, width)).astype(np.int16)
        expected = steps(("Resize", ((rows, columns),), {}))
        config = ImageConfig(resize="stretch")
        np.testing.assert_array_equal(fitted_image(image, (rows, columns), config), expected(image))
        np.testing.assert_array_equal(fitted_mask(mask, (rows, columns), config, -100), expected(as_mask(mask)))
        plain = ImageConfig(resize="stretch", interpolation="bicubic_aliased")
        expected = steps(
            ("PILToTensor", (), {}), ("Resize", ((rows, columns),), {"antialias": False} | resizing("bicubic"))
        )
        found = np.asarray(fitted_image(image, (rows, columns), plain)).transpose(2, 0, 1)
        np.testing.assert_array_equal(found, expected(image))


def test_padded_images_are_whole_and_the_borders_of_masks_are_ignored() -> None:
    image, mask = picture(1, 10, 20), np.ones((10, 20), np.int16)
    expected = steps(("Resize", ((20, 40),), {}), ("Pad", ([0, 10],), {}))(image)
    config = ImageConfig(resize="pad")
    np.testing.assert_array_equal(fitted_image(image, (40, 40), config), expected)
    fitted = fitted_mask(mask, (40, 40), config, -100)
    assert (fitted[10:30] == 1).all()
    assert (fitted[:10] == -100).all()
    assert (fitted[30:] == -100).all()


BORDERS: dict[str, tuple[list[int], int | tuple[int, ...]]] = {
    "pad_grey": ([0, 10], 114),
    "corner_grey": ([0, 0, 0, 20], 114),
    "corner_mean": ([0, 0, 0, 20], (128, 51, 255)),
}


@pytest.mark.parametrize("resize", BORDERS)
def test_borders_have_the_color_and_the_place_of_a_family(resize: Any) -> None:
    padding, color = BORDERS[resize]
    expected = steps(("Resize", ((20, 40),), {}), ("Pad", (padding,), {"fill": color}))(picture(1, 10, 20))
    config = ImageConfig(resize=resize, mean=(0.5, 0.2, 7.0), std=(1, 1, 1))
    np.testing.assert_array_equal(fitted_image(picture(1, 10, 20), (40, 40), config), expected)
    grey = fitted_image(picture(1, 10, 20).convert("L"), (40, 40), ImageConfig(resize=resize))
    # 0.449 x 255, the mean of grey images
    assert grey.getpixel((5, 39)) == 114
    fitted = fitted_mask(np.ones((10, 20), np.int16), (40, 40), config, -100)
    assert (fitted[padding[1] : padding[1] + 20] == 1).all()
    assert (fitted == 1).sum() == 800


@pytest.mark.parametrize("resize", ["crop", "stretch", "pad", "corner_grey"])
def test_every_result_has_the_size_also_where_it_is_no_square(resize: Any) -> None:
    for height, width, rows, columns in SIZES:
        config = ImageConfig(resize=resize, crop_ratio=1.0)
        assert fitted_image(picture(1, height, width), (rows, columns), config).size == (columns, rows)
        mask = np.zeros((height, width), np.int16)
        fitted = fitted_mask(mask, (rows, columns), config, -100)
        assert fitted.shape == (rows, columns)
        assert (fitted == -100).any() <= (resize in ("pad", "corner_grey"))
