"""Bring images and masks to the size of the model: the shorter side and a centre crop, stretched, or with borders.

    crop       +--------+        stretch   +--------+       pad      ........       corner   |//////|
               |  |//|  |                  |////////|                |//////|                |//////|
               |  |//|  |                  |////////|                |//////|                ........
               +--------+                  +--------+                ........                ........

The pixels are those of torchvision's `Resize`, `CenterCrop` and `Pad`, computed by Pillow alone, because torch takes
seconds to import. Masks take the nearest pixel, as torchvision does for `tv_tensors.Mask`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from onward.trainer.bounds import IMAGE_BYTES
from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.data.schema.columns import Array

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
"""Height and width."""


def fitted_image(image: Image, size: Size, config: ImageConfig) -> Image:
    """Return an image of `size`, as [data.image] says. Raises ValueError for one that is too long and thin."""
    from PIL import Image

    resized, (top, left) = resized_size((image.height, image.width), size, config)
    # Pillow resizes the columns first, and then the rows of what that gives
    if (taken := 4 * resized[1] * max(resized[0], image.height)) > IMAGE_BYTES.most:
        raise ValueError(f"has {image.width} x {image.height} pixels, which resized are {IMAGE_BYTES.exceeded(taken)}")
    if (image.height, image.width) != resized:
        image = resized_image(image, resized, config)
    height, width = size
    if (top, left, *resized) == (0, 0, height, width):
        return image
    fitted = Image.new(image.mode, (width, height), config.border_color(len(image.getbands())))
    fitted.paste(image, (-left, -top))
    return fitted


def resized_image(image: Image, size: Size, config: ImageConfig) -> Image:
    """Return an image with another size, by the configured interpolation."""
    from PIL import Image

    if config.antialias:
        return image.resize((size[1], size[0]), resample=Image.Resampling[config.resampling.upper()])
    # imported here: only this takes torch
    from onward.trainer.onnx_graph.torchvision_import import import_torchvision

    import_torchvision()
    from torchvision.transforms.v2 import InterpolationMode, functional

    tensor = functional.pil_to_tensor(image)
    mode = InterpolationMode(config.resampling)
    plain: Image.Image = functional.to_pil_image(functional.resize(tensor, list(size), mode, antialias=False))
    return plain


def fitted_mask(mask: Array, size: Size, config: ImageConfig, ignore_index: int) -> Array:
    """Return class numbers [height, width] of `size`; borders are ignored."""
    (rows, columns), (top, left) = resized_size((mask.shape[0], mask.shape[1]), size, config)
    resized = mask[_nearest(mask.shape[0], rows)[:, None], _nearest(mask.shape[1], columns)]
    fitted = np.full(size, ignore_index, mask.dtype)
    # where the resized mask lies in the fitted one, which may be smaller or larger
    y = max(0, -top)
    x = max(0, -left)
    inside = resized[max(0, top) : top + size[0], max(0, left) : left + size[1]]
    fitted[y : y + inside.shape[0], x : x + inside.shape[1]] = inside
    return fitted


def resized_size(old: Size, size: Size, config: ImageConfig) -> tuple[Size, tuple[int, int]]:
    """Return the size to resize to, and where the result of `size` begins in it: (top, left), negative for borders."""
    (height, width), (rows, columns) = old, size
    if config.resize == "stretch":
        return size, (0, 0)
    if config.fit == "pad":
        # the side that would reach beyond decides; the other one gets borders
        factor = min(rows / height, columns / width)
        resized = max(1, min(rows, round(height * factor))), max(1, min(columns, round(width * factor)))
    elif rows == columns:
        # as torchvision's Resize(n): the longer side is cut off to an integer
        short = int(rows / config.crop_ratio)
        resized = (short, int(short * width / height)) if height <= width else (int(short * height / width), short)
    else:
        # the side that would be too short decides; the other one is cropped
        factor = max(rows / height, columns / width) / config.crop_ratio
        resized = max(rows, round(height * factor)), max(columns, round(width * factor))
    if config.is_in_corner:
        return resized, (0, 0)
    offsets: Any = [round((had - has) / 2.0) for had, has in zip(resized, size, strict=True)]
    return resized, (offsets[0], offsets[1])


def _nearest(old: int, new: int) -> Array:
    """Return the pixels that torch's interpolation `nearest` takes: int64 [new]."""
    if old == new:
        return np.arange(new)
    # in single precision, as torch computes
    scale = np.float32(old) / np.float32(new)
    return np.minimum((np.arange(new, dtype=np.float32) * scale).astype(np.int64), old - 1)
