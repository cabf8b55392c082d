"""Name the kinds of files in a source by their endings, with the setting that reads each kind, or the way out.

494 .wav                         audio; a table [data.audio] makes Onward decode them
annotations.json with "bbox"     boxes of object detection, whose images are the source
3 .mp4                           video; save its frames as images
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from onward.trainer.bounds import opened
from onward.trainer.data.audio.audio_decoding import AUDIO_SUFFIXES
from onward.trainer.data.images.image_decoding import IMAGE_SUFFIXES

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".tex")
"""Ends of the names of text files."""
MOST_NAMED = 4
"""Kinds that a message names."""
MOST_OPENED = 3
"""Files of one ending that are searched for boxes."""
HEAD_BYTES = 1 << 16
"""Bytes that are read at the beginning and at the end of such a file."""
PAGE = "docs/how-to/what-it-does-not-train.md"
BOX_PAGE = "docs/how-to/detect-objects.md"


@dataclass(frozen=True)
class Kind:
    """A kind of files."""

    name: str
    suffixes: tuple[str, ...]
    remedy: str
    """The setting that reads the files, or what to do with them; {suffix} is the ending that was found."""


KINDS = (
    Kind("images", tuple(IMAGE_SUFFIXES), "a table [data.image] makes Onward decode images"),
    Kind("audio", AUDIO_SUFFIXES, "a table [data.audio] makes Onward decode audio files"),
    Kind(
        "audio that libsndfile does not read",
        (".m4a", ".aac", ".wma", ".opus", ".amr"),
        "convert it to .wav or .flac (ffmpeg does), and add a table [data.audio]",
    ),
    Kind(
        "video",
        (".mp4", ".avi", ".mov", ".mkv", ".webm", ".mpg", ".mpeg", ".m4v", ".wmv"),
        "Onward does not read video: save frames as images in a folder for each class, or features of clips in an .npz",
    ),
    Kind("text", TEXT_SUFFIXES, 'data.source = "FOLDER/**/*{suffix}" reads them'),
    Kind("tar files", (".tar",), 'a table [data.image] reads them as WebDataset, or unpack them ("tar -xf")'),
    Kind("JSON", (".json",), "write a table as JSON Lines: one object on each line, in a file named .jsonl"),
    Kind("spreadsheets", (".xlsx", ".xls", ".ods"), "save the sheet as CSV"),
    Kind("arrays of numpy", (".npy",), "write one .npz with an array for each column (numpy.savez)"),
    Kind(
        "pickled objects",
        (".pkl", ".pickle", ".pt", ".pth", ".joblib", ".rds"),
        "Onward does not load them, because loading runs their code: write the rows as Parquet or .npz",
    ),
    Kind("HDF5 and MATLAB files", (".h5", ".hdf5", ".hdf", ".mat"), "write the arrays as .npz, the tables as Parquet"),
    Kind("TFRecord files", (".tfrecord", ".tfrecords"), "write the rows as Parquet, or as tar files of WebDataset"),
    Kind("tables of other tools", (".feather", ".orc", ".avro", ".dta", ".sav"), "write them as Parquet"),
    Kind("databases", (".db", ".sqlite", ".sqlite3", ".duckdb"), "write the rows of a query as CSV or Parquet"),
    Kind("archives", (".zip", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"), "unpack them"),
    Kind(
        "images that Onward does not decode",
        (".dcm", ".nii", ".svg", ".heic", ".avif", ".psd", ".raw", ".nef", ".cr2"),
        "save them as PNG or JPEG, and add a table [data.image]",
    ),
    Kind("documents", (".pdf", ".docx", ".doc", ".html", ".htm", ".epub"), "save their text as .txt or as JSON Lines"),
    Kind("XML", (".xml",), "write a table as CSV or JSON Lines"),
    Kind("settings", (".yaml", ".yml", ".toml", ".ini", ".cfg"), "name the file or folder of the data itself"),
)
"""In the order in which equally frequent kinds are named."""


def kinds_found(files: Mapping[str, Path]) -> str:
    """Return what the files of a source are, by their endings, and what each kind needs. files: name -> path.

    Such as "494 .wav: audio; a table [data.audio] makes Onward decode audio files".
    """
    if boxes := boxes_found(files.values()):
        return boxes
    counts = Counter(path.suffix.lower() for path in files.values())
    by_suffix = {suffix: kind for kind in KINDS for suffix in kind.suffixes}
    order = {suffix: at for at, suffix in enumerate(by_suffix)}
    # kinds that are known first, then the most frequent, then the order of the table
    ranked = sorted(counts, key=lambda suffix: (suffix not in order, -counts[suffix], order.get(suffix, 0)))
    texts = []
    for suffix in ranked[:MOST_NAMED]:
        shown = f"{counts[suffix]:,} {suffix}" if suffix else f"{counts[suffix]:,} without an ending"
        if suffix in by_suffix:
            kind = by_suffix[suffix]
            texts.append(f"{shown}: {kind.name}; {kind.remedy.format(suffix=suffix)}")
        else:
            texts.append(f"{shown}: no format that Onward knows; set data.format, for text with a glob in data.source")
    if (more := len(ranked) - MOST_NAMED) > 0:
        texts.append(f"{more} more endings")
    return ". ".join(texts)


def boxes_found(paths: Iterable[Path]) -> str:
    """Return which labels of object detection are among files, and the way out; "" if there are none.

    COCO: JSON with boxes. Pascal VOC: XML with boxes. YOLO: data.yaml, and texts of a class and four numbers a line.
    """
    opened_of = Counter[str]()
    for path in paths:
        suffix = path.suffix.lower()
        if suffix not in BOX_LABELS or opened_of[suffix] == MOST_OPENED:
            continue
        opened_of[suffix] += 1
        name, pattern = BOX_LABELS[suffix]
        if all(re.search(each, _ends(path), re.M) for each in pattern):
            return (
                f"{path.name} holds boxes of object detection ({name}): data.source is the folder of images, and "
                f"data.image.boxes names the boxes; {BOX_PAGE} says which detectors are trained"
            )
    return ""


YOLO_DATA = (rb"^names\s*:", rb"^(train|val|nc)\s*:")
BOX_LABELS: dict[str, tuple[str, tuple[bytes, ...]]] = {
    ".json": ("COCO", (rb'"bbox"\s*:',)),
    ".xml": ("Pascal VOC", (rb"<bndbox>",)),
    ".yaml": ("YOLO", YOLO_DATA),
    ".yml": ("YOLO", YOLO_DATA),
    ".txt": ("YOLO", (rb"\A\d+( (0|1|[01]?\.\d+)){4}\s*$",)),
}
"""Ending -> the format of boxes, and what all must be found in such a file."""


def _ends(path: Path) -> bytes:
    """Return the beginning and the end of a file; of a short one all of it; nothing if it cannot be read."""
    try:
        size = path.stat().st_size
        with opened(path) as file:
            head = file.read(HEAD_BYTES)
            if size > 2 * HEAD_BYTES:
                file.seek(-HEAD_BYTES, 2)
            return bytes(head + file.read(HEAD_BYTES))
    except OSError:
        return b""
