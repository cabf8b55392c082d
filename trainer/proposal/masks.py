"""Propose how masks are read: the column or folder, the values of their pixels, and the loss over the pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.errors import ConfigError
from onward.trainer.proposal.inputs import num_axes, shown

if TYPE_CHECKING:
    from onward.trainer.proposal.draft import Draft
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
    dense = [target for target in found if num_axes(target.info) == 4]
    if len(found) != 1 or not dense:
        return []
    image = draft.value("data.image.column", "image")
    given = draft.value("data.image.masks", ())
    column = "mask" if ImageConfig(masks=given).mask_folder else ""
    if not column:
        others = [name for name in facts.schema if name != image]
        masks = [name for name in others if facts.looks_like_images(name)]
        if len(masks) > 1:
            draft.ask("data.label", "the column of the masks", dict.fromkeys(masks, ""))
        if not masks:
            return []
        column = masks[0]
        draft.set("data.image.masks", [column], f"{column} holds images, too, and the output is {shown(dense[0].info)}")
    draft.set("data.label", column, "the mask of each image")
    _propose_values(draft, dense[0], facts, column)
    return [column]


def _propose_values(draft: Draft, target: Target, facts: Facts, column: str) -> None:
    """Propose what the values of pixels mean, the loss, and a new head."""
    masks = facts.of_images(column, lambda mask: (mask.mode, np.unique(np.asarray(mask)).tolist()))
    modes = {mode for mode, _ in masks}
    values = sorted({int(value) for _, pixels in masks for value in pixels})
    if not masks or len(values) > MOST_VALUES or modes - {*MODES}:
        kinds = f"{len(masks)} opened: {', '.join(sorted(modes))}" if masks else "none can be opened"
        raise ConfigError(
            f"the masks of column {column!r} ({kinds}) do not hold a class number for each pixel; save them as grey or "
            "palette images"
        )
    # scores are [B, C, H, W] or [B, H, W, C]; a first axis that is longer than the last one is no axis of classes
    dims = (target.info.shape or ())[1:]
    is_last = (dims[0] or 0) > (dims[2] or 0)
    if draft.value("data.image.layout") == "nhwc":
        is_last = True
    classes = dims[2] if is_last else dims[0]
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
    if classes is None or values[-1] < classes:
        return
    labels = [value for value in values if value != VOID]
    if not labels:
        raise ConfigError(f"the masks of column {column!r} hold nothing but {VOID}, by which pixels are not labelled")
    # two values for two classes are black and white, as of a binary mask: neither is void
    is_binary = classes == len(values) == 2
    has_void = values[-1] == VOID and not is_binary
    if has_void and all(value < classes for value in labels):
        draft.set("model.ignore_index", VOID, f"{seen}; pixels of {VOID} are not labelled")
    elif len(values) == classes:
        draft.set("data.image.mask_values", values, f"{seen}: as many values as classes, in their order")
    # values with at most as many gaps as values are class numbers; wider ones, such as 0, 128, 255, are grey levels
    elif labels == list(range(len(labels))) or labels[-1] < 2 * len(labels):
        draft.set("model.num_classes", labels[-1] + 1, f"a new head: {seen}")
        if values[-1] == VOID:
            draft.set("model.ignore_index", VOID, f"pixels of {VOID} are not labelled")
    else:
        draft.set("model.num_classes", len(values), f"a new head: {seen}")
        draft.set("data.image.mask_values", values, "in the order of the classes")


def _listed(values: Sequence[int]) -> str:
    few = ", ".join(map(str, values[:6]))
    return f"{few}, ... {values[-1]}" if len(values) > 6 else few
