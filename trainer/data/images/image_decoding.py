"""Decode images and masks with Pillow, from any usual encoding to 8 bits a channel or to class numbers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.trainer.bounds import IMAGE_BYTES
from onward.trainer.data.schema.columns import Array

if TYPE_CHECKING:
    from PIL.Image import Image

STRIP_PIXELS = 1 << 20
ROW_BYTES = 16
"""What Pillow keeps of each row beside its pixels: where it is."""
ORIENTATION = 0x0112
"""The EXIF tag by which an image is rotated."""

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2")
"""Names of image files end in these; the decoder looks at the content."""
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
"""What Pillow may decode, whatever a file is called: for others it may start a program, such as Ghostscript for EPS."""
MASK_TYPE = "int16"
"""The type of masks in shards: class numbers up to 32,767 and `model.ignore_index`."""


def decode_image(content: bytes, *, grey: bool) -> Image:
    """Return an image as RGB or grey (mode L). Raises ValueError with what is wrong with the content.

    It is rotated as its EXIF data says, of several frames the first. Transparent pixels become white, as viewers show
    them on paper. Of 16 bits the upper 8 are used; pixels of 32 bits have no known range and are refused.
    """
    from PIL import Image

    image = _opened(content)
    if image.mode.startswith("I;16"):
        # Pillow's own conversion would cut off all that is above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"holds pixels of 32 bits (mode {image.mode}), whose range is unknown; convert them to 8 bits")
    if image.has_transparency_data:
        image = _on_white(image)
    wanted = "L" if grey else "RGB"
    return image if image.mode == wanted else image.convert(wanted)


def decode_mask(content: bytes, values: Sequence[int] = (), ignore_index: int = -100) -> Array:
    """Return class numbers [height, width] of an image of one channel, or of the indices of a palette.

    values: those in the image, in the order of the classes; () = they are the classes. The value `ignore_index` stays.
    Raises ValueError with what is wrong with the content.
    """
    image = _opened(content)
    if image.mode == "1":
        return _classes(np.asarray(image).astype(MASK_TYPE), values, ignore_index)
    if image.mode not in ("L", "P", "I") and not image.mode.startswith("I;16"):
        raise ValueError(f"has colours (mode {image.mode}), but a mask holds a class number for each pixel")
    found = np.asarray(image)
    if found.max(initial=0) > np.iinfo(MASK_TYPE).max or found.min(initial=0) < 0:
        raise ValueError(f"holds class numbers {found.min()}..{found.max()}, but masks hold 0..32767")
    return _classes(found.astype(MASK_TYPE), values, ignore_index)


def _classes(found: Array, values: Sequence[int], ignore_index: int) -> Array:
    """Return the class of each value."""
    if not values:
        return found
    known = np.array(sorted(values), MASK_TYPE)
    # a value above all known ones is sought behind the last one, and found wrong there
    places = np.minimum(np.searchsorted(known, found), len(known) - 1)
    ignored = found == ignore_index
    if (wrong := (known[places] != found) & ~ignored).any():
        raise ValueError(f"holds the value {found[wrong][0]}, which is not in data.image.mask_values {list(values)}")
    # the classes are in the order of the setting, the search is in that of the values
    classes = np.array([values.index(value) for value in known.tolist()], MASK_TYPE)[places]
    return np.where(ignored, found, classes).astype(MASK_TYPE)


def _opened(content: bytes) -> Image:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
        # before the pixels are decoded: some kilobytes may be an image of gigabytes
        check_size(image)
        image.load()
        if rotated := image.getexif().get(ORIENTATION, 1) != 1:
            check_size(image, rotated=rotated)
            # in its place: else there would be a further copy
            ImageOps.exif_transpose(image, in_place=True)
        return image
    except UnidentifiedImageError:
        known = ", ".join(IMAGE_FORMATS)
        raise ValueError(f"is no image that can be read ({len(content):,} bytes); the formats are {known}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"is too large: {error}") from error
    except MemoryError:
        raise ValueError("takes more memory to be decoded than there is") from None
    except Exception as error:
        # the errors of Pillow's decoders for damaged files have no common base class; its reader of PPM quotes the file
        quoted = content.startswith(b"P") and isinstance(error, ValueError)
        raise ValueError(f"cannot be decoded: {type(error).__name__ if quoted else error}") from error


def memory_of(content: bytes) -> int:
    """Return about how many bytes an encoded image takes while it is decoded, by its header; 0 if it has none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            return _memory_of(image)
    # the errors of Pillow's readers of headers have no common base class
    except Exception:
        return 0


def _memory_of(image: Image, *, rotated: bool = False) -> int:
    # Pillow stores several channels in 4 bytes, and converts and rotates into a copy
    stored = 1 if image.mode in ("1", "L", "P") else 4
    as_it_is = image.mode in ("L", "RGB") and not image.has_transparency_data and not rotated
    return image.height * (image.width * (stored if as_it_is else stored + 4) + ROW_BYTES)


def check_size(image: Image, *, rotated: bool = False) -> None:
    """Raise ValueError for an image that takes more memory than the limit, or another program; it need not be decoded.

    Pillow would let Ghostscript execute an EPS file, whatever the file's name is.
    """
    if image.format == "EPS":
        raise ValueError("is PostScript (EPS), a program that Onward does not run; convert it to PNG")
    if (size := _memory_of(image, rotated=rotated)) > IMAGE_BYTES.most:
        raise ValueError(f"has {IMAGE_BYTES.exceeded(size)} ({image.width} x {image.height}, {image.mode})")


def _on_white(image: Image) -> Any:
    """Return an image on white instead of its transparency, by rows: each copy of a large image takes its memory."""
    found = _new("RGB", image.size)
    for top in range(0, image.height, rows := max(1, STRIP_PIXELS // max(1, image.width))):
        box = (0, top, image.width, min(top + rows, image.height))
        colour = image.crop(box).convert("RGBA")
        white = _new("RGBA", colour.size)
        white.alpha_composite(colour)
        found.paste(white.convert("RGB"), box[:2])
    return found


def _new(mode: str, size: tuple[int, int]) -> Any:
    from PIL import Image

    return Image.new(mode, size, "white")
