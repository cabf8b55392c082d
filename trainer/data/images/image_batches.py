"""Make the tensors of a micro-batch from stored images: decode, augment, normalise, mix.

    stored            in threads, one sample each                  of all samples together
    bytes or pixels   decode, resize; mosaic;                      float, mean, std; erasing; MixUp with p XOR 1
                      random crop, flip, colour

    position p of the stream     0   1   2   3   4   5            MixUp and CutMix: partners are those of
    mixed with                   1   0   3   2   5   4            consecutive positions, in other micro-batches too
    in a mosaic with             three of the NEIGHBOURS positions of its block, drawn by hashes of p

Evaluation has no positions, and is never augmented.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from onward.trainer.config.sections.images import AugmentConfig, ImageConfig
from onward.trainer.data.images.augmentation import Augmentation, Mixing, mosaic, seeds
from onward.trainer.data.images.box_columns import fitted_boxes, in_shares, whole_boxes
from onward.trainer.data.images.geometry import fitted_image, fitted_mask
from onward.trainer.data.images.image_computer import pixels_of
from onward.trainer.data.images.image_decoding import decode_image, decode_mask
from onward.trainer.data.images.image_inputs import ImageInput, Mask, MixedLabels
from onward.trainer.data.images.image_threads import in_threads, room_for
from onward.trainer.data.schema.batch_transforms import Samples
from onward.trainer.data.schema.columns import Array, Values, rows_at
from onward.trainer.data.schema.permutation import hash_key, keyed_hash
from onward.trainer.errors import DataError

NEIGHBOURS = 64
"""Positions of which a mosaic takes images: near in the stream, because large data is read in its order."""

Cells: TypeAlias = Mapping[str, Any]
"""The cells of an image and of its masks and boxes, by column."""
Sample: TypeAlias = tuple[str, Sequence[Cells], torch.Generator | None]
"""Column, the cells of its image, or of the four of a mosaic, and the draws of its augmentation."""


class ImageBatches:
    """A BatchTransform: the tensors of image columns, and the class numbers of masks.

    masks, boxes: those of the first image, whose geometry they go through; of boxes the columns. mixed: with MixUp or
    CutMix, the labels, which may be boxes.
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
        own = positions = samples.positions
        if own is None or positions is None or self._config.augment == AugmentConfig():
            each_alone = np.arange(len(samples.rows))[:, None]
            return {**values, **self._computed(values, each_alone, None)}
        if self._mixed:
            # position p has the partner p XOR 1: both have the same p >> 1
            pairs = np.unique(positions >> 1)
            positions = np.stack([2 * pairs, 2 * pairs + 1], axis=1).ravel()
        tiles = self._tiles(positions, samples.plain_from)
        read = self._read(values, samples, np.unique(tiles))
        computed = self._computed(read, tiles, positions)
        if not self._mixed:
            return {**values, **computed}
        labels = [read[self._mixed.column][position] for position in positions]
        joined = len(pairs) if samples.plain_from is None else int(np.searchsorted(2 * pairs, samples.plain_from))
        self._mix(computed, labels, pairs, joined)
        # `positions` is sorted and has both samples of each pair; the micro-batch takes its own ones, in its order
        chosen = np.searchsorted(positions, own)
        return {**values, **{name: rows_at(rows, chosen) for name, rows in computed.items()}}

    def _tiles(self, positions: Array, plain_from: int | None) -> Array:
        """Return the positions whose images make the image of each position, itself first: int64 [n, 1 or 4].

        Where no mosaic is drawn, all four are the position itself. plain_from: see `Samples`.
        """
        share = self._config.augment.mosaic_share
        if not share:
            return positions[:, None]
        hashes = [keyed_hash(positions, hash_key("mosaic", tile, self._seed)) for tile in range(4)]
        drawn = hashes[0].astype(np.float64) < share * 2.0**64
        if plain_from is not None:
            drawn &= positions < plain_from
        block = positions - positions % NEIGHBOURS
        others = [np.where(drawn, block + (each % NEIGHBOURS).astype(np.int64), positions) for each in hashes[1:]]
        return np.stack([positions, *others], 1)

    def _computed(self, values: Mapping[str, Any], tiles: Array, positions: Array | None) -> dict[str, Any]:
        """Return the tensors of image columns, masks and boxes, not mixed.

        tiles: the keys in each column of the cells that make a sample, int64 [n, 1 or 4], see `_tiles`. positions: [n],
        None without augmentation.
        """
        if positions is not None and not self._augmentations:
            borders = (each.ignore_index for each in self._masks.values())
            self._augmentations = {
                name: Augmentation(self._config, info.size, next(borders, -100)) for name, info in self._images.items()
            }
        drawn: Sequence[int | None] = [None] * len(tiles)
        if positions is not None:
            drawn = seeds(positions, seed=self._seed, purpose="image augmentation")
        results: dict[str, Any] = {}
        for place, (name, info) in enumerate(self._images.items()):
            # masks and boxes have the size of the first image
            masks = list(self._masks) if place == 0 else []
            boxes = list(self._boxes) if place == 0 else []
            # a new generator for each image: several images of a sample are augmented alike
            generators = [None if seed is None else torch.Generator().manual_seed(seed) for seed in drawn]
            samples: list[Sample] = []
            for of_sample, generator in zip(tiles, generators, strict=True):
                own = of_sample if (of_sample != of_sample[0]).any() else of_sample[:1]
                cells = [{column: values[column][at] for column in (name, *masks, *boxes)} for at in own]
                samples.append((name, cells, generator))
            made = in_threads(self._sample_in_turn, samples, self._workers)
            results[name] = self._tensor(np.stack([pixels for pixels, _, _ in made]), info, generators).numpy()
            for number, column in enumerate(masks):
                results[column] = np.stack([found[number] for _, found, _ in made]).astype(np.int64)
            for number, column in enumerate(boxes):
                results[column] = [in_shares(found[number], info.size).ravel() for _, _, found in made]
        return results

    @property
    def _workers(self) -> int:
        return self._config.workers or torch.get_num_threads()

    def _sample_in_turn(self, given: Sample) -> tuple[Array, list[Array], list[Array]]:
        contents = itertools.chain.from_iterable(cells.values() for cells in given[1])
        # pixels are decoded already, and take no more memory
        with room_for(() if self._config.stores_pixels else contents):
            return self._sample(given)

    def _sample(self, given: Sample) -> tuple[Array, list[Array], list[Array]]:
        """Return the pixels, uint8 [height, width, channels], the masks and the boxes of one sample."""
        name, tiles, generator = given
        is_mosaic = len(tiles) > 1
        # random_resized_crop takes the whole image, but of a mosaic
        is_whole = generator is not None and self._config.augment.random_resized_crop > 0 and not is_mosaic
        read = [self._decoded(name, cells, is_whole=is_whole) for cells in tiles]
        image, masks, boxes = read[0]
        if is_mosaic:
            pixels = [pixels_of(each[0]) for each in read]
            image, boxes = mosaic(pixels, [each[2] for each in read], self._images[name].size)
        if generator is not None and (is_mosaic or self._augmentations[name].before):
            image = image_of(image) if isinstance(image, np.ndarray) else image
            augmentation = self._augmentations[name]
            image, masks, boxes = augmentation.change_image(image, masks, boxes, generator, is_mosaic=is_mosaic)
        return pixels_of(image), masks, boxes

    def _decoded(self, name: str, cells: Cells, *, is_whole: bool) -> tuple[Any, list[Array], list[Array]]:
        """Return the image, of Pillow or as pixels, its masks and boxes: of the size of the model, or the whole one."""
        info = self._images[name]
        config = self._config
        labels = [self._masks[column] for column in cells if column in self._masks]
        boxes = []
        for row in (cells[each] for each in self._boxes if each in cells):
            boxes.append(whole_boxes(row) if is_whole else fitted_boxes(row, info.size, config))
        if config.stores_pixels:
            # stored pixels have the size of the model already
            return cells[name], [cells[each.column] for each in labels], boxes
        try:
            image = decode_image(cells[name], grey=info.channels == 1)
            masks = [decode_mask(cells[each.column], config.mask_values, each.ignore_index) for each in labels]
        except ValueError as error:
            raise DataError(
                f"column {name!r} of the shards {error}; delete them: the next run writes new ones"
            ) from error
        if not is_whole:
            image = fitted_image(image, info.size, config)
            pairs = zip(masks, labels, strict=True)
            masks = [fitted_mask(mask, info.size, config, each.ignore_index) for mask, each in pairs]
        return image, masks, boxes

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

    def _mix(self, computed: dict[str, Any], given: Sequence[Any], pairs: Array, mixed_pairs: int) -> None:
        """Mix the samples of each pair, which follow each other in the columns, and their labels: classes as
        probabilities [n, C]; of boxes each sample gets those of both.

        given: the labels as they are stored. pairs: int64 [n / 2], of which the first `mixed_pairs` are mixed.
        """
        assert self._mixed is not None
        label = self._mixed.column
        num_classes = self._mixed.num_classes
        self._mixing = self._mixing or Mixing(self._config.augment, num_classes)
        has_boxes = label in self._boxes
        labels = torch.arange(2 * len(pairs)) % 2 if has_boxes else torch.tensor(np.stack(given).astype(np.int64))
        # also the ignored label: probabilities have no class for it
        if ((labels < 0) | (labels >= num_classes)).any():
            raise DataError(
                f"label {labels[(labels < 0) | (labels >= num_classes)][0]} in column {label!r} cannot be mixed: the "
                f"classes are 0..{num_classes - 1}; leave such rows out, or MixUp and CutMix"
            )
        # views of `computed`, whose samples are replaced by mixed ones
        images = [_channels_first(torch.from_numpy(computed[name]), info) for name, info in self._images.items()]
        # as they are, for pairs that are not mixed
        soft = torch.eye(num_classes)[labels]
        for number, seed in enumerate(seeds(pairs[:mixed_pairs], seed=self._seed, purpose="image mixing")):
            pair = slice(2 * number, 2 * number + 2)
            mixed, soft[pair] = self._mixing([each[pair].contiguous() for each in images], labels[pair], seed)
            for each, found in zip(images, mixed, strict=True):
                each[pair] = found
        if has_boxes:
            boxes = computed[label]
            both = [np.concatenate([boxes[at], boxes[at ^ 1]]) for at in range(2 * mixed_pairs)]
            computed[label] = [*both, *boxes[2 * mixed_pairs :]]
        else:
            computed[label] = soft.numpy()

    @staticmethod
    def _read(values: Mapping[str, Values], samples: Samples, positions: Array) -> dict[str, dict[int, Any]]:
        """Return position -> cell of each stored column, for the micro-batch and for `positions`, int64 [n]."""
        assert samples.positions is not None
        # what is in another micro-batch, or on another replica, is read as well
        others = np.setdiff1d(positions, samples.positions)
        more = samples.read(others) if samples.read and len(others) else {}
        known = [*samples.positions, *others]
        return {name: dict(zip(known, [*own, *more.get(name, ())], strict=False)) for name, own in values.items()}


def _channels_first(images: Tensor, info: ImageInput) -> Tensor:
    """Return a view [B, channels, height, width]."""
    return images.permute(0, 3, 1, 2) if info.nhwc else images


def image_of(pixels: Array) -> Any:
    """Return an image of Pillow of pixels uint8 [height, width, channels]."""
    from PIL import Image

    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
