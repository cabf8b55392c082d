"""Compute the inputs of a model from encoded images and audio, as training did."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
How = Mapping[str, Any]
"""How one input is computed: an entry of `inputs` in preprocessing.json."""

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
"""What Pillow may decode: for other formats, such as EPS, it may start a program."""
MOST_PIXELS = 1 << 27
"""The largest image that is decoded: some kilobytes may hold one of gigabytes."""
MOST_SAMPLES = 1 << 26
"""The longest audio that is decoded, in samples of a channel."""


# -- images


def image(content: bytes, how: How) -> Array:
    """Return the input of one encoded image, [C, H, W] or [H, W, C]. Raises ValueError with what is wrong with it."""
    from PIL import Image

    picture = _decoded(content)
    if picture.mode.startswith("I;16"):  # of 16 bits the upper 8
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError(f"it holds pixels of 32 bits (mode {picture.mode}), whose range is unknown")
    if picture.has_transparency_data:  # transparent pixels are white
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        white.alpha_composite(picture.convert("RGBA"))
        picture = white
    picture = picture.convert("L" if how["channels"] == "grey" else "RGB")
    (rows, columns), (top, left) = geometry(picture.height, picture.width, how)
    if (picture.height, picture.width) != (rows, columns):
        picture = _resized(picture, rows, columns, how)
    # of former versions borders are black
    color = tuple(how.get("border_color") or [0] * len(picture.getbands()))
    fitted = Image.new(picture.mode, (how["width"], how["height"]), color)
    fitted.paste(picture, (-left, -top))
    pixels = np.asarray(fitted).reshape(how["height"], how["width"], -1)
    # a file that takes integers gets the pixels as they are
    if "float" in how["dtype"]:
        pixels = pixels.astype(np.float32) * np.float32(how["scale"])
        pixels = (pixels - np.float32(how["mean"])) / np.float32(how["std"])
    if how["channels"] == "bgr":
        pixels = pixels[:, :, ::-1]
    if how["layout"] == "nchw":
        pixels = pixels.transpose(2, 0, 1)
    return pixels.astype(how["dtype"])


def image_size(content: bytes) -> tuple[int, int]:
    """Return height and width of an encoded image, rotated as its EXIF data says, without decoding its pixels."""
    from PIL import Image

    picture = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
    is_turned = picture.getexif().get(0x0112, 1) >= 5  # orientations in which rows become columns
    return (picture.width, picture.height) if is_turned else (picture.height, picture.width)


def _decoded(content: bytes) -> Any:
    """Return the image that some content holds, rotated as its EXIF data says."""
    from PIL import Image, ImageOps

    if not isinstance(content, bytes | bytearray):
        raise ValueError(f"it is {type(content).__name__}, not the content of an image file")
    try:
        picture = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
        if picture.width * picture.height > MOST_PIXELS:
            raise ValueError(f"it has {picture.width} x {picture.height} pixels, above {MOST_PIXELS:,}")
        picture.load()
        return ImageOps.exif_transpose(picture)
    except ValueError:
        raise
    except MemoryError:
        raise ValueError("it takes more memory to be decoded than there is") from None
    except Exception as error:  # the errors of Pillow's decoders for damaged files have no common base class
        known = ", ".join(IMAGE_FORMATS)
        raise ValueError(f"it is no image that can be decoded ({len(content):,} bytes; {known} can be)") from error


def _resized(picture: Any, rows: int, columns: int, how: How) -> Any:
    from PIL import Image

    if how["antialias"]:
        return picture.resize((columns, rows), Image.Resampling[how["interpolation"].upper()])
    from torchvision.transforms.v2 import InterpolationMode, functional

    pixels = functional.pil_to_tensor(picture)
    mode = InterpolationMode(how["interpolation"])
    return functional.to_pil_image(functional.resize(pixels, [rows, columns], mode, antialias=False))


def geometry(height: int, width: int, how: How) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size to resize to, and where the crop begins in the result: (top, left), negative for borders."""
    rows = how["height"]
    columns = how["width"]
    ratio = how["crop_ratio"]
    if how["resize"] == "stretch":
        return (rows, columns), (0, 0)
    if how["resize"] == "pad":
        factor = min(rows / height, columns / width)
        size = max(1, min(rows, round(height * factor))), max(1, min(columns, round(width * factor)))
        if how.get("is_in_corner"):
            return size, (0, 0)
    elif rows == columns:
        short = int(rows / ratio)
        size = (short, int(short * width / height)) if height <= width else (int(short * height / width), short)
    else:
        factor = max(rows / height, columns / width) / ratio
        size = max(rows, round(height * factor)), max(columns, round(width * factor))
    return size, (round((size[0] - rows) / 2), round((size[1] - columns) / 2))


# -- audio


def audio(content: bytes, how: How) -> Array:
    """Return the input of one encoded audio file: [samples] or log-mel, in the order of its axes.

    Raises ValueError with what is wrong with it.
    """
    samples, rate = _samples(content)
    wave = samples.mean(axis=1, dtype=np.float32)
    if rate != how["sample_rate"]:
        from scipy.signal import resample_poly

        # the smallest whole factors: resample_poly's filter grows with them
        common = math.gcd(rate, how["sample_rate"])
        wave = resample_poly(wave, how["sample_rate"] // common, rate // common).astype(np.float32)
    if how["samples"]:  # the middle, or zeros behind
        first = max(0, (len(wave) - how["samples"]) // 2)
        wave = wave[first : first + how["samples"]]
        wave = np.pad(wave, (0, how["samples"] - len(wave)))
    if how["features"] == "log_mel":
        wave = log_mel(wave, how)
        wave = wave.T if how["time_first"] else wave
    return np.asarray((wave[None] if how["channel_axis"] else wave).astype(how["dtype"]))


def _samples(content: bytes) -> tuple[Array, int]:
    """Return the samples of an audio file, float32 [n, channels], and their rate."""
    import soundfile

    if not isinstance(content, bytes | bytearray):
        raise ValueError(f"it is {type(content).__name__}, not the content of an audio file")
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.frames > MOST_SAMPLES:
                raise ValueError(f"it has {file.frames:,} samples, above {MOST_SAMPLES:,}")
            samples = file.read(dtype="float32", always_2d=True)
            rate = file.samplerate
    except (soundfile.SoundFileError, RuntimeError, TypeError) as error:
        raise ValueError(f"it is no audio that libsndfile reads: {error}") from None
    if not len(samples):
        raise ValueError("it holds no sample")
    if not np.isfinite(samples).all():
        raise ValueError("it holds samples that are not finite")
    return samples, rate


def log_mel(wave: Array, how: How) -> Array:
    """Return the log-mel spectrogram of a waveform, float32 [mel_bins, frames]."""
    window = how["window"]
    rate = how["sample_rate"]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    spread = np.pad(wave.astype(np.float64), window // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(spread, window)[:: how["hop"]]
    power = np.abs(np.fft.rfft(frames * hann, axis=1)) ** 2
    highest = 2595.0 * np.log10(1.0 + (rate // 2) / 700.0)
    points = 700.0 * (10.0 ** (np.linspace(0.0, highest, how["mel_bins"] + 2) / 2595.0) - 1.0)
    frequencies = np.linspace(0.0, rate // 2, window // 2 + 1)[:, None]
    rising = (frequencies - points[None, :-2]) / np.diff(points)[None, :-1]
    falling = (points[None, 2:] - frequencies) / np.diff(points)[None, 1:]
    bands = power @ np.maximum(0.0, np.minimum(rising, falling))
    return np.asarray(np.log(np.maximum(bands, how["floor"])).T.astype(np.float32))
