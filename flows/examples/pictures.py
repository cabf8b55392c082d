"""Write image files for the examples: handwritten digits, and drawn shapes with their masks, places or boxes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SHAPES = {"circle": (200, 60, 60), "square": (60, 170, 60), "triangle": (60, 80, 200)}
"""Name -> its colour, where shapes have one each."""
OBJECTS = {**SHAPES, "letter": (230, 200, 40)}
"""What is drawn with boxes, likewise."""
LETTERS = "ABEGHKMNRSW"
SIZE = 32
"""Height and width of images of one size."""
EVALUATED = 5
"""Every fifth image is for evaluation."""


def write_digits(folder: Path) -> None:
    """Write scikit-learn's handwritten digits (8 x 8 pixels, enlarged) as `train/NAME/*.jpg` and `val/NAME/*.jpg`."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    for number, (row, label) in enumerate(zip(pixels, labels, strict=True)):
        # scikit-learn has 17 levels of grey, 0 to 16
        image = Image.fromarray((row.reshape(8, 8) * (255 / 16)).astype(np.uint8))
        split = "val" if number % EVALUATED == 0 else "train"
        path = folder / split / DIGITS[label] / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(path, quality=90)


@dataclass(frozen=True)
class Drawing:
    """An image of one shape on a noisy ground."""

    image: Image.Image
    mask: Image.Image
    """Of the same size: 0 outside of the shape, 1 for a circle, 2 for a square, 3 for a triangle."""
    kind: str
    x: float
    """Where the centre of the shape is, from the left (-1) to the right (1)."""
    y: float
    """From the top (-1) to the bottom (1)."""


def drawings(rows: int, *, coloured: bool) -> Iterator[Drawing]:
    """Draw `rows` images. coloured: on a grey ground, and each shape has a colour of its own, more or less."""
    random = np.random.default_rng(0)
    for _ in range(rows):
        # drawn in a fixed order from one generator, so that the files are the same each time
        kind = str(random.choice(list(SHAPES)))
        ground, colour = _two_colours(random)
        if coloured:
            # neither black nor white, so that the noise is not cut off
            ground = np.full(3, random.uniform(50, 200))
            colour = (SHAPES[kind] + random.uniform(-40, 40, 3)).clip(0, 255)
        noise = random.normal(0, 20, (SIZE, SIZE, 3))
        image = Image.fromarray((ground + noise).clip(0, 255).astype(np.uint8))
        # 8 bits a pixel: the value is the class
        mask = Image.new("L", (SIZE, SIZE))
        radius = float(random.uniform(0.15, 0.3)) * SIZE
        # the whole shape is inside of the image
        x, y = (float(random.uniform(radius, SIZE - radius)) for _ in range(2))
        for canvas, fill in ((image, tuple(map(int, colour))), (mask, list(SHAPES).index(kind) + 1)):
            _draw(ImageDraw.Draw(canvas), kind, x, y, radius, fill)
        yield Drawing(image, mask, kind, 2 * x / SIZE - 1, 2 * y / SIZE - 1)


def _two_colours(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return two colours, [3] each, that differ by at least a third of the range in some channel."""
    while True:
        ground, colour = random.uniform(0, 255, (2, 3))
        # drawn again until a shape can be seen
        if np.abs(ground - colour).max() > 85:
            return ground, colour


def _draw(
    canvas: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, fill: int | tuple[int, ...]
) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        canvas.ellipse(box, fill=fill)
    elif shape == "square":
        canvas.rectangle(box, fill=fill)
    else:
        canvas.polygon([(x, box[1]), (box[2], box[3]), (box[0], box[3])], fill=fill)


def write_masks(folder: Path) -> None:
    """Write coloured drawings as `images/*.jpg`, and their masks as `masks/*.png`."""
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for number, drawing in enumerate(drawings(500, coloured=True)):
        drawing.image.save(folder / "images" / f"{number:04d}.jpg", quality=90)
        drawing.mask.save(folder / "masks" / f"{number:04d}.png")


def write_places(folder: Path) -> None:
    """Write drawings as `images/*.jpg`, and `train.csv` with the path, the shape and its place."""
    table = []
    (folder / "images").mkdir()
    for number, drawing in enumerate(drawings(5000, coloured=False)):
        table.append((f"images/{number:04d}.jpg", drawing.kind, round(drawing.x, 4), round(drawing.y, 4)))
        drawing.image.save(folder / str(table[-1][0]), quality=90)
    with (folder / "train.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("image", "kind", "x", "y"), *table])


def write_boxes(folder: Path) -> None:
    """Write shapes and letters on parts of scikit-learn's two photographs as `images/*.jpg`, and their boxes as
    `boxes.json`, in the form of COCO."""
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    random = np.random.default_rng(0)
    images = []
    annotations: list[dict[str, object]] = []
    (folder / "images").mkdir()
    for number in range(600):
        # of different sizes, so that the borders of data.image.resize "pad" move the boxes
        width, height = (int(side) for side in random.integers(88, 129, 2))
        photograph = photographs[int(random.integers(len(photographs)))]
        x, y = (int(random.integers(0, most)) for most in (photograph.width - width, photograph.height - height))
        image = photograph.crop((x, y, x + width, y + height))
        # every eighth image has no object: it is background
        for box, kind in _draw_objects(image, int(random.integers(1, 5)) * (number % 8 != 7), random):
            category = list(OBJECTS).index(kind) + 1
            annotations.append(
                {"id": len(annotations) + 1, "image_id": number, "category_id": category, "bbox": box, "iscrowd": 0}
            )
        name = f"{number:04d}.jpg"
        image.save(folder / "images" / name, quality=90)
        images.append({"id": number, "file_name": name, "width": width, "height": height})
    categories = [{"id": place, "name": name} for place, name in enumerate(OBJECTS, start=1)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "boxes.json").write_text(json.dumps(content), encoding="utf-8")


def _draw_objects(
    image: Image.Image, most: int, random: np.random.Generator
) -> Iterator[tuple[tuple[int, int, int, int], str]]:
    """Draw up to `most` objects that do not overlap; yield the box of each, x, y, width and height, and its kind."""
    canvas = ImageDraw.Draw(image)
    taken: list[tuple[int, int, int, int]] = []
    for _ in range(most):
        kind = str(random.choice(list(OBJECTS)))
        side = int(random.integers(20, 57))
        x, y = int(random.integers(0, image.width - side)), int(random.integers(0, image.height - side))
        # a hidden object would be a label that nobody can find
        if any(abs(x - left) < max(side, other) and abs(y - top) < max(side, other) for left, top, other, _ in taken):
            continue
        taken.append((x, y, side, side))
        colour = tuple(map(int, (OBJECTS[kind] + random.uniform(-40, 40, 3)).clip(0, 255)))
        if kind == "letter":
            letter = str(random.choice(list(LETTERS)))
            font = ImageFont.load_default(side)
            # the box of what is drawn, which is smaller than the line of the font
            left, top, right, bottom = canvas.textbbox((0, 0), letter, font=font)
            canvas.text((x - left, y - top), letter, font=font, fill=colour)
            yield (x, y, int(right - left), int(bottom - top)), kind
        else:
            _draw(canvas, kind, x + side / 2, y + side / 2, side / 2, colour)
            yield (x, y, side, side), kind
