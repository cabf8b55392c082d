"""Images made in code: noise with shapes, encoded by Pillow, in folders of classes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int, height: int = 24, width: int = 30, *, grey: bool = False) -> Image.Image:
    """A smooth coloured image with noise, which survives JPEG and shows every flip and crop."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(x / (3 + c) + seed) + np.cos(y / (2 + c) - seed) for c in range(3)], axis=2)
    pixels = (127 + 50 * waves + rng.normal(0, 8, waves.shape)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels[:, :, 0] if grey else pixels)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The content of a file of this image."""
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def write_classes(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), each: int = 10, *, first: int = 0) -> Path:
    """JPEG files of different sizes in a folder for each class; return the folder."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for at in range(each):
            seed = first + 100 * number + at
            (folder / name / f"{at:03d}.jpg").write_bytes(encoded(picture(seed, 18 + seed % 9, 20 + seed % 7)))
    return folder
