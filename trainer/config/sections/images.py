"""[data.image]: how encoded images become what the model takes, and how they are augmented."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from onward.trainer.config.section import Decay, Fraction, Length, LengthOrZero, NonNegativeInt, Section, as_tuple

RGB_MEAN = (0.485, 0.456, 0.406)
RGB_STD = (0.229, 0.224, 0.225)
"""Those of ImageNet, with which torchvision's and most other published weights were trained."""
GREY_MEAN = (0.449,)
GREY_STD = (0.226,)
"""The means of those over the three channels."""

GREY = 114
"""Of the borders with which detectors of the YOLO family are trained."""

Resampling = Literal["nearest", "bilinear", "bicubic", "lanczos", "box"]


def _checked(flip: float | tuple[float, float]) -> float | tuple[float, float]:
    for probability in flip if isinstance(flip, tuple) else (flip,):
        # pydantic would name each member of the union in its message
        if not 0.0 <= probability <= 1.0:
            raise ValueError("input should be between 0 and 1")
    return flip


class AugmentConfig(Section):
    """Random changes of training images, as `torchvision.transforms.v2` makes them; each is off unless it is set.

    They are applied in the order of this table. What is drawn depends on `train.seed` and on the position in the order
    of samples alone. Evaluation never augments.
    """

    random_resized_crop: Fraction = 0.0
    """The least share of the area in a random crop of random aspect ratio (3/4 to 4/3) that is resized to `size`, in
    place of `resize`; torchvision's recipes use 0.08. 0 = none."""
    crop_padding: LengthOrZero = 0
    """Pixels of black border that are added on each side before a random crop of `size`; 4 is usual for images of
    32 x 32. 0 = none."""
    flip: Annotated[float | tuple[float, float], AfterValidator(_checked)] = 0.0
    """Probability of a flip from left to right; 0.5 is usual. Two numbers: and of one from top to bottom."""
    rand_augment: Annotated[int, Field(ge=0, le=30)] = 0
    """Magnitude of RandAugment, two operations an image; 9 is usual. 0 = none."""
    color_jitter: Decay = 0.0
    """Strength s of the changes of brightness, contrast and saturation (factors of 1 - s to 1 + s) and of hue (s / 4
    of the colour circle); 0.4 is usual. Grey images keep hue and saturation, which they lack."""
    erasing: Fraction = 0.0
    """Probability that a random rectangle is set to the mean colour; 0.25 is usual."""
    mosaic: Fraction | tuple[Fraction, NonNegativeFloat] = 0.0
    """With `boxes`: probability that the image is a part, of its size, of four images in a square, which is cut out at
    random, or by `random_resized_crop`; 1 is usual. It is made before all other changes. Two numbers: and so many
    epochs at the end of the run without it, and without MixUp and CutMix; [1.0, 10] is usual."""
    mixup: NonNegativeFloat = 0.0
    """Alpha of MixUp: an image and its label are mixed with those of another sample; 0.2 is usual. 0 = none. With
    `cutmix` too, one of the two is drawn. With `boxes` both images keep theirs, and 32 is usual."""
    cutmix: NonNegativeFloat = 0.0
    """Alpha of CutMix: a random rectangle is taken from another sample; 1.0 is usual. 0 = none."""

    @property
    def flips(self) -> tuple[float, float]:
        """The probabilities of a flip from left to right, and of one from top to bottom."""
        return self.flip if isinstance(self.flip, tuple) else (self.flip, 0.0)

    @property
    def mosaic_share(self) -> float:
        """The probability of a mosaic."""
        return self.mosaic[0] if isinstance(self.mosaic, tuple) else self.mosaic

    @property
    def joined(self) -> int:
        """The most images whose boxes are those of one sample."""
        return (4 if self.mosaic_share else 1) << (self.mixup > 0)

    @property
    def mixes(self) -> bool:
        """Whether pairs of samples are mixed, which makes labels that are classes probabilities."""
        return self.mixup > 0 or self.cutmix > 0


class ImageConfig(Section):
    """How encoded images (JPEG, PNG, WebP and what else Pillow reads) become inputs of the model.

    Images are rotated as their EXIF data says; what is transparent becomes white; of 16 bits a channel the upper 8 are
    used; of several frames the first.
    """

    inputs: tuple[str, ...] = ()
    """The inputs of the model that are images; empty = the only one with four dimensions."""
    column: str = "image"
    """The column that these inputs read, unless `data.inputs` names another. Cells are encoded bytes, paths relative to
    the table, or Hugging Face's `{bytes, path}`."""
    size: Length | tuple[Length, Length] | None = None
    """Height and width in pixels, or one number for both; unset = those of the model's input."""
    resize: Literal["crop", "stretch", "pad", "pad_grey", "corner_grey", "corner_mean"] = "crop"
    """`crop`: resize the shorter side, then take the centre; `stretch`: resize to `size` without regard to the aspect
    ratio. Others resize the longer side and add borders, which masks do not count: `pad` black ones around the image,
    `pad_grey` ones of 114 (YOLOv5 to YOLO11); beside and below it, `corner_grey` ones of 114 (YOLOX), `corner_mean`
    ones of the colour `mean` (DETR; RetinaNet and FCOS of torchvision)."""
    crop_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.875
    """`resize = "crop"`: `size` as a share of the resized shorter side; 0.875 is 224 of 256. 1 cuts off the least."""
    interpolation: Literal[Resampling, "bilinear_aliased", "bicubic_aliased"] = "bilinear"
    """How images are resized: averaging over all pixels when an image becomes smaller, as Pillow and torchvision do, or
    `aliased`, as OpenCV does. Masks are always resized by the nearest pixel."""
    scale: PositiveFloat = 1 / 255
    """What pixels of 0..255 are multiplied with, before `mean` and `std`."""
    mean: tuple[float, ...] = ()
    """Subtracted from each channel, in the order red, green, blue; empty = ImageNet's (0.485, 0.456, 0.406), and 0.449
    for grey images. A model that takes integers gets pixels as they are."""
    std: tuple[PositiveFloat, ...] = ()
    """What each channel is divided by then; empty = ImageNet's (0.229, 0.224, 0.225), and 0.226 for grey images."""
    color: Literal["auto", "rgb", "bgr", "grey"] = "auto"
    """The channels that the model takes, in their order; `auto` = grey or rgb, by their number."""
    layout: Literal["auto", "nchw", "nhwc"] = "auto"
    """The model's dimensions: channels before or behind height and width; `auto` = where it has 1 or 3."""
    masks: str | tuple[str, ...] = ()
    """Segmentation: the columns of labels that are images, too: a class number for each pixel (grey or palette, 8 or 16
    bits), or the indices of a palette. They are resized, cropped and flipped with the image; borders that augmentation
    adds get the loss's `ignore_index`. Or, with a slash, the folder of masks of a folder of images, relative to each
    source, such as `../masks`, or `../../masks/{source}` with the name of the source's own folder: masks/train for
    images/train. A mask has the name of its image, with any suffix, and becomes the column `mask`: set
    `data.label = "mask"`."""
    boxes: str = ""
    """Object detection: the boxes of images in a folder, relative to each source: a .json of COCO, or a folder of
    YOLO's .txt files or of Pascal VOC's .xml files, such as `./labels`, `../annotations.json` or
    `../../labels/{source}` with the name of the source's own folder. They become the column `boxes`. Of a table the
    column with them, without a slash: lists of `{bbox: [x, y, width, height], category}`."""
    mask_values: tuple[NonNegativeInt, ...] = ()
    """The values in mask images, in the order of the classes: [0, 255] makes 255 class 1. Empty = the values are the
    classes."""
    augment: AugmentConfig = AugmentConfig()
    """Random changes of training images: the table `[data.image.augment]`."""
    cache: Literal["auto", "decoded", "encoded"] = "auto"
    """What the shards hold: pixels of the final size, which take a byte for each pixel and channel and save decoding
    and resizing in each epoch, or the files as they are, which is smaller for photographs. Training is the same, bit
    for bit. `auto` = decoded, except with `random_resized_crop`, which needs the whole image."""
    workers: NonNegativeInt = 0
    """Threads in each rank that decode and augment the next batches; 0 = as many as the rank has cores."""

    @property
    def fit(self) -> Literal["crop", "stretch", "pad"]:
        """How images are brought to `size`, with borders of whatever colour and place."""
        return self.resize if self.resize == "crop" or self.resize == "stretch" else "pad"

    @property
    def is_in_corner(self) -> bool:
        """Whether all borders are beside and below the image."""
        return self.resize.startswith("corner")

    def means(self, channels: int) -> tuple[float, ...]:
        """Return `mean`, or what it is where it is empty."""
        return self.mean or (RGB_MEAN if channels == 3 else GREY_MEAN)

    def border_color(self, channels: int) -> tuple[int, ...]:
        """Return the colour of borders, 0..255, in the order red, green, blue."""
        if self.resize == "corner_mean":
            return tuple(min(max(round(mean / self.scale), 0), 255) for mean in self.means(channels))
        return (0 if self.resize == "pad" else GREY,) * channels

    @property
    def resampling(self) -> Resampling:
        """The filter of `interpolation`, as Pillow and torchvision name it."""
        if self.interpolation == "bilinear_aliased":
            return "bilinear"
        return "bicubic" if self.interpolation == "bicubic_aliased" else self.interpolation

    @property
    def antialias(self) -> bool:
        """Whether a smaller image averages over all pixels."""
        return self.interpolation == self.resampling

    @property
    def mask_folder(self) -> str:
        """The folder of masks, relative to that of the images; "" where masks are in columns."""
        return self.masks if isinstance(self.masks, str) and "/" in self.masks else ""

    def masks_of(self, folder: Path) -> Path:
        """Return the folder of masks of a source, which is a folder of images."""
        return folder / self.mask_folder.replace("{source}", folder.name)

    @property
    def mask_columns(self) -> tuple[str, ...]:
        """The columns that hold masks."""
        if self.mask_folder:
            return ("mask",)
        return tuple(filter(None, as_tuple(self.masks)))

    @property
    def box_place(self) -> str:
        """The boxes beside a folder of images; "" without them, and for those of a table."""
        return self.boxes if "/" in self.boxes or self.boxes.endswith(".json") else ""

    @property
    def box_column(self) -> str:
        """The column that holds boxes; "" without one."""
        return "boxes" if self.box_place else self.boxes

    @property
    def stores_pixels(self) -> bool:
        """Whether the shards hold pixels rather than files."""
        return self.cache != "encoded" and not self.augment.random_resized_crop

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ImageConfig:
        # a random crop of another size each time needs pixels that `cache` has cut off
        if self.cache == "decoded" and self.augment.random_resized_crop:
            raise ValueError(
                f"cache 'decoded' keeps {self.resize!r} of each image only, but augment.random_resized_crop "
                f"{self.augment.random_resized_crop:g} crops the whole one; use 'encoded'"
            )
        if self.augment.mosaic and not self.boxes:
            raise ValueError("augment.mosaic puts images with boxes together; set data.image.boxes, or leave it out")
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} values and std {len(self.std)}; set both, one a channel")
        return self
