"""Propose how masks are read: the column or folder, the values of their pixels, and the loss over the pixels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onward.trainer.errors import ConfigError
from onward.trainer.proposal.draft import Draft
from onward.trainer.proposal.inputs import shown
from onward.trainer.proposal.source_summary import Facts
from onward.trainer.proposal.targets import Target

VOID = 255
"""The usual value of pixels that are not labelled."""
MOST_VALUES = 256
MODES = ("1", "L", "P", "I", "I;16")
"""Pillow's modes of one channel."""


def propose_masks(draft: Draft, facts: Facts, found: Sequence[Target]) -> list[str]:
    """Propose the masks of a model with scores for each pixel; return their columns, [] if there are none.

    Raises ConfigError for masks that hold something else than numbers of classes.
    """
    dense = [each for each in found if each.info.shape is not None and len(each.info.shape) == 4]
    if len(found) != 1 or not dense:
        return []
    image = draft.value("data.image.column", "image")
    column = "mask" if draft.value("data.image.mask_folder") else ""
    if not column:
        others = [name for name in facts.schema if name != image and facts.looks_like_images(name)]
        if len(others) > 1:
            draft.ask("data.label", "the column of the masks", dict.fromkeys(others, ""))
        if not others:
            return []
        column = others[0]
        draft.set("data.image.masks", [column], f"{column} holds images, too, and the output is {shown(dense[0].info)}")
    draft.set("data.label", column, "the mask of each image")
    _propose_values(draft, dense[0], facts, column)
    return [column]


def _propose_values(draft: Draft, target: Target, facts: Facts, column: str) -> None:
    """Propose what the values of pixels mean, the loss, and a new head."""
    masks = facts.of_images(column, lambda mask: (mask.mode, np.unique(np.asarray(mask)).tolist()))
    modes = {mode for mode, _ in masks}
    values = sorted({int(value) for _, own in masks for value in own})
    if not masks or len(values) > MOST_VALUES or modes - {*MODES}:
        kinds = f"{len(masks)} opened: {', '.join(sorted(modes))}" if masks else "none can be opened"
        raise ConfigError(
            f"the masks of column {column!r} ({kinds}) do not hold a class number for each pixel; save them as grey or "
            "palette images"
        )
    dims = (target.info.shape or ())[1:]
    classes = dims[2] if draft.value("data.image.layout") == "nhwc" or (dims[0] or 0) > (dims[2] or 0) else dims[0]
    seen = f"{len(masks)} masks hold {_listed(values)}"
    tensor = target.scores
    if tensor != target.info.name:
        draft.set("model.output", tensor, target.scores_reason)
    if classes == 1:
        draft.set("model.loss", "bce_with_logits", f"one score for each pixel; {seen}")
        if values != [0, 1]:
            draft.set("data.image.mask_values", values, f"{values[-1]} is class 1")
        return
    draft.set("model.loss", "cross_entropy", f"of each pixel; {seen}, and the output has {classes} scores")
    draft.set("metrics", ["accuracy", "mean_iou"], "")
    known = [value for value in values if value != VOID]
    if classes is None or values[-1] < classes:
        return
    if values[-1] == VOID and known and known[-1] < classes and not (classes == len(values) == 2):
        draft.set("model.ignore_index", VOID, f"{seen}; pixels of {VOID} are not labelled")
    elif len(values) == classes:
        draft.set("data.image.mask_values", values, f"{seen}: as many values as classes, in their order")
    elif known == list(range(len(known))) or known[-1] < 2 * len(known):
        draft.set("model.num_classes", known[-1] + 1, f"a new head: {seen}")
        if values[-1] == VOID:
            draft.set("model.ignore_index", VOID, f"pixels of {VOID} are not labelled")
    else:
        draft.set("model.num_classes", len(values), f"a new head: {seen}")
        draft.set("data.image.mask_values", values, "in the order of the classes")


def _listed(values: Sequence[int]) -> str:
    few = ", ".join(map(str, values[:6]))
    return f"{few}, ... {values[-1]}" if len(values) > 6 else few
