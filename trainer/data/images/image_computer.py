"""Decode every image while shards are written: to find what is damaged, and, with `cache = "decoded"`, to store pixels.

    read      bytes of a JPEG file, any size        bytes of a PNG mask
    stored    uint8 [224, 224, 3], or the bytes     int16 [224, 224], or the bytes

Both kinds of shards give the same batches, bit for bit: what is stored is a step on the way that has nothing random.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.data.images.geometry import fitted_image, fitted_mask
from onward.trainer.data.images.image_decoding import MASK_TYPE, decode_image, decode_mask
from onward.trainer.data.images.image_inputs import ImageInput, Mask
from onward.trainer.data.images.image_threads import in_threads, room_for
from onward.trainer.data.schema.columns import BYTES, Array, Column, Values
from onward.trainer.errors import DataError


class ImageComputer:
    """Computes the stored form of columns of encoded images and masks, in their place.

    masks: those of the images in the first column.
    """

    pad_values: Mapping[str, float] = {}
    file_only: frozenset[str] = frozenset()

    def __init__(self, images: Sequence[ImageInput], config: ImageConfig, masks: Sequence[Mask] = ()) -> None:
        from PIL import __version__ as pillow_version

        self._images = {each.column: each for each in images}
        self._masks = {each.column: each for each in masks}
        self._config = config
        self._columns = (*self._images, *self._masks)
        self.consumed = frozenset(self._columns)
        self.columns: tuple[Column, ...] = ()
        """The stored columns, as soon as `describe` has seen that the content is images."""
        settings = config.model_dump(include={"resize", "crop_ratio"})
        settings |= {"interpolation": config.resampling, "antialias": config.antialias}
        if config.resize == "corner_mean":
            settings["border"] = [config.border_color(each.channels) for each in images]
        shapes = {name: each.pixel_shape for name, each in self._images.items()}
        stored = [settings, shapes] if config.stores_pixels else [list(shapes)]
        labels = [[each.column, each.ignore_index, list(config.mask_values), each.num_classes] for each in masks]
        # another release may decode a JPEG file to other pixels
        self.digest = json.dumps(["images", pillow_version, config.stores_pixels, stored, labels])

    @property
    def summary(self) -> str:
        """Return in words what the model gets, and what the shards hold."""
        stored = "the shards hold pixels" if self._config.stores_pixels else "the shards hold the encoded files"
        given = "" if self._config.mean else " (ImageNet's mean and std: data.image.mean sets others)"
        if all(each.takes_integers for each in self._images.values()):
            given = ""
        return "; ".join(each.summary for each in self._images.values()) + f"{given}; {stored}"

    def describe(self, values: Mapping[str, Values]) -> None:
        """Set `columns`. Raises DataError if none of the first rows holds an image."""
        count = len(next(iter(values.values())))
        _, failed = self.compute(values, count)
        if len(failed) == count:
            raise DataError(f"{failed[0]} (and so do all of the first rows)")
        columns = []
        for name in self._columns:
            if not self._config.stores_pixels:
                columns.append(Column(name=name, dtype=BYTES))
            elif name in self._images:
                columns.append(Column(name=name, dtype="uint8", shape=self._images[name].pixel_shape))
            else:
                columns.append(Column(name=name, dtype=MASK_TYPE, shape=self._masks[name].size))
        self.columns = tuple(columns)

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return the stored form of each row, and row -> what is wrong with its images."""
        cells: list[dict[str, Any]] = [{name: rows[name][at] for name in self._columns} for at in range(count)]
        computed = in_threads(self._row_in_turn, cells, 0)
        failed = {at: found for at, found in enumerate(computed) if isinstance(found, str)}
        results: dict[str, Values] = {}
        for name in self._columns:
            each = [None if isinstance(found, str) else found[name] for found in computed]
            if self._config.stores_pixels:
                shape = self._images[name].pixel_shape if name in self._images else self._masks[name].size
                # a bad row keeps its place until it is left out
                empty: Array = np.zeros(shape, "uint8" if name in self._images else MASK_TYPE)
                results[name] = np.stack([empty if value is None else value for value in each])
            else:
                # an array made of the list would be one of numpy's own bytes, without the zeros at their ends
                contents = np.empty(count, object)
                contents[:] = [b"" if value is None else value for value in each]
                results[name] = contents
        return results, failed

    def _row_in_turn(self, cells: Mapping[str, Any]) -> dict[str, Any] | str:
        with room_for(cells.values()):
            return self._row(cells)

    def _row(self, cells: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the stored form of the images of one row, or what is wrong with them."""
        stored = dict[str, Any]()
        size = (0, 0)
        try:
            for name, info in self._images.items():
                image = decode_image(cells[name], grey=info.channels == 1)
                # masks belong to the first image
                size = size if any(size) else (image.height, image.width)
                stored[name] = cells[name]
                if self._config.stores_pixels:
                    stored[name] = pixels_of(fitted_image(image, info.size, self._config))
            for name, label in self._masks.items():
                mask = decode_mask(cells[name], self._config.mask_values, label.ignore_index)
                # pixel by pixel, the mask says the class of the image
                if mask.shape != size:
                    return (
                        f"{name} is a mask of {mask.shape[0]} x {mask.shape[1]} pixels, but its image is "
                        f"{size[0]} x {size[1]}"
                    )
                if label.num_classes and (wrong := _no_classes(mask, label)).size:
                    return (
                        f"{name} holds class {wrong[0]}, but the output has {label.num_classes} of them, "
                        f"0..{label.num_classes - 1}; data.image.mask_values numbers other values, and "
                        f"model.ignore_index, now {label.ignore_index}, is the one that the loss leaves out"
                    )
                stored[name] = cells[name]
                if self._config.stores_pixels:
                    stored[name] = fitted_mask(mask, label.size, self._config, label.ignore_index)
        except ValueError as error:
            return f"{name} {error}"
        return stored


def _no_classes(mask: Array, label: Mask) -> Array:
    """Return the values of a mask that are neither classes nor the ignored one."""
    assert label.num_classes
    found: Array = mask[((mask < 0) | (mask >= label.num_classes)) & (mask != label.ignore_index)]
    return found


def pixels_of(image: Any) -> Array:
    """Return the pixels of an image of Pillow: uint8 [height, width, channels]."""
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
