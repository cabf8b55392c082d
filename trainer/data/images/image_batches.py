"""Make the tensors of a micro-batch from stored images: decode, augment, normalise, mix.

    stored            in threads, one sample each                  of all samples together
    bytes or pixels   decode, resize; random crop, flip, colour    float, mean, std; erasing; MixUp with p XOR 1

    position p of the stream     0   1   2   3   4   5            MixUp and CutMix: partners are those of
    mixed with                   1   0   3   2   5   4            consecutive positions, in other micro-batches too

Evaluation has no positions, and is never augmented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from onward.trainer.config.sections.images import AugmentConfig, ImageConfig
from onward.trainer.data.images.augmentation import Augmentation, Mixing, seeds
from onward.trainer.data.images.box_columns import fitted_boxes, in_shares
from onward.trainer.data.images.geometry import fitted_image, fitted_mask
from onward.trainer.data.images.image_computer import pixels_of
from onward.trainer.data.images.image_decoding import decode_image, decode_mask
from onward.trainer.data.images.image_inputs import ImageInput, Mask, MixedLabels
from onward.trainer.data.images.image_threads import in_threads, room_for
from onward.trainer.data.schema.batch_transforms import Samples
from onward.trainer.data.schema.box_cells import BOX_NUMBERS, HEAD_NUMBERS
from onward.trainer.data.schema.columns import Array, Values
from onward.trainer.errors import DataError

Sample: TypeAlias = tuple[str, Mapping[str, Any], torch.Generator | None]
"""Column, its cells and those of its masks, and the draws of its augmentation."""


class ImageBatches:
    """A BatchTransform: the tensors of image columns, and the class numbers of masks.

    masks, boxes: those of the first image, whose geometry they go through; of boxes the columns. mixed: with MixUp or
    CutMix, the labels.
    """

    def __init__(
        self,
        config: ImageConfig,
        images: Sequence[ImageInput],
        *,
        seed: int,
        masks: Sequence[Mask] = (),
        boxes: Sequence[str] = (),
        mixed: MixedLabels | None = None,
    ) -> None:
        self._config = config
        self._seed = seed
        self._images = {each.column: each for each in images}
        self._masks = {each.column: each for each in masks}
        self._boxes = tuple(boxes)
        self._mixed = mixed
        # made when the first batch is augmented: torchvision takes seconds to import, and evaluation does without
        self._augmentations: dict[str, Augmentation] = {}
        self._mixing: Mixing | None = None

    def __call__(self, values: Mapping[str, Values], samples: Samples) -> dict[str, Values]:
        """Return the columns, with float32 [B, ...] for images and int64 [B, height, width] for masks."""
        if samples.positions is not None and self._mixed is not None:
            return self._mix(values, samples)
        is_augmented = self._config.augment != AugmentConfig()
        return {**values, **self._computed(values, samples.positions if is_augmented else None)}

    def _computed(self, values: Mapping[str, Values], positions: Array | None) -> dict[str, Array]:
        """Return the tensors of image columns and masks, not mixed."""
        if positions is not None and not self._augmentations:
            borders = (each.ignore_index for each in self._masks.values())
            self._augmentations = {
                name: Augmentation(self._config, info.size, next(borders, -100)) for name, info in self._images.items()
            }
        count = len(next(iter(values.values())))
        drawn = [None] * count if positions is None else seeds(positions, seed=self._seed, purpose="image augmentation")
        results: dict[str, Any] = {}
        for place, (name, info) in enumerate(self._images.items()):
            # masks and boxes have the size of the first image
            masks = list(self._masks) if place == 0 else []
            boxes = list(self._boxes) if place == 0 else []
            # a new generator for each image: several images of a sample are augmented alike
            generators = [None if seed is None else torch.Generator().manual_seed(seed) for seed in drawn]
            rows = [
                (name, {column: values[column][at] for column in (name, *masks, *boxes)}, generator)
                for at, generator in enumerate(generators)
            ]
            made = in_threads(self._sample_in_turn, rows, self._workers)
            results[name] = self._tensor(np.stack([pixels for pixels, _, _ in made]), info, generators).numpy()
            for number, column in enumerate(masks):
                results[column] = np.stack([found[number] for _, found, _ in made]).astype(np.int64)
            for number, column in enumerate(boxes):
                results[column] = [in_shares(found[number], info.size).ravel() for _, _, found in made]
        return results

    @property
    def _workers(self) -> int:
        return self._config.workers or torch.get_num_threads()

    def _sample_in_turn(
        self, given: tuple[str, Mapping[str, Any], torch.Generator | None]
    ) -> tuple[Array, list[Array], list[Array]]:
        # pixels are decoded already, and take no more memory
        with room_for(() if self._config.stores_pixels else given[1].values()):
            return self._sample(given)

    def _sample(self, given: Sample) -> tuple[Array, list[Array], list[Array]]:
        """Return the pixels, uint8 [height, width, channels], the masks and the boxes of one sample."""
        name, cells, generator = given
        info = self._images[name]
        config = self._config
        labels = [self._masks[column] for column in cells if column in self._masks]
        is_cropped = generator is not None and config.augment.random_resized_crop > 0
        # random_resized_crop takes the whole image
        boxes = []
        for row in (cells[each] for each in self._boxes if each in cells):
            boxes.append(_whole(row) if is_cropped else fitted_boxes(row, info.size, config))
        masks = [cells[each.column] for each in labels]
        if config.stores_pixels:
            # stored pixels have the size of the model already
            if generator is None or not self._augmentations[name].before:
                return cells[name], masks, boxes
            image = image_of(cells[name])
        else:
            try:
                image = decode_image(cells[name], grey=info.channels == 1)
                masks = [
                    decode_mask(content, config.mask_values, each.ignore_index)
                    for content, each in zip(masks, labels, strict=True)
                ]
            except ValueError as error:
                raise DataError(
                    f"column {name!r} of the shards {error}; delete them: the next run writes new ones"
                ) from error
            if not is_cropped:
                image = fitted_image(image, info.size, config)
                masks = [
                    fitted_mask(mask, info.size, config, each.ignore_index)
                    for mask, each in zip(masks, labels, strict=True)
                ]
        if generator is not None:
            image, masks, boxes = self._augmentations[name].change_image(image, masks, boxes, generator)
        return pixels_of(image), masks, boxes

    def _tensor(self, pixels: Array, info: ImageInput, generators: Sequence[torch.Generator | None]) -> Tensor:
        """Return what the model takes of pixels uint8 [B, height, width, channels]."""
        tensor = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        if not info.takes_integers:
            # the operations of torchvision's ToDtype and Normalize, in their order
            tensor = tensor.to(torch.float32).mul_(info.scale)
            mean, std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (info.mean, info.std))
            tensor = tensor.sub_(mean).div_(std)
        if self._config.augment.erasing and generators[0] is not None:
            augmentation = self._augmentations[info.column]
            tensor = torch.stack(
                [augmentation.change_tensor(each, own) for each, own in zip(tensor, generators, strict=True) if own]
            )
        # after the normalisation, whose means are in the order red, green, blue
        if info.bgr:
            tensor = tensor.flip(1)
        return tensor.permute(0, 2, 3, 1).contiguous() if info.nhwc else tensor

    def _mix(self, values: Mapping[str, Values], samples: Samples) -> dict[str, Values]:
        """Return the columns, each sample mixed with its partner, and the labels as probabilities [B, C]."""
        assert samples.positions is not None
        assert self._mixed is not None
        names = list(self._images)
        label = self._mixed.column
        num_classes = self._mixed.num_classes
        self._mixing = self._mixing or Mixing(self._config.augment, num_classes)
        # position p has the partner p XOR 1: both have the same p >> 1
        pairs = np.unique(samples.positions >> 1)
        positions = np.stack([2 * pairs, 2 * pairs + 1], axis=1).ravel()
        read = self._read(values, samples, positions, (*names, label))
        labels = torch.from_numpy(np.asarray(read[label]).astype(np.int64))
        # also the ignored label: probabilities have no class for it
        if ((labels < 0) | (labels >= num_classes)).any():
            raise DataError(
                f"label {labels[(labels < 0) | (labels >= num_classes)][0]} in column {label!r} cannot be mixed: the "
                f"classes are 0..{num_classes - 1}; leave such rows out, or MixUp and CutMix"
            )
        computed = self._computed({name: read[name] for name in names}, positions)
        # views of `computed`, whose samples are replaced by mixed ones
        images = [_channels_first(torch.from_numpy(computed[name]), info) for name, info in self._images.items()]
        soft = torch.empty(len(positions), num_classes)
        for number, seed in enumerate(seeds(pairs, seed=self._seed, purpose="image mixing")):
            pair = slice(2 * number, 2 * number + 2)
            mixed, soft[pair] = self._mixing([each[pair].contiguous() for each in images], labels[pair], seed)
            for each, found in zip(images, mixed, strict=True):
                each[pair] = found
        # `positions` is sorted and has both samples of each pair; the micro-batch takes its own ones, in its order
        chosen = np.searchsorted(positions, samples.positions)
        return {**values, **{name: computed[name][chosen] for name in names}, label: soft.numpy()[chosen]}

    @staticmethod
    def _read(values: Mapping[str, Values], samples: Samples, positions: Array, names: Sequence[str]) -> dict[str, Any]:
        """Return columns at `positions`, int64 [n]: those of the micro-batch, and others of the stream."""
        assert samples.positions is not None
        assert samples.read is not None
        # partners that are in another micro-batch, or on another replica, are read as well
        others = np.setdiff1d(positions, samples.positions)
        more = samples.read(others) if len(others) else {}
        known = np.concatenate([samples.positions, others])
        order = np.argsort(known, kind="stable")
        places = order[np.searchsorted(known[order], positions)]
        columns = {}
        for name in names:
            parts = [np.asarray(part[name]) for part in (values, more) if name in part]
            columns[name] = np.concatenate(parts)[places]
        return columns


def _whole(row: Array) -> Array:
    """Return boxes float32 [n, 6] in pixels of the whole image. row: as it is stored."""
    return row[HEAD_NUMBERS:].reshape(-1, BOX_NUMBERS)


def _channels_first(images: Tensor, info: ImageInput) -> Tensor:
    """Return a view [B, channels, height, width]."""
    return images.permute(0, 3, 1, 2) if info.nhwc else images


def image_of(pixels: Array) -> Any:
    """Return an image of Pillow of pixels uint8 [height, width, channels]."""
    from PIL import Image

    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
