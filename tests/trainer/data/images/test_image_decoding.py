"""Every usual encoding is decoded to 8 bits a channel, transparent pixels to white; what is no image is named."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from onward.trainer.data.images.image_decoding import decode_image, decode_mask
from tests.support.images import encoded, picture


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_usual_formats_have_the_pixels_that_pillow_decodes(kind: str) -> None:
    content = encoded(picture(1), kind)
    expected = Image.open(io.BytesIO(content)).convert("RGB")
    np.testing.assert_array_equal(np.asarray(decode_image(content, grey=False)), np.asarray(expected))
    np.testing.assert_array_equal(np.asarray(decode_image(content, grey=True)), np.asarray(expected.convert("L")))


def test_of_16_bits_the_upper_8_are_used() -> None:
    values = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    content = encoded(Image.fromarray(values), "PNG")
    np.testing.assert_array_equal(np.asarray(decode_image(content, grey=True)), values >> 8)
    np.testing.assert_array_equal(np.asarray(decode_image(content, grey=False))[:, :, 2], values >> 8)


def test_grey_palette_and_cmyk_images_become_rgb() -> None:
    grey = picture(2, grey=True)
    decoded = np.asarray(decode_image(encoded(grey, "PNG"), grey=False))
    np.testing.assert_array_equal(decoded, np.asarray(grey)[:, :, None].repeat(3, axis=2))
    palette = picture(3).convert("P")
    np.testing.assert_array_equal(
        np.asarray(decode_image(encoded(palette, "PNG"), grey=False)), np.asarray(palette.convert("RGB"))
    )
    content = encoded(picture(4).convert("CMYK"))
    expected = Image.open(io.BytesIO(content)).convert("RGB")
    np.testing.assert_array_equal(np.asarray(decode_image(content, grey=False)), np.asarray(expected))


def test_transparent_pixels_are_white_whatever_colour_is_under_them() -> None:
    image = picture(5).convert("RGBA")
    alpha = np.full((24, 30), 255, np.uint8)
    alpha[:, :10] = 0
    image.putalpha(Image.fromarray(alpha))
    for mode in ("RGBA", "LA"):
        decoded = np.asarray(decode_image(encoded(image.convert(mode), "PNG"), grey=False))
        assert (decoded[:, :10] == 255).all()
        np.testing.assert_array_equal(decoded[:, 10:], np.asarray(image.convert(mode).convert("RGB"))[:, 10:])
    indexed = picture(6).convert("P")
    decoded = np.asarray(decode_image(encoded(indexed, "PNG", transparency=indexed.getpixel((0, 0))), grey=False))
    assert decoded[0, 0].tolist() == [255, 255, 255]


def test_images_are_rotated_as_their_exif_data_says() -> None:
    image = picture(7, 12, 20)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to the right
    content = encoded(image, "PNG", exif=exif)
    np.testing.assert_array_equal(np.asarray(decode_image(content, grey=False)), np.rot90(np.asarray(image), -1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encoded(picture(8))[:-100], "cannot be decoded: image file is truncated"),
        (b"<html>not found</html>", "is no image that can be read .22 bytes.; the formats are JPEG"),
        (encoded(picture(8), "PNG")[:200], "cannot be decoded"),
        (encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "32 bits .mode F., whose range is unknown"),
    ],
)
def test_what_is_no_whole_image_is_refused_with_the_reason(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_image(content, grey=False)


def test_masks_are_class_numbers_of_one_channel_or_the_indices_of_a_palette() -> None:
    classes = np.arange(6, dtype=np.uint8).reshape(2, 3)
    indexed = Image.fromarray(classes, "P")
    indexed.putpalette([255, 0, 0, 0, 255, 0] * 100)
    wide = (classes.astype(np.uint16) * 300).reshape(2, 3)
    for image, expected in (
        (Image.fromarray(classes), classes),
        (indexed, classes),
        (Image.fromarray(wide), wide),
        (Image.fromarray(classes > 2), classes > 2),
    ):
        mask = decode_mask(encoded(image, "PNG"))
        assert mask.dtype == np.int16
        np.testing.assert_array_equal(mask, expected)


def test_coloured_masks_and_class_numbers_beyond_16_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has colours .mode RGB., but a mask holds a class number"):
        decode_mask(encoded(picture(9), "PNG"))
    with pytest.raises(ValueError, match=r"holds class numbers 40000\.\.40000, but masks hold 0\.\.32767"):
        decode_mask(encoded(Image.fromarray(np.full((2, 2), 40000, np.uint16)), "PNG"))


def test_postscript_is_not_given_to_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow starts the program `gs` in PATH to decode EPS, whatever the file is called."""
    mark = tmp_path / "executed"
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (tmp_path / "gs").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    content = encoded(Image.new("RGB", (8, 8)), "EPS")
    with pytest.raises(ValueError, match="is no image that can be read"):
        decode_image(content, grey=False)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", [b"P6 s3cr3t-of-the-user", b"P2\n1 1\n255\ns3cr3t-of-the-user\n", b"s3cr3t-of-the-user"]
)
def test_a_refusal_quotes_nothing_of_the_file(content: bytes) -> None:
    with pytest.raises(ValueError) as caught:
        decode_image(content, grey=False)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICO", "PCX", "TGA", "SGI", "DDS"])
def test_an_image_of_another_format_is_refused_whatever_its_file_is_called(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow would start Ghostscript, a program that runs the file, for an EPS file named photo.png."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    with pytest.raises(ValueError, match="the formats are JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM, JPEG2000"):
        decode_image(encoded(picture(1), kind), grey=False)
