"""Make columns of the outputs of a model: classes and probabilities, or numbers.

    the output holds           columns
    classes [n, classes]       class, probability, probability_CLASS for each class
    labels, of one label       class (0 or 1), probability, probability_LABEL (of 1)
    labels, of several         classes (those above one half), probability_LABEL for each label
    values [n] or [n, k]       predicted_LABEL, or predicted_LABEL_0 to predicted_LABEL_k-1

Of several outputs each has its name in front: `kind_class`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .media import Array

Meaning = Mapping[str, Any]
"""What one output is: an entry of `outputs` in preprocessing.json."""
Columns = dict[str, Array]

FORMER = {
    **dict.fromkeys(("cross_entropy", "dice"), "classes"),
    **dict.fromkeys(("bce_with_logits", "focal"), "labels"),
    "ctc": "sequences",
}
"""Loss -> what its output holds, of files of former versions, which do not say it."""
MOST_CLASSES = 20
"""Up to so many classes or labels each has a column with its probability, unless the best ones are asked for."""
MOST_NUMBERS = 4096
"""The most columns of numbers that one output gives."""


class NoColumns(ValueError):
    """An output whose rows are no numbers side by side, such as masks."""


def result_columns(outputs: Mapping[str, Array], meanings: Sequence[Meaning], top: int = 0) -> Columns:
    """Return column -> values [n] of the outputs of n rows.

    top: give the best so many classes, as class_2, probability_2, ..., in place of the probability of each class.
    Raises NoColumns for an output such as a mask.
    """
    found: Columns = {}
    for meaning in meanings:
        values = _flat(outputs[meaning["name"]], meaning)
        prefix = f"{_title(meaning)}_" if len(meanings) > 1 else ""
        holds = _holds(meaning)
        if holds == "classes":
            found |= _classes(values, meaning, prefix, top)
        elif holds == "labels":
            found |= _labels(values, meaning, prefix)
        else:
            found |= _numbers(values, meaning)
    return found


def _holds(meaning: Meaning) -> str:
    return str(meaning.get("holds") or FORMER.get(meaning["loss"], ""))


def _title(meaning: Meaning) -> str:
    labels = meaning["label"]
    return str(labels[0] if len(labels) == 1 else meaning["name"])


def _flat(values: Array, meaning: Meaning) -> Array:
    """Return an output as [n, k], without axes of length 1. Raises NoColumns if it has more axes."""
    if _holds(meaning) == "objects":
        raise NoColumns(
            f"output {meaning['name']!r} holds boxes, and the preprocessing.json beside the file, of an earlier "
            "version, does not say where: `onward export RUN -o FILE.onnx` writes both anew"
        )
    # axes of length 1, as of pooled images, are no positions
    kept = [length for length in values.shape[1:] if length != 1]
    if len(kept) > 1 or _holds(meaning) == "sequences":
        raise NoColumns(
            f"output {meaning['name']!r} is {list(values.shape)}, with results for each position of a row (masks, "
            "tokens, sequences), which are no columns; write masks into a folder, or the output into a file .npz"
        )
    return values.reshape(len(values), kept[0] if kept else 1)


def class_names(meaning: Meaning, count: int) -> Array:
    """Return the names of the classes [count], or their numbers where training had no names."""
    names = meaning["classes"]
    return np.array(names, object) if len(names) == count else np.arange(count)


def softmax(scores: Array) -> Array:
    """Return probabilities along axis 1 of scores [n, classes, ...], float32 of the same shape."""
    # float64, and without the greatest score: no power overflows
    wide = scores.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    return np.asarray((powers / powers.sum(axis=1, keepdims=True)).astype(np.float32))


def sigmoid(scores: Array) -> Array:
    """Return the probability of each score [...] alone, float32."""
    # the exponent is never positive, so that nothing overflows
    small = np.exp(-np.abs(scores.astype(np.float64)))
    return np.asarray(np.where(scores >= 0, 1.0 / (1.0 + small), small / (1.0 + small)).astype(np.float32))


def _classes(scores: Array, meaning: Meaning, prefix: str, top: int) -> Columns:
    """Return the columns of an output that has one score for each class."""
    probabilities = softmax(scores)
    names = class_names(meaning, scores.shape[1])
    # stable, so that of equal scores the first class wins, as argmax has it
    order = np.argsort(-scores, axis=1, kind="stable")
    found: Columns = {}
    for place in range(min(max(top, 1), scores.shape[1])):
        end = f"_{place + 1}" if place else ""
        found[f"{prefix}class{end}"] = names[order[:, place]]
        found[f"{prefix}probability{end}"] = np.take_along_axis(probabilities, order[:, place : place + 1], 1)[:, 0]
    # a thousand columns of probabilities would help nobody
    if not top and len(names) <= MOST_CLASSES:
        found |= {f"{prefix}probability_{name}": probabilities[:, at] for at, name in enumerate(names)}
    return found


def _labels(scores: Array, meaning: Meaning, prefix: str) -> Columns:
    """Return the columns of an output that says yes or no to each label."""
    probabilities = sigmoid(scores)
    names = _part_names(meaning, scores.shape[1])
    found: Columns = {}
    if scores.shape[1] == 1:
        positive = probabilities[:, 0]
        found[f"{prefix}class"] = (positive >= 0.5).astype(np.int64)
        found[f"{prefix}probability"] = np.maximum(positive, 1 - positive)
    else:
        classes = []
        for row in probabilities >= 0.5:
            classes.append(" ".join(name for name, is_on in zip(names, row, strict=True) if is_on))
        found[f"{prefix}classes"] = np.array(classes, object)
    if len(names) <= MOST_NUMBERS:
        found |= {f"{prefix}probability_{name}": probabilities[:, at] for at, name in enumerate(names)}
    return found


def _numbers(values: Array, meaning: Meaning) -> Columns:
    if values.shape[1] > MOST_NUMBERS:
        raise NoColumns(
            f"output {meaning['name']!r} has {values.shape[1]:,} numbers a row, above {MOST_NUMBERS:,} columns; write "
            "it as it is, into a file .npz"
        )
    # of a file without preprocessing.json nobody says that its outputs are predictions of a column
    front = "predicted_" if meaning["loss"] else ""
    return {f"{front}{name}": values[:, at] for at, name in enumerate(_part_names(meaning, values.shape[1]))}


def _part_names(meaning: Meaning, count: int) -> list[str]:
    """Return a name for each of `count` values of a row: those of the label's columns if there are as many."""
    labels = list(meaning["label"])
    if len(labels) == count:
        return labels
    title = _title(meaning)
    return [title] if count == 1 else [f"{title}_{at}" for at in range(count)]
