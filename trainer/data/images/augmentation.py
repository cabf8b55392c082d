"""Change training images at random by torchvision.transforms.v2, each from a generator of its own.

torchvision draws from torch's global generator, which dropout uses, and which threads would share. Here the functions
that draw get the generator of the sample instead, while its transforms run; the classes of torchvision stay as they
are, so the results are theirs under `torch.manual_seed` of the same seed:

    seed, position  --keyed_hash-->  generator of the sample  -->  RandomResizedCrop, RandomHorizontalFlip, ...

A TorchFunctionMode is set for one thread, and sees every call of a function of torch in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onward.trainer.config.sections.images import AugmentConfig, ImageConfig
from onward.trainer.data.images.geometry import Size
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.permutation import hash_key, keyed_hash
from onward.trainer.onnx_graph.torchvision_import import import_torchvision

if TYPE_CHECKING:
    from PIL.Image import Image

RANDOM: frozenset[Any] = frozenset(
    [torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial]
    + [torch._sample_dirichlet]
    + [getattr(Tensor, name) for name in ("uniform_", "normal_", "random_", "exponential_", "bernoulli_", "bernoulli")]
)
"""The functions that draw and take a generator."""


class OwnGenerator(TorchFunctionMode):
    """While this is active in a thread, functions that draw use this generator instead of torch's global one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, with the generator if it draws."""
        drawn = {"generator": self._generator} if func in RANDOM else {}
        return func(*args, **{**drawn, **(kwargs or {})})


LEAST_SIDE = 2.0
"""Pixels that are left of a box, at least, for it to be trained on; the most that a crop may cut off."""


def seeds(positions: Array, *, seed: int, purpose: str) -> list[int]:
    """Return a seed for each position of the stream, int64 [n]."""
    return [int(each) for each in keyed_hash(positions.astype(np.uint64), hash_key(purpose, seed))]


class Augmentation:
    """The random changes of one image, as [data.image.augment] says, in the order of that table.

    size: height and width of the results. ignore_index: the class of the borders of masks. `before`: those of images
    of Pillow, up to pixels of 0..255. `after`: those of normalised tensors [channels, height, width].
    """

    def __init__(self, config: ImageConfig, size: Size, ignore_index: int = -100) -> None:
        import_torchvision()
        from torchvision import tv_tensors
        from torchvision.transforms import v2

        augment = config.augment
        # pixels that a crop adds have no class, and are black
        borders = {tv_tensors.Mask: ignore_index, "others": 0}
        # the order decides what is drawn from the generator of a sample, and so the results of a seed
        self.before = _resized_crop(config, size)
        # what is cut out of a mosaic comes before all of `before`
        self._of_mosaic = [] if self.before else [v2.RandomCrop(size)]
        if augment.crop_padding:
            self.before.append(v2.RandomCrop(size, augment.crop_padding, fill=borders))
        from_left, from_top = augment.flips
        if from_left:
            self.before.append(v2.RandomHorizontalFlip(from_left))
        if from_top:
            self.before.append(v2.RandomVerticalFlip(from_top))
        if augment.rand_augment:
            self.before.append(v2.RandAugment(magnitude=augment.rand_augment))
        if augment.color_jitter:
            strength = augment.color_jitter
            self.before.append(v2.ColorJitter(strength, strength, strength, strength / 4))
        self.after = [v2.RandomErasing(augment.erasing)] if augment.erasing else []

    def change_image(
        self,
        image: Image,
        masks: Sequence[Array],
        boxes: Sequence[Array],
        generator: torch.Generator,
        *,
        is_mosaic: bool = False,
    ) -> tuple[Image, list[Array], list[Array]]:
        """Return an image, its masks, each class numbers [height, width], and its boxes after the changes `before`.

        boxes: of each column float32 [n, 6], as in a batch (schema/box_cells.py); those of which less than LEAST_SIDE
        pixels are left are left out.
        """
        from torchvision import tv_tensors

        canvas = (image.height, image.width)
        corners: list[Any] = [
            tv_tensors.BoundingBoxes(torch.from_numpy(each[:, 1:5].copy()), format="XYXY", canvas_size=canvas)
            for each in boxes
        ]
        given: Any = (image, *(tv_tensors.Mask(torch.from_numpy(mask.copy())) for mask in masks), *corners)
        with OwnGenerator(generator):
            for step in (*(self._of_mosaic if is_mosaic else ()), *self.before):
                # of one image a transform returns one, of several a tuple
                given = step(*given)
                given = given if isinstance(given, tuple) else (given,)
        changed = [each.as_subclass(Tensor).numpy() for each in given[1 + len(masks) :]]
        return (
            given[0],
            [mask.numpy() for mask in given[1 : 1 + len(masks)]],
            [_left(before, after) for before, after in zip(boxes, changed, strict=True)],
        )

    def change_tensor(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Return normalised pixels [channels, height, width] after the changes `after`."""
        with OwnGenerator(generator):
            for step in self.after:
                pixels = step(pixels)
        return pixels


def mosaic(images: Sequence[Array], boxes: Sequence[Sequence[Array]], size: Size) -> tuple[Array, list[Array]]:
    """Return four images [height, width, channels] in a square, and the boxes of each column, [n, 6], in its pixels.

    boxes: of each image, of each column; they are moved in place. size: of one image.
    """
    square = np.concatenate([np.concatenate(images[:2], 1), np.concatenate(images[2:], 1)])
    for place, of_image in enumerate(boxes):
        row, column = divmod(place, 2)
        for each in of_image:
            each[:, 1:5] += np.tile([column * size[1], row * size[0]], 2)
    return square, [np.concatenate(of_column) for of_column in zip(*boxes, strict=True)]


def _left(before: Array, after: Array) -> Array:
    """Return boxes [m, 6] with their new corners, float32 [n, 4], without those of which little is left."""
    boxes = before.copy()
    boxes[:, 1:5] = after
    return boxes[(after[:, 2:] - after[:, :2] >= LEAST_SIDE).all(axis=1)]


def _resized_crop(config: ImageConfig, size: Size) -> list[Any]:
    from torchvision.transforms import v2

    if not (least := config.augment.random_resized_crop):
        return []
    mode = v2.InterpolationMode(config.resampling)
    crop = v2.RandomResizedCrop(size, scale=(least, 1.0), interpolation=mode, antialias=config.antialias)
    # Pillow always averages; tensors need not
    return [crop] if config.antialias else [v2.ToImage(), crop, v2.ToPILImage()]


class Mixing:
    """MixUp and CutMix of two samples, as torchvision mixes a batch of two. num_classes: C.

    Of samples with several images all are mixed alike: by one share, by one rectangle.
    """

    def __init__(self, config: AugmentConfig, num_classes: int) -> None:
        import_torchvision()
        from torchvision.transforms import v2

        mixers: list[Any] = []
        if config.mixup:
            mixers.append(v2.MixUp(alpha=config.mixup, num_classes=num_classes))
        if config.cutmix:
            mixers.append(v2.CutMix(alpha=config.cutmix, num_classes=num_classes))
        # a choice of one would still draw a number, and change the results of a seed
        self.mix = mixers[0] if len(mixers) == 1 else v2.RandomChoice(mixers)

    def __call__(self, images: Sequence[Tensor], labels: Tensor, seed: int) -> tuple[list[Tensor], Tensor]:
        """Return mixed images, each [2, channels, height, width], and probabilities [2, C] of int64 labels [2]."""
        from torchvision import tv_tensors

        # of plain tensors torchvision would mix the first one only
        given = [tv_tensors.Image(each) for each in images]
        with OwnGenerator(torch.Generator().manual_seed(seed)):
            mixed, soft = self.mix(given, labels)
        return [each.as_subclass(Tensor) for each in mixed], soft
