"""Find the boxes of object detection that lie beside a folder of images."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from onward.trainer.data.reading.source_kinds import boxes_found

MASK_FOLDERS = ("masks", "mask", "labels", "annotations", "segmentation")
IMAGE_FOLDERS = ("images", "image", "imgs", "img")
MOST_LISTED = 20_000
"""Files among which labels of object detection are looked for."""


def box_place(folder: Path) -> str:
    """Return where the boxes of a folder of images are, relative to it; "" if nothing beside it has any."""
    folder = folder.absolute()
    if not folder.is_dir():
        return ""
    # YOLO's folders of splits first: images/train beside labels/train
    places = {
        "../../labels/{source}": folder.parent.parent / "labels" / folder.name,
        "../labels": folder.parent / "labels",
        "../Annotations": folder.parent / "Annotations",
        "../annotations": folder.parent / "annotations",
    }
    for place, inner in places.items():
        texts = [*inner.glob("*.txt"), *inner.glob("*.xml")] if inner.is_dir() else []
        if boxes_found(sorted(texts)):
            return place
    beside = [*sorted(folder.parent.glob("*.json")), *sorted(folder.parent.glob("annotations/*.json"))]
    named = [path for path in beside if boxes_found([path])]
    # of several, such as instances_train.json and instances_val.json, that which names the folder
    if len(named) > 1:
        named = [path for path in named if folder.name in path.stem]
    if len(named) != 1:
        return ""
    # each split has its own file where this one is called after its folder
    found = named[0].relative_to(folder.parent).as_posix()
    return f"../{found.replace(folder.name, '{source}')}" if len(beside) > 1 else f"../{found}"


def boxes_of_source(path: Path) -> str:
    """Return which labels of object detection a source has, in itself or, of a folder of images, beside it."""
    roots = [path]
    if path.name.lower() in IMAGE_FOLDERS:
        roots += [path.parent / name for name in MASK_FOLDERS]
    files = (file for root in roots for file in _files_of(root))
    return boxes_found(islice(files, MOST_LISTED))


def _files_of(path: Path) -> Iterator[Path]:
    """Yield a file itself, or the files below a folder, lazily: of a large one only the first are looked at."""
    if path.is_file():
        yield path
    else:
        yield from (file for file in path.rglob("*") if file.is_file())
