"""Find which inputs of the model are images, and of which size, channels and layout; refuse what is ambiguous.

input x [batch, 3, 224, 224]   ->  NCHW, RGB, 224 x 224      the dimension of 1 or 3 is that of the channels
input x [batch, ?, ?, 1]       ->  NHWC, grey, [data.image] size
input x [batch, 3, 3, 3]       ->  refused: set data.image.layout
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onward.trainer.config.loss_rules import DENSE_LOSSES
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.images import GREY_STD, RGB_STD, ImageConfig
from onward.trainer.data.images.geometry import Size
from onward.trainer.data.schema.class_axis import find_class_axis
from onward.trainer.data.schema.label_axes import Dims
from onward.trainer.data.schema.signature import Signature, TensorInfo
from onward.trainer.errors import ConfigError
from onward.trainer.quantities import shown_shape


@dataclass(frozen=True)
class ImageInput:
    """An input of the model that is fed with images."""

    name: str
    column: str
    """The column of encoded images that feeds it."""
    size: Size
    """Height and width."""
    channels: int
    """1 (grey) or 3."""
    bgr: bool
    """Whether the channels are blue, green, red."""
    nhwc: bool
    """Whether the channels are the last dimension."""
    takes_integers: bool
    """Whether the model takes pixels 0..255 as they are."""
    scale: float
    mean: tuple[float, ...]
    """By channel, in the order red, green, blue."""
    std: tuple[float, ...]

    @property
    def pixel_shape(self) -> tuple[int, int, int]:
        """Return the shape in which pixels are stored: height, width, channels."""
        return (*self.size, self.channels)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Return the shape of one sample as the model takes it."""
        return self.pixel_shape if self.nhwc else (self.channels, *self.size)

    @property
    def summary(self) -> str:
        """Return in words what the model gets."""
        order = "grey" if self.channels == 1 else "BGR" if self.bgr else "RGB"
        layout = "NHWC" if self.nhwc else "NCHW"
        values = "pixels 0..255"
        if not self.takes_integers:
            values = f"(pixels x {self.scale:.4g} - {_listed(self.mean)}) / {_listed(self.std)}"
        return f"images {self.column} -> input {self.name}: {list(self.sample_shape)} {order} {layout}, {values}"


def image_inputs(data: DataConfig, signature: Signature) -> list[ImageInput]:
    """Return the inputs that are fed with images; [] without [data.image].

    Raises ConfigError with everything that is ambiguous or does not fit.
    """
    image = data.image
    if image is None:
        return []
    found = list[ImageInput]()
    problems = list[str]()
    for info in _chosen(image, signature.inputs):
        column = data.inputs.get(info.name, image.column)
        if not isinstance(column, str):
            problems.append(f"data.inputs.{info.name} stacks columns {', '.join(column)}, but an image is one column")
            continue
        try:
            found.append(_image_input(info, column, image))
        except ConfigError as error:
            problems += error.problems
    for one in found:
        for other in found:
            # the tensor of a column is computed once
            if one.column == other.column and one.name < other.name and replace(one, name=other.name) != other:
                problems.append(
                    f"inputs {one.name} and {other.name} take column {one.column!r} differently ({one.summary}; "
                    f"{other.summary}); give them columns of their own in data.inputs"
                )
    if problems:
        raise ConfigError(problems)
    return found


def _chosen(config: ImageConfig, inputs: Sequence[TensorInfo]) -> list[TensorInfo]:
    """Return the inputs that data.image.inputs names, or the only one of four dimensions."""
    shown = ", ".join(f"{info.name} {shown_shape(info.shape)}" for info in inputs)
    if config.inputs:
        known = {info.name: info for info in inputs}
        if unknown := [name for name in config.inputs if name not in known]:
            raise ConfigError(f"data.image.inputs names {', '.join(unknown)}; the model's inputs are {shown}")
        return [known[name] for name in config.inputs]
    # a shape that is not known may have any number of dimensions
    ranks = [None if info.shape is None else len(info.shape) for info in inputs]
    of_four = [info for info, rank in zip(inputs, ranks, strict=True) if rank == 4]
    if len(of_four) != 1:
        number = "none of the model's inputs has" if not of_four else f"{len(of_four)} of the model's inputs have"
        raise ConfigError(f"{number} four dimensions ({shown}); name those that are images in data.image.inputs")
    return of_four


def _image_input(info: TensorInfo, column: str, config: ImageConfig) -> ImageInput:
    shape = info.shape
    if shape is not None and len(shape) != 4:
        raise ConfigError(
            f"input {info.name} has {len(shape)} dimensions {shown_shape(shape)}, but a batch of images has 4; leave "
            "it out of data.image.inputs"
        )
    dims: Dims = shape or (None,) * 4
    nhwc = _is_nhwc(info.name, dims, config)
    declared = dims[3] if nhwc else dims[1]
    channels, bgr = _channels(info.name, dims, declared, config)
    takes_integers = info.dtype.startswith(("int", "uint"))
    # means and scales would make fractions, which integers cannot hold
    if takes_integers and (config.mean or config.scale != ImageConfig().scale):
        raise ConfigError(
            f"input {info.name} takes {info.dtype}, which are pixels 0..255 as they are; leave out data.image.scale, "
            "mean and std"
        )
    mean = config.means(channels)
    std = config.std or (RGB_STD if channels == 3 else GREY_STD)
    if len(mean) != channels:
        raise ConfigError(
            f"data.image.mean and std have {len(mean)} values, but input {info.name} takes {channels} channels"
        )
    # the two dimensions beside batch and channels
    size = _size(info.name, dims, (dims[1:3] if nhwc else dims[2:4]), config)
    return ImageInput(info.name, column, size, channels, bgr, nhwc, takes_integers, config.scale, mean, std)


def _is_nhwc(name: str, dims: Dims, config: ImageConfig) -> bool:
    if config.layout != "auto":
        return config.layout == "nhwc"
    first = dims[1] in (1, 3)
    last = dims[3] in (1, 3)
    # exactly one of the two dimensions can be that of the channels
    if first != last:
        return last
    why = "both the second and the last dimension could be" if first else "neither the second nor the last dimension is"
    if not first and None not in (dims[1], dims[3]):
        raise ConfigError(
            f"input {name} is {shown_shape(dims)}, but images have 1 or 3 channels; name another input in "
            "data.image.inputs"
        )
    raise ConfigError(
        f"input {name} is {shown_shape(dims)}: {why} that of 1 or 3 channels; set data.image.layout = 'nchw' or 'nhwc'"
    )


def _channels(name: str, dims: Dims, declared: int | None, config: ImageConfig) -> tuple[int, bool]:
    """Return the number of channels, and whether they are in the order blue, green, red."""
    wanted = {"auto": None, "grey": 1, "rgb": 3, "bgr": 3}[config.color]
    if declared is None and wanted is None:
        raise ConfigError(
            f"input {name} is {shown_shape(dims)}, which leaves the number of channels open; set data.image.color = "
            "'rgb', 'bgr' or 'grey'"
        )
    if declared not in (None, 1, 3):
        raise ConfigError(f"input {name} is {shown_shape(dims)}, with {declared} channels, but images have 1 or 3")
    if declared is not None and wanted not in (None, declared):
        raise ConfigError(
            f"data.image.color {config.color!r} has {wanted} channels, but input {name} {shown_shape(dims)} takes "
            f"{declared}"
        )
    return wanted or declared or 3, config.color == "bgr"


def _size(name: str, dims: Dims, declared: Dims, config: ImageConfig) -> Size:
    """Return height and width, as configured or as the model declares them."""
    given: Dims = (config.size, config.size) if isinstance(config.size, int) else config.size or (None, None)
    height, width = (want or had for want, had in zip(given, declared, strict=True))
    if height is None or width is None:
        raise ConfigError(
            f"input {name} is {shown_shape(dims)}, which leaves height and width open; set data.image.size, such as 224"
        )
    if any(had not in (None, want) for want, had in zip((height, width), declared, strict=True)):
        raise ConfigError(
            f"data.image.size {height} x {width} does not fit input {name} {shown_shape(dims)}, which takes "
            f"{shown_shape(declared)}; leave data.image.size out"
        )
    return height, width


def _listed(values: Sequence[float]) -> str:
    return f"{values[0]:.4g}" if len(values) == 1 else "[" + ", ".join(f"{value:.4g}" for value in values) + "]"


@dataclass(frozen=True)
class Mask:
    """A column of labels that are masks, which go through the geometry of the first input of images."""

    column: str
    size: Size
    """Height and width."""
    ignore_index: int
    """The class of borders."""
    num_classes: int | None = None
    """The classes of the output; None for a loss whose labels are no classes, or where the file leaves it open."""


def masks(data: DataConfig, losses: Sequence[LossConfig], signature: Signature) -> list[Mask]:
    """Return the columns of masks that losses read; [] without. Raises ConfigError as `image_inputs`, and for masks of
    losses that cannot ignore borders."""
    image = data.image
    if image is None or not image.mask_columns:
        return []
    images = image_inputs(data, signature)
    found = dict[str, Mask]()
    problems = list[str]()
    # pixels of a mask that are outside of its image have no class
    has_borders = image.fit == "pad" or image.augment.crop_padding > 0
    for loss in losses:
        for name in set(loss.columns) & set(image.mask_columns):
            found[name] = Mask(name, images[0].size, loss.ignored, _num_classes(loss, signature, images[0].size))
            if has_borders and not loss.has_classes:
                problems.append(
                    f"loss {loss.name} ignores no targets, but data.image.resize {image.resize!r} and "
                    f"augment.crop_padding add borders to the masks in column {name!r}; use another resize and "
                    "random_resized_crop"
                )
            # masks are stored in 16 bits
            if abs(loss.ignored) > 32767:
                problems.append(f"ignore_index {loss.ignored} does not fit masks, which hold -32768..32767")
    if not found:
        labels = ", ".join(name for loss in losses for name in loss.columns)
        problems.append(
            f"no loss reads the masks in column {', '.join(image.mask_columns)}, but {labels}; set data.label, or name "
            "a folder of masks with a slash, such as ./masks"
        )
    if image.augment.rand_augment:
        problems.append(
            f"data.image.augment.rand_augment {image.augment.rand_augment} cannot change masks with their images; use "
            "random_resized_crop, flip and color_jitter"
        )
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def _num_classes(loss: LossConfig, signature: Signature, size: Size) -> int | None:
    output = signature.output(loss.outputs[0])
    if not loss.has_class_axis or output is None or output.shape is None:
        return None
    try:
        axis = find_class_axis(output.shape, (None, *size), declared=output.shape, given=loss.class_axis)
    except ConfigError:  # data_problems.py reports it
        return None
    found = output.shape[axis]
    return loss.rule.num_classes(found) if found else found


def box_column(data: DataConfig, losses: Sequence[LossConfig]) -> str:
    """Return the column of boxes that a loss reads, "" without one. Raises ConfigError where none can be trained on."""
    image = data.image
    if image is None or not image.box_column:
        return ""
    name = image.box_column
    problems = []
    readers = [loss for loss in losses if name in loss.columns]
    if not readers:
        labels = ", ".join(column for loss in losses for column in loss.columns)
        problems.append(
            f"no loss reads the boxes in column {name!r}, but {labels or 'none'}; set data.label = {name!r}"
        )
    if wrong := [loss.name for loss in readers if not loss.takes_boxes]:
        problems.append(
            f"loss {', '.join(wrong)} does not assign boxes to the outputs of a model; use set_classes, set_l1 and "
            f"set_giou, {', '.join(DENSE_LOSSES)}, or a loss of your own, which gets them as [B, boxes x 6] "
            "(docs/how-to/detect-objects.md)"
        )
    if image.resize == "crop":
        problems.append(
            "data.image.resize 'crop' cuts off objects; set 'pad', which keeps the aspect ratio, or 'stretch'"
        )
    if image.augment.rand_augment or image.augment.cutmix:
        problems.append(
            "data.image.augment.rand_augment and cutmix cannot change boxes with their images; use mosaic, mixup, "
            "random_resized_crop, flip and color_jitter"
        )
    if image.mask_columns and (image.augment.mosaic_share or image.augment.mixup):
        problems.append("data.image.augment.mosaic and mixup cannot change masks with their images and boxes")
    if problems:
        raise ConfigError(problems)
    return name


@dataclass(frozen=True)
class MixedLabels:
    """The labels that MixUp and CutMix mix together with images."""

    column: str
    num_classes: int
    """2 for boxes: the images that they are from."""


def mixed_labels(data: DataConfig, losses: Sequence[LossConfig], signature: Signature) -> MixedLabels | None:
    """Return the labels that are mixed, None without MixUp and CutMix. Raises ConfigError where they cannot be."""
    image = data.image
    if image is None or not image.augment.mixes:
        return None
    inputs = image_inputs(data, signature)
    problems = []
    if integers := [each.name for each in inputs if each.takes_integers]:
        problems.append(
            f"data.image.augment.mixup and cutmix mix floating-point numbers, but input {', '.join(integers)} takes "
            "integers, which have no mean of two"
        )
    if image.box_column:
        if problems:
            raise ConfigError(problems)
        return MixedLabels(image.box_column, 2)
    what = "data.image.augment.mixup and cutmix make labels probabilities of classes"
    # one list for all losses: exactly one, which takes probabilities, is allowed
    takes_them = [loss.has_class_axis and "label_type" in loss.rule.takes for loss in losses]
    if takes_them != [True]:
        names = ", ".join(each.name for each in losses) or "teacher"
        problems.append(f"{what}, which one cross-entropy on class numbers takes, not {names}")
    # a teacher alone: there are no labels to mix
    if not losses:
        raise ConfigError(problems)
    loss = losses[0]
    if image.augment.cutmix and len({each.size for each in inputs}) > 1:
        sizes = ", ".join(f"{each.name} {each.size[0]} x {each.size[1]}" for each in inputs)
        problems.append(
            "data.image.augment.cutmix replaces one rectangle in all images of a sample, but they have different sizes "
            f"({sizes}); use mixup"
        )
    output = signature.output(loss.outputs[0])
    shape = output.shape if output else None
    is_matrix = shape is not None and len(shape) == 2 and shape[1] is not None
    if not is_matrix or not isinstance(loss.label, str):
        name = output.name if output else loss.outputs[0]
        problems.append(
            f"{what}, so that the output must be [batch, classes] and the label one column, but output {name} is "
            f"{shown_shape(shape)} and data.label {loss.label!r}"
        )
    if problems:
        raise ConfigError(problems)
    assert shape is not None
    assert isinstance(loss.label, str)
    return MixedLabels(loss.label, shape[1] or 0)
