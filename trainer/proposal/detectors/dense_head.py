"""Recognise the family of a detector with a grid, by running the end of its file on raw outputs of known values.

    random raw outputs --+-- the end of the file ------------- its boxes      every one of them is among those of the
                         '-- the decoding of each family ----- its boxes      family, if it is the family

So nothing depends on how an exporter writes the decoding, on nodes for NonMaxSuppression, or on names. The anchors of a
file are read in the same way: raw outputs of 0 decode to the anchor, and one great score says which box that is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from onward.trainer.config.losses import LossConfig
from onward.trainer.data.schema.columns import Array
from onward.trainer.errors import ConfigError
from onward.trainer.export.detections.box_tables import box_columns, box_tables, distinct_boxes, same_boxes
from onward.trainer.export.served.detections import BoxColumns, Table
from onward.trainer.model.losses.dense_heads.families import FAMILIES, Family
from onward.trainer.model.losses.dense_heads.head import Head
from onward.trainer.proposal.detectors.raw_outputs import Level, RawOutputs

MOST_COMPARED = 500
CODED = "as they are coded, which its users decode"
LEAST, GREATEST = -20.0, 20.0
"""Logits of no and of yes."""
USUAL_NUMBERS = (3, 9, 6, 5, 4, 2, 1)
"""Anchors of a cell, where one tensor holds all channels."""

CODES = (-2.0, -10.0)
LARGEST_FRACTION = 0.3

Anchors = tuple[tuple[tuple[float, float], ...], ...]
"""Of each level the width and height of each anchor, in pixels."""


@dataclass(frozen=True)
class DenseHead:
    """A recognised head."""

    loss: LossConfig
    num_classes: int
    reason: str


def recognise(raw: RawOutputs) -> DenseHead | None:
    """Return the head whose decoding is that of the file; None if it is that of no family.

    A file may write boxes as they are coded, as YOLOX does by default: one with boxes, objectness and scores is that.
    """
    is_one_to_one = "TopK" in raw.operators and "NonMaxSuppression" not in raw.operators
    for name, family in FAMILIES.items():
        if family.one_to_one and not is_one_to_one:
            continue
        # the first family whose decoding agrees
        for order, strides in itertools.product(_orders(raw.levels, family), raw.strides):
            outputs = tuple(level.names[place] for level in raw.levels for place in order)
            for anchors in _anchors(raw, family, order, strides):
                given = {"name": name, "output": outputs, "strides": strides, "anchors": anchors}
                loss = LossConfig.model_validate(given)
                if boxes := _agrees(raw, family, loss):
                    reason = f"fed with random raw outputs, the file computes the boxes of {name}: {boxes}"
                    if family.one_to_one:
                        reason += ", the best of them chosen by TopK alone"
                    return DenseHead(loss, _num_classes(raw.levels[0], family, order, anchors), reason)
    return None


def _orders(levels: Sequence[Level], family: Family) -> Iterator[tuple[int, ...]]:
    """Yield the orders in which the tensors of a level may be the roles of a family, by their channels."""
    number = len(levels[0].names)
    if number == 1:
        # one tensor with the channels of all roles
        yield (0,)
    if number == 1 or number != len(family.rule.roles):
        return
    for order in itertools.permutations(range(number)):
        if all(_fits([level.channels[place] for place in order], family) for level in levels):
            yield order


def _fits(channels: Sequence[int], family: Family) -> bool:
    # anchors of a cell, by each role whose channels are known
    fixed = {own // wanted for own, wanted in zip(channels, family.rule.roles.values(), strict=True) if wanted}
    whole = all(own % wanted == 0 for own, wanted in zip(channels, family.rule.roles.values(), strict=True) if wanted)
    if not whole or len(fixed) != 1:
        return False
    # all roles agree on the anchors of a cell
    (per_cell,) = fixed
    scores = channels[list(family.rule.roles).index("scores")]
    if scores // per_cell <= family.rule.background:
        return False
    return scores % per_cell == 0 if family.rule.has_anchors else per_cell == 1


def _num_classes(level: Level, family: Family, order: Sequence[int], anchors: Anchors) -> int:
    # what is left of one anchor behind the other roles are its classes
    per_cell = len(anchors[0]) if anchors else 1
    if len(order) == 1:
        return level.channels[0] // per_cell - sum(family.rule.roles.values())
    scores = level.channels[order[list(family.rule.roles).index("scores")]]
    return scores // per_cell - family.rule.background


# -- boxes


def _agrees(raw: RawOutputs, family: Family, loss: LossConfig) -> str:
    """Return how the file writes the boxes that the family decodes from the same raw outputs; "" if it does not."""
    random = np.random.default_rng(0)
    values = {}
    for level in raw.levels:
        for name, channels in zip(level.names, level.channels, strict=True):
            # positive, as behind a Relu; a few scores are high enough to be kept. The exponent of a greater code would
            # magnify the rounding of anchors, and files limit it
            made = np.abs(random.normal(size=(1, channels, level.height, level.width))).clip(max=2.0)
            values[name] = made.astype(np.float32)
    try:
        # the decoding of this family, from the same values
        head = family.head([torch.from_numpy(values[name]) for name in loss.outputs], loss)
        known = {"": (family.decode(head)[0].numpy(), raw.size)}
        if family.may_be_coded:
            # numbers about as large as 1, which a tolerance of pixels would not tell apart
            known[CODED] = head.codes[0].numpy(), (1, 1)
    except (ConfigError, RuntimeError):  # the channels are not those of the family
        return ""
    # the decoding of the file
    results = raw.run(values)
    for table in box_tables(results):
        rows = table.rows(results)
        for columns in box_columns(rows.shape[1]):
            boxes = columns.corners(rows, raw.size, raw.scale)
            for coded, (decoded, size) in known.items():
                if _are_among(boxes, decoded, size):
                    return coded or str(columns)
    return ""


def _are_among(boxes: Array, decoded: Array, size: tuple[int, int]) -> bool:
    """Return whether each of the boxes [n, 4] is one of the decoded ones, or such a one within the image."""
    # of most tables the first row is none
    if not same_boxes(boxes[:1], decoded, size).any():
        return False
    distinct = distinct_boxes(boxes)
    # not all of tens of thousands
    some = distinct[:: max(1, -(-len(distinct) // MOST_COMPARED))]
    return len(some) > 0 and bool(same_boxes(some, decoded, size).any(1).all())


# -- anchors


def _anchors(raw: RawOutputs, family: Family, order: Sequence[int], strides: Sequence[float]) -> Iterator[Anchors]:
    """Yield what may be the anchors of the file, of each level; () for a family without any."""
    if not family.rule.has_anchors:
        yield ()
        return
    for numbers in _numbers_of_anchors(raw.levels, family, order):
        # several ways to read an output may give the same anchors
        seen = []
        for found in _measured_anchors(raw, family, order, numbers, strides):
            if found not in seen:
                seen.append(found)
                yield found


def _numbers_of_anchors(levels: Sequence[Level], family: Family, order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield how many anchors a cell of each level may have."""
    if len(order) > 1:
        # boxes have four channels for each anchor
        boxes = order[list(family.rule.roles).index("boxes")]
        yield tuple(level.channels[boxes] // family.rule.roles["boxes"] for level in levels)
        return
    least = sum(family.rule.roles.values()) + 1
    for number in USUAL_NUMBERS:
        if all(level.channels[0] % number == 0 and level.channels[0] // number >= least for level in levels):
            yield (number,) * len(levels)


def _measured_anchors(
    raw: RawOutputs, family: Family, order: Sequence[int], numbers: Sequence[int], strides: Sequence[float]
) -> Iterator[Anchors]:
    """Yield the sides of the box that the file finds for each anchor alone, in each way in which it may hold boxes.

    The boxes are coded as a fraction of their anchors, so that no border of the image cuts them off.
    """
    code, fraction = _small_code(family)
    # what the file returns where there is no object at all
    background = _rows_of_tables(raw.run(_filled(raw, family, order, numbers, code)))
    boxes: dict[tuple[Table, BoxColumns], list[Array]] = {}
    centres = []
    for place, (level, number) in enumerate(zip(raw.levels, numbers, strict=True)):
        stride = strides[place]
        # any cell would do; those in the middle are not cut off
        cell = np.array([level.width // 2 + 0.5, level.height // 2 + 0.5]) * stride
        for anchor in range(number):
            centres.append((cell, stride))
            tables = _rows_of_tables(raw.run(_filled(raw, family, order, numbers, code, (place, anchor))))
            # of dense outputs the row of the anchor, of chosen ones the first
            changed = _changed_rows(tables, background)
            for table, rows in tables.items():
                row = changed.get(len(rows), 0)
                for columns in box_columns(rows.shape[1]):
                    own = columns.corners(rows[row : row + 1], raw.size, raw.scale)
                    boxes.setdefault((table, columns), []).extend(own)
    for found in boxes.values():
        # boxes at other places are no boxes, or read in a wrong way
        if len(found) == len(centres) and all(map(_is_there, found, centres)):
            sides = iter([_rounded((box[2:] - box[:2]) / fraction) for box in found])
            yield tuple(tuple(next(sides) for _ in range(number)) for number in numbers)


def _rows_of_tables(results: Sequence[Array]) -> dict[Table, Array]:
    return {table: table.rows(results) for table in box_tables(results)}


def _rounded(sides: Array) -> tuple[float, float]:
    """Return width and height with the digits that a computation in fp32 leaves."""
    return float(f"{sides[0]:.5g}"), float(f"{sides[1]:.5g}")


def _changed_rows(tables: Mapping[Table, Array], before: Mapping[Table, Array]) -> dict[int, int]:
    """Return number of rows -> the row that the one great score has changed most, among tables of so many rows.

    Scores may be an output of their own. Where only the best boxes are left, that of the great score comes first.
    """
    changes: dict[int, Array] = {}
    for which, rows in tables.items():
        if which in before and before[which].shape == rows.shape and len(rows) > 1:
            change = np.abs(rows - before[which]).max(1)
            changes[len(rows)] = np.maximum(changes.get(len(rows), 0.0), change)
    return {number: int(change.argmax()) for number, change in changes.items() if change.max() > 0}


def _is_there(box: Array, centre: tuple[Array, float]) -> bool:
    middle, stride = centre
    # anchors may be shifted by half a cell, and belong to the cell still
    sides = box[2:] - box[:2]
    return bool((sides > 0).all() and np.abs((box[:2] + box[2:]) / 2 - middle).max() <= stride)


def _small_code(family: Family) -> tuple[float, float]:
    """Return the code of a side that is a small fraction of that of the anchor, and this fraction."""
    # families scale their codes by 1, 5 or otherwise
    for code in CODES:
        codes = torch.tensor([0.0, 0.0, code, code]).reshape(1, 1, 4)
        one = torch.ones(1, 2)
        head = Head(codes, codes, codes[..., 0], one, one[:, 0], one, one[0], [(1, 1)])
        box = family.decode(head)[0, 0]
        fraction = float(box[2] - box[0])
        if fraction < LARGEST_FRACTION:
            break
    return code, fraction


def _filled(
    raw: RawOutputs,
    family: Family,
    order: Sequence[int],
    numbers: Sequence[int],
    code: float,
    found: tuple[int, int] | None = None,
) -> Mapping[str, Array]:
    """Return raw outputs whose boxes have a code for both sides, without any object, or with one.

    found: level and anchor of the object, in the cell in the middle.
    """
    values = {}
    for place, (level, number) in enumerate(zip(raw.levels, numbers, strict=True)):
        # channels of one anchor
        total = sum(level.channels[each] for each in order) // number
        rest = total - sum(family.rule.roles.values())
        parts = []
        for role, channels in family.rule.roles.items():
            made = np.zeros((1, number, channels or rest, level.height, level.width), np.float32)
            if role == "boxes":
                made[:, :, 2:] = code
            else:
                made += LEAST
                # everywhere the background is certain
                if role == "scores" and family.rule.background:
                    made[:, :, 0] = GREATEST
                if found and found[0] == place:
                    # in the cell of the object its first class is certain instead
                    cell = made[0, found[1], :, level.height // 2, level.width // 2]
                    cell[:] = LEAST
                    cell[family.rule.background if role == "scores" else 0] = GREATEST
            parts.append(made)
        if len(order) == 1:
            parts = [np.concatenate(parts, 2)]
        for each, made in zip(order, parts, strict=True):
            values[level.names[each]] = made.reshape(1, -1, level.height, level.width)
    return values
