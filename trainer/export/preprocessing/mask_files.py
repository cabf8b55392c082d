"""Write predicted masks as PNG files: for each image the class of each of its pixels.

    output [n, classes, H, W]        the greatest score of each pixel
    output [n, 1, H, W] or [n, H, W] 1 where the score is above 0, else 0

A mask has the height and width of the model's input, not those of the photograph, and shows what the model saw of it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from onward.trainer.data.schema.columns import Array
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.export.measuring.predictions import Predictions
from onward.trainer.run.durable_files import write_durably


def write_masks(folder: Path, found: Predictions, *, overwrite: bool = False) -> None:
    """Write FOLDER/NAME.png for each image, named after its file or row. What exists is refused before any is written.

    Raises ConfigError for a model whose output is no mask, DataError as `Predictions`.
    """
    if found.predictor.detector:
        raise ConfigError(
            f"the model predicts boxes, and {folder}/ would hold masks; name a file .csv, .parquet or .json"
        )
    if len(found.predictor.meanings) != 1:
        outputs = ", ".join(meaning["name"] for meaning in found.predictor.meanings)
        raise ConfigError(f"masks are written of one output, and the model has {outputs}; write a file .npz")
    # an empty folder may be there already
    has_content = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if has_content and not overwrite:
        raise ConfigError(f"{folder} exists already; name another folder, or add --overwrite")
    classes_last = found.predictor.channels_last
    for name, scores in _each(found):
        mask = _mask(scores, classes_last=classes_last)
        write_durably(folder / name, _png(mask))


def _each(found: Predictions) -> Iterator[tuple[PurePath, Array]]:
    """Yield (name of the file, scores) of each row. A name that two images would have gets the suffix of its image."""
    (meaning,) = found.predictor.meanings
    written = set[PurePath]()
    for batch, outputs in found.outputs():
        for names, scores in zip(_rows(batch.ids), outputs[meaning["name"]], strict=True):
            own = PurePath(str(names.get("file", "")) if "row" not in names else "_".join(map(_plain, names.values())))
            path = own.with_suffix(".png")
            if path in written:  # a.jpg and a.png
                path = own.with_name(f"{own.name}.png")
            written.add(path)
            yield path, scores


def _rows(ids: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(ids, cells, strict=True)) for cells in zip(*ids.values(), strict=True)]


def _plain(name: Any) -> str:
    return PurePath(str(name)).stem


def _mask(scores: Array, *, classes_last: bool) -> Array:
    """Return the class of each pixel, uint8 [H, W]. Raises DataError for scores of another shape."""
    axis = -1 if classes_last else 0
    if scores.ndim == 3 and scores.shape[axis] > 1:
        return np.asarray(scores.argmax(axis).astype(np.uint8))
    flat = scores.squeeze(axis) if scores.ndim == 3 else scores
    if flat.ndim != 2:
        raise DataError(f"a row of the output is {list(scores.shape)}, no mask: write a file .csv, .parquet or .npz")
    return np.asarray((flat > 0).astype(np.uint8))


def _png(mask: Array) -> bytes:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(mask).save(content, "PNG")
    return content.getvalue()
