"""Read folders of image files, with a class for each folder, and tar files as WebDataset writes them.

train/cat/001.jpg                          image = the file, label = "cat"
train/dog/poodle/002.png                   image = the file, label = "dog": the first folder is the class

shard-000.tar:  a/001.jpg  a/001.cls       image = the bytes of the .jpg, label = the integer in the .cls
                a/002.jpg  a/002.cls       consecutive members with one name up to the first dot are one row
"""

from __future__ import annotations

import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from onward.trainer.bounds import CONTENT_BYTES, TAR_HEADER_BYTES, check_regular
from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.data.images.box_annotations import Annotations, read_annotations
from onward.trainer.data.images.image_decoding import IMAGE_SUFFIXES
from onward.trainer.data.schema.columns import PART_ROWS, Array, Block, Cells
from onward.trainer.data.schema.file_parts import FilePart
from onward.trainer.data.schema.permutation import hash_key
from onward.trainer.errors import DataError, few

Files = Sequence[tuple[str, Path]]
"""(name relative to the source, path), sorted by name."""


# -- folders


def folder_blocks(
    files: Files,
    names: Sequence[str] | None,
    column: str = "image",
    mask_folder: str = "",
    boxes: str = "",
    *,
    skips_rows: bool = False,
    part: FilePart | None = None,
) -> Iterator[Block]:
    """Yield the files in blocks, with the columns `column` (the path) and `label` (the class folder's name).

    Without class folders there is no column `label`. With a folder of masks (data.image.masks) there is a column
    `mask` instead, and images without one are bad rows if such rows are left out (data.bad_rows); with boxes
    (data.image.boxes) a column `boxes`, and images without labels are bad rows. Raises DataError if only some files are
    in a folder of a class, and as `mask_files` and `read_annotations`. part: the files that are read; None for all.
    """
    part = part or FilePart()
    masks = mask_files(files, mask_folder, skips_rows=skips_rows) if mask_folder else []
    labels = annotations_beside(files, boxes).boxes if boxes else {}
    classes = set[str]() if masks or boxes else _classes(files)
    for first in range(part.begin, min(part.stop, len(files)), PART_ROWS):
        some = files[first : first + PART_ROWS]
        # without masks each row has its image, so that no row is bad
        needed: Sequence[Path | None] = masks[first : first + PART_ROWS] or [path for _, path in some]
        bad = {at: f"has no mask in {mask_folder}" for at, file in enumerate(needed) if file is None}
        if boxes:
            bad |= {at: f"has no labels in {boxes}" for at, (name, _) in enumerate(some) if name not in labels}
        good = [at for at in range(len(some)) if at not in bad]
        cells: dict[str, Cells] = {column: [str(some[at][1].absolute()) for at in good]}
        if masks:
            cells["mask"] = [str(needed[at]) for at in good]
        if boxes:
            cells["boxes"] = [labels[some[at][0]] for at in good]
        if classes:
            cells["label"] = [PurePosixPath(name).parts[0] for name, _ in some]
        bad = {first + at: why for at, why in bad.items()}
        shown = {first + at: str(path) for at, (_, path) in enumerate(some)}
        if names is not None:
            cells = {name: cells[name] for name in cells if name in names}
        yield Block(column, first + np.array(good, np.int64), cells, bad, names=shown)


def annotations_beside(files: Files, boxes: str) -> Annotations:
    """Return the boxes beside the images of a source. Raises as `read_annotations`."""
    name, path = files[0]
    return read_annotations(Path(str(path).removesuffix(name)), [name for name, _ in files], boxes)


def mask_files(files: Files, mask_folder: str, *, skips_rows: bool = False) -> list[Path | None]:
    """Return the mask of each image: the file of its name, with any suffix, in `mask_folder`, relative to the source.

    skips_rows: None for images without a mask. Raises DataError for a folder that does not exist or has none of the
    masks, for images with several, and for those without one.
    """
    name, path = files[0]
    source = Path(str(path).removesuffix(name))
    # not resolve(): "../masks" of a folder that is a link is beside the link
    folder = Path(os.path.normpath(ImageConfig(masks=mask_folder).masks_of(source).absolute()))
    if not folder.is_dir():
        raise DataError(f"data.image.masks: there is no folder {folder}")
    found: dict[PurePosixPath, list[Path]] = {}
    for mask in sorted(folder.rglob("*")):
        if mask.suffix.lower() in IMAGE_SUFFIXES:
            # by the name without its suffix: masks are often .png beside images in .jpg
            found.setdefault(PurePosixPath(mask.relative_to(folder)).with_suffix(""), []).append(mask)
    masks = [found.get(PurePosixPath(name).with_suffix(""), []) for name, _ in files]
    names = [name for name, _ in files]
    without = [name for name, each in zip(names, masks, strict=True) if not each]
    several = [name for name, each in zip(names, masks, strict=True) if len(each) > 1]
    # if no image has a mask, the folder is probably another one
    left_out = skips_rows and len(without) < len(files)
    for wrong, what in (([] if left_out else without, "no mask"), (several, "several masks")):
        if wrong:
            raise DataError(f"{len(wrong)} of {len(files)} images have {what} in {folder}: {few(wrong)}")
    return [each[0] if each else None for each in masks]


def held_out_names(block: Block, fraction: float) -> Array:
    """Return which image files are for evaluation: bool [n]. The name of a file alone decides, inside its folder."""
    # folder and name: a source that is moved keeps its split
    names = ["/".join(Path(block.names[at]).parts[-2:]) for at in block.index.tolist()]
    hashes = np.array([hash_key("held out", name) for name in names], np.uint64)
    return hashes.astype(np.float64) < fraction * 2.0**64


def check_classes(training: Files, evaluation: Files, setting: str) -> None:
    """Raise DataError if the files of `setting` have a class folder that the training files lack, or none at all."""
    known = _classes(training)
    found = _classes(evaluation)
    if unknown := sorted(found - known):
        raise DataError(
            f"{setting} has {len(unknown)} class folders that data.source lacks: "
            f"{few(unknown)}; data.source has {len(known)}: {few(sorted(known))}"
        )
    if known and not found:
        raise DataError(f"data.source has class folders ({few(sorted(known))}), but {setting} has none")


def refuse_empty_classes(source: Path, files: Files) -> None:
    """Raise DataError if a folder beside the class folders holds no image."""
    classes = _classes(files)
    if not classes or not source.is_dir():
        return
    folders = {path.name for path in source.iterdir() if path.is_dir()}
    visible = {name for name in folders if not name.startswith(".")}
    if empty := sorted(visible - classes):
        raise DataError(f"{source}: {len(empty)} class folders hold no image: {few(empty)}; remove or fill them")


def _classes(files: Files) -> set[str]:
    """Return the names of the class folders; empty if all files are outside of folders."""
    inside = [name for name, _ in files if len(PurePosixPath(name).parts) > 1]
    if inside and len(inside) < len(files):
        outside = [name for name, _ in files if len(PurePosixPath(name).parts) == 1]
        raise DataError(
            f"{len(outside)} image files are beside the class folders: {few(outside)}; put them into the folder of "
            f"their class, as the other {len(inside)}"
        )
    return {PurePosixPath(name).parts[0] for name in inside}


# -- tar files


def tar_blocks(path: Path, names: Sequence[str] | None) -> Iterator[Block]:
    """Yield the samples of a tar file in blocks; it is read as a stream, some samples at a time.

    Each extension is a column: `jpg`, `cls`, `json`, `seg.png`. The image is also named `image`, the integer of `cls`
    also `label`, and the keys of a JSON object are columns, too. Raises DataError for a file that cannot be read.
    """
    rows: list[dict[str, Any]] = []
    shown = list[str]()
    index = list[int]()
    bad = dict[int, str]()
    count = 0

    def block() -> Block:
        # not every sample has every extension: the block has a column for each that occurs
        keys = list(dict.fromkeys(key for row in rows for key in row))
        if names is not None:
            keys = [key for key in keys if key in names]
        cells: Mapping[str, Cells] = {key: [row.get(key) for row in rows] for key in keys}
        named = {count - len(shown) + at: name for at, name in enumerate(shown)}
        return Block(str(path), np.array(index, np.int64), cells, dict(bad), names=named)

    try:
        if not check_regular(path):  # files of the kernel, too, are 0 bytes long, and some wait for content
            raise DataError(f"{path} is empty (0 bytes)")
        with tarfile.open(path, mode="r|*", tarinfo=_Member) as archive:
            members = (member for member in archive if member.isfile())
            # WebDataset writes the files of a sample one after the other: neighbours of one key are a sample
            for key, group in groupby(members, key=lambda member: _split(member.name)[0]):
                contents = {_split(member.name)[1]: _content(archive, member) for member in group}
                shown.append(f"{path}, sample {key}")
                try:
                    rows.append(_row(contents))
                    index.append(count)
                except ValueError as error:
                    bad[count] = str(error)
                count += 1
                if len(shown) == PART_ROWS:
                    yield block()
                    rows = []
                    shown = []
                    index = []
                    bad = {}
            if shown:
                yield block()
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read as a tar file: {error}") from error


def _split(name: str) -> tuple[str, str]:
    """Return (key, extension): the extension begins at the first dot of the last part of the name."""
    folder, _, file = name.rpartition("/")
    key, _, extension = file.partition(".")
    return f"{folder}/{key}".lstrip("/"), extension.lower()


class _Member(tarfile.TarInfo):
    """A member whose extended headers, which tarfile reads into memory at once, are bounded."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        headers = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME)
        if self.type in (*headers, tarfile.GNUTYPE_LONGLINK) and self.size > TAR_HEADER_BYTES.most:
            raise tarfile.ReadError(f"it has {TAR_HEADER_BYTES.exceeded(self.size)}")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > CONTENT_BYTES.most:
        raise tarfile.ReadError(f"{member.name} has {CONTENT_BYTES.exceeded(member.size)}")
    file = archive.extractfile(member)
    return file.read() if file else b""


def _row(contents: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the columns of one sample. Raises ValueError for content that does not fit its extension."""
    row: dict[str, Any] = {}
    for extension, content in contents.items():
        kind = extension.rpartition(".")[2]
        if kind == "json":
            found = _json(extension, content)
            row |= found if isinstance(found, dict) else {extension: found}
        elif kind in ("cls", "txt"):
            try:
                text = content.decode().strip()
                row[extension] = int(text) if kind == "cls" else text
            except ValueError:
                wanted = "a class number" if kind == "cls" else "UTF-8"
                raise ValueError(f"{extension} is {content[:20]!r}, not {wanted}") from None
        else:
            row[extension] = content
    # of several images it is not clear which one `image` would be
    images = [extension for extension in contents if f".{extension}" in IMAGE_SUFFIXES]
    if len(images) == 1:
        row.setdefault("image", row[images[0]])
    if "cls" in row:
        row.setdefault("label", row["cls"])
    return row


def _json(extension: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{extension} is not JSON: {error}") from None
