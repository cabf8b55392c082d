"""Read the boxes of object detection that lie beside a folder of images: COCO's JSON, YOLO's texts, Pascal VOC's XML.

    COCO          one .json     bbox = [x, y, width, height] in pixels; images without annotations are background
    YOLO          a folder of   a line for each box: class, centre x and y, width, height, as shares of the image; an
                  .txt files    image without a file, or with an empty one, is background
    Pascal VOC    a folder of   xmin, ymin, xmax, ymax in pixels, counted from 1; an image without a file has no labels
                  .xml files

Each becomes a list of `Box`: the class by its name, and corners from the left and from the top. Nothing is repaired but
a pixel at the border: a box that is empty, or reaches farther beyond its image, is named with its file and line.
"""

from __future__ import annotations

import json
import math
import os
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from onward.trainer.bounds import ANNOTATION_BYTES, read_bounded
from onward.trainer.data.schema.box_cells import COUNTED, CROWD, DIFFICULT, Box
from onward.trainer.errors import DataError, few, first_lines

BORDER = 1.0
"""Pixels by which a box may reach beyond its image, because annotation tools round to whole ones; of shares, the same
of an image of 100 pixels."""


@dataclass
class Annotations:
    """The boxes of the images of a source."""

    boxes: dict[str, list[Box]]
    """Name of the image relative to the source -> its boxes; an image that is absent has no labels."""
    names: tuple[str, ...]
    """Of the classes, in the order in which the format numbers them; () = it names them in the boxes alone."""
    problems: list[str] = field(default_factory=list)
    """What is wrong, by file and line."""
    images: int = 0
    """Images of the source."""
    without_file: int = 0
    """Those without a label file, or that COCO's file does not list."""

    def __str__(self) -> str:
        number = sum(map(len, self.boxes.values()))
        shown = sum(map(bool, self.boxes.values()))
        what = f"{number} boxes in {shown} of {self.images} images"
        return f"{what} ({self.without_file} without a label file)" if self.without_file else what

    @property
    def is_sparse(self) -> bool:
        """Whether most images have no labels, as where labels lie elsewhere or have other names."""
        return 2 * self.without_file > self.images


def place_of(source: Path, place: str) -> Path:
    """Return the file or folder of annotations of a source, a folder of images. place: `data.image.boxes`."""
    # not resolve(): "../labels" of a folder that is a link is beside the link
    return Path(os.path.normpath((source / place.replace("{source}", source.name)).absolute()))


def annotation_files(source: Path, place: str) -> list[Path]:
    """Return the files that decide the boxes of a source, sorted; [] for a place without any."""
    path = place_of(source, place)
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.suffix.lower() in (".txt", ".xml", ".yaml", ".yml"))
    return [path] if path.is_file() else []


def read_annotations(source: Path, images: Sequence[str], place: str) -> Annotations:
    """Return the boxes of images, whose names are relative to `source`. place: `data.image.boxes`, relative to it.

    Raises DataError with everything that is wrong, and for a place that holds no boxes.
    """
    path = place_of(source, place)
    if path.suffix.lower() == ".json":
        found = _coco(path, source, images)
    elif path.is_dir():
        kinds = Counter(each.suffix.lower() for each in path.rglob("*") if each.suffix.lower() in (".txt", ".xml"))
        if len(kinds) != 1:
            what = " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "no .txt and no .xml"
            raise DataError(
                f"data.image.boxes: {path} holds {what} files; name a folder of YOLO's .txt files, one of Pascal VOC's "
                ".xml files, or a .json of COCO"
            )
        found = (_yolo if ".txt" in kinds else _voc)(path, source, images)
    else:
        raise DataError(
            f"data.image.boxes: there is no {path}; name a .json of COCO, or a folder of .txt or .xml files"
        )
    found.images = len(images)
    found.without_file = found.without_file or len(images) - len(found.boxes)
    if found.problems:
        raise DataError(first_lines(found.problems))
    return found


# -- COCO


def _coco(path: Path, source: Path, images: Sequence[str]) -> Annotations:
    content = _json_of(path)
    try:
        listed = [(each["id"], each["file_name"], each.get("width"), each.get("height")) for each in content["images"]]
        sizes = {number: tuple(rest) for number, *rest in listed}
        names = {each["id"]: str(each["name"]) for each in sorted(content["categories"], key=lambda each: each["id"])}
        annotations = content["annotations"]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is no annotation file of COCO: it lacks {error}") from None
    if len(sizes) < len(listed):
        raise DataError(f"{path} has several images of one id; give each its own")
    if len(set(names.values())) < len(names):
        twice = [name for name, count in Counter(names.values()).items() if count > 1]
        raise DataError(f"{path} has several categories of one name: {', '.join(twice)}; give each its own")
    shown = _matched(
        path, source, images, {number: str(file).replace("\\", "/") for number, (file, *_) in sizes.items()}
    )
    found = Annotations({name: [] for name in shown.values()}, tuple(names.values()))
    for place, each in enumerate(annotations):
        where = f"{path}, annotation {each.get('id', place)}"
        image, category, corners = each.get("image_id"), each.get("category_id"), each.get("bbox")
        if not isinstance(image, int | str) or image not in sizes:
            found.problems.append(f"{where} is of image {image!r}, which the file does not list")
        elif not isinstance(category, int | str) or category not in names:
            found.problems.append(f"{where} has the category {category!r}; there are {few(names)}")
        elif not _is_numbers(corners):
            found.problems.append(f"{where} has the bbox {str(corners)[:60]}, not [x, y, width, height]")
        elif image in shown:
            x, y, width, height = map(float, corners)
            box = Box(names[category], x, y, x + width, y + height, CROWD if each.get("iscrowd") else COUNTED)
            _add(found, shown[image], box._replace(size=_size(sizes[image][1:])), where)
    return found


def _matched(path: Path, source: Path, images: Sequence[str], listed: Mapping[Any, str]) -> dict[Any, str]:
    """Return the number of each listed image -> its name in the source. listed: number -> the file that it names.

    The folders of a name must be those of the image: train/1.jpg is not val/1.jpg. Where they are of another machine,
    so that none is right, the last parts of the names decide, if each is there once.
    """
    if twice := [file for file, count in Counter(listed.values()).items() if count > 1]:
        raise DataError(f"{path} lists {few(twice)} more than once; give each image one entry")
    ends: dict[str, list[str]] = {}
    for name in images:
        ends.setdefault(PurePosixPath(name).name, []).append(name)
    shown = {}
    for number, file in listed.items():
        # the image's whole path, of which the listed one is the end
        options = [each for each in ends.get(PurePosixPath(file).name, []) if f"{source}/{each}".endswith(f"/{file}")]
        if len(options) > 1:
            raise DataError(f"{path}: {file} may be any of {few(options)} in {source}; write its path into the file")
        if options:
            shown[number] = options[0]
    if not shown:
        last = Counter(PurePosixPath(file).name for file in listed.values())
        for number, file in listed.items():
            name = PurePosixPath(file).name
            if last[name] == 1 and len(ends.get(name, [])) == 1:
                shown[number] = ends[name][0]
    if not shown:
        raise DataError(
            f"{path} lists {len(listed)} images, of which {source} has none: the first is "
            f"{next(iter(listed.values()), 'absent')!r}, and the folder begins with {next(iter(images), 'nothing')!r}"
        )
    return shown


# -- YOLO


def _yolo(path: Path, source: Path, images: Sequence[str]) -> Annotations:
    names, has_key_points = _yolo_settings(path)
    found = Annotations({}, names)
    files = _files_beside(path, images, ".txt")
    found.without_file = len(images) - len(files)
    for name in images:
        found.boxes[name] = []
        file = files.get(name)
        if file is None:
            continue
        for number, line in enumerate(_text_of(file).splitlines(), start=1):
            words = line.split()
            where = f"{file}, line {number}"
            if not words:
                continue
            values = _floats(words)
            if values is not None and has_key_points:
                values = values[:5]
            # more than four numbers: the corners of a polygon around the object
            is_polygon = values is not None and len(values) >= 7 and len(values) % 2 == 1
            if values is None or not (len(values) == 5 or is_polygon):
                found.problems.append(f"{where} is {line[:60]!r}, not a class and four numbers")
                continue
            if not values[0].is_integer() or not 0 <= values[0] < (len(names) or math.inf):
                known = f"; {len(names)} are named" if names else ""
                found.problems.append(f"{where} has the class {words[0]}{known}")
                continue
            number_of_class = int(values[0])
            title = names[number_of_class] if names else str(number_of_class)
            _add(found, name, Box(title, *_corners(values[1:]), are_shares=True), where)
    return found


def _corners(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the corners of x, y, width and height, or of a polygon x1, y1, x2, y2, x3, y3 ..."""
    if len(values) > 4:
        xs, ys = values[0::2], values[1::2]
        return min(xs), min(ys), max(xs), max(ys)
    x, y, width, height = values
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _yolo_settings(path: Path) -> tuple[tuple[str, ...], bool]:
    """Return the classes that a data.yaml or classes.txt in the folder, or above it, names, and whether lines have key
    points; () without such a file."""
    import yaml  # imported here: nothing else of the trainer needs it

    for folder in (path, *list(path.parents)[:3]):
        for file in (folder / "data.yaml", folder / "data.yml", folder / "dataset.yaml"):
            if not file.is_file():
                continue
            try:
                content = yaml.safe_load(_text_of(file))
            except yaml.YAMLError as error:
                raise DataError(f"{file} is no YAML: {' '.join(str(error).split())[:200]}") from None
            content = content if isinstance(content, dict) else {}
            return _names_in(content.get("names"), file), "kpt_shape" in content
        if (file := folder / "classes.txt").is_file():
            return tuple(filter(None, map(str.strip, _text_of(file).splitlines()))), False
    return (), False


def _names_in(names: Any, file: Path) -> tuple[str, ...]:
    """Return the classes of a list, or of numbers and names."""
    if isinstance(names, dict) and {*map(type, names)} <= {int}:
        # a number that is left out is a class without a name
        return tuple(str(names.get(number, number)) for number in range(max(names, default=-1) + 1))
    if isinstance(names, list):
        return tuple(map(str, names))
    raise DataError(f"{file} has no `names`, a list of the classes or numbers with names")


# -- Pascal VOC


def _voc(path: Path, source: Path, images: Sequence[str]) -> Annotations:
    found = Annotations({}, ())
    for name, file in _files_beside(path, images, ".xml").items():
        found.boxes[name] = []
        try:
            root = ElementTree.fromstring(_text_of(file))
        except ElementTree.ParseError as error:
            found.problems.append(f"{file} is no XML: {error}")
            continue
        size = _floats([root.findtext("size/width", ""), root.findtext("size/height", "")])
        for number, each in enumerate(root.iter("object"), start=1):
            where = f"{file}, object {number}"
            title = each.findtext("name", "").strip()
            corners = _floats([each.findtext(f"bndbox/{side}", "") for side in ("xmin", "ymin", "xmax", "ymax")])
            if not title or corners is None:
                found.problems.append(f"{where} lacks a name, or one of xmin, ymin, xmax and ymax")
                continue
            flag = DIFFICULT if each.findtext("difficult", "0").strip() == "1" else COUNTED
            x1, y1, x2, y2 = corners
            # the first pixel is 1, and the last one belongs to the box
            _add(found, name, Box(title, x1 - 1.0, y1 - 1.0, x2, y2, flag, size=_size(size or ())), where)
    return found


# -- all of them


def _add(found: Annotations, image: str, box: Box, where: str) -> None:
    """Add a box, cut off at the border of its image, or say what is wrong with it.

    An image whose size the file does not say is looked at later (box_columns.py).
    """
    width, height = (float(each or math.inf) for each in box.size)
    border = BORDER
    if box.are_shares:
        width, height, border = 1.0, 1.0, BORDER / 100
    corners = ", ".join(f"{corner:g}" for corner in box[1:5])
    if box.problem:
        found.problems.append(f"{where}: {box.problem}")
    elif min(box.x1, box.y1) < -border or box.x2 > width + border or box.y2 > height + border:
        what = "shares of" if box.are_shares else f"{width:g} x {height:g} pixels of"
        found.problems.append(f"{where}: the box {corners} reaches beyond the {what} its image")
    else:
        left, top, right, bottom = (
            *(min(max(0.0, corner), side) for corner, side in zip(box[1:3], (width, height), strict=True)),
            *(min(max(0.0, corner), side) for corner, side in zip(box[3:5], (width, height), strict=True)),
        )
        inside = box._replace(x1=left, y1=top, x2=right, y2=bottom)
        if inside.problem:
            found.problems.append(f"{where}: the box {corners} is outside of its image")
        else:
            found.boxes[image].append(inside)


def _size(given: Sequence[Any]) -> tuple[int, int]:
    """Return width and height as a file says them; (0, 0) if it does not."""
    if len(given) == 2 and {*map(type, given)} <= {int, float}:
        return int(given[0]), int(given[1])
    return 0, 0


def _files_beside(folder: Path, images: Sequence[str], suffix: str) -> dict[str, Path]:
    """Return image -> the file of its name in a folder, at its place; or directly in it, where the name is there once.

    Raises DataError if no image has one: it is the folder of others.
    """
    stems = Counter(PurePosixPath(image).stem for image in images)
    found = {}
    for image in images:
        at_place = folder / PurePosixPath(image).with_suffix(suffix)
        directly = folder / f"{PurePosixPath(image).stem}{suffix}"
        if at_place.is_file():
            found[image] = at_place
        elif stems[PurePosixPath(image).stem] == 1 and directly.is_file():
            found[image] = directly
    if not found:
        raise DataError(
            f"data.image.boxes: none of {len(images)} images has a {suffix} file of its name in {folder}; the first is "
            f"{next(iter(images), 'nothing')!r}"
        )
    return found


def _json_of(path: Path) -> Any:
    try:
        return json.loads(read_bounded(path, ANNOTATION_BYTES))
    except OSError as error:
        raise DataError(f"data.image.boxes: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from None


def _text_of(path: Path) -> str:
    try:
        return read_bounded(path, ANNOTATION_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}") from None


def _floats(words: Sequence[str]) -> list[float] | None:
    try:
        return [float(word) for word in words]
    except ValueError:
        return None


def _is_numbers(values: Any) -> bool:
    return isinstance(values, list) and len(values) == 4 and {*map(type, values)} <= {int, float}
