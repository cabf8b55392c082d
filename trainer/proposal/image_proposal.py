"""Propose how the images of a table and scikit-learn's digits are read: the column, layout, channels and size.

input [B, 3, 224, 224], [B, 224, 224, 3]     layout from the axis of one or three channels, size from the shape
input [B, 3, ?, ?]                           the size that all images have, else a question
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.format_table import holds_images
from onward.trainer.data.schema.signature import TensorInfo
from onward.trainer.proposal.draft import Draft
from onward.trainer.proposal.inputs import num_axes, shown
from onward.trainer.proposal.source_summary import Facts
from onward.trainer.rehearsal.trials.data_of_model import IMAGE_COLUMNS, image_column

SIZE = re.compile(r"\[(\d+), (\d+)\]")


def propose_digits(draft: Draft, inputs: Sequence[TensorInfo]) -> None:
    """Propose the size to which scikit-learn's digits are resized, and their channels: those of the input of images."""
    images = [info for info in inputs if num_axes(info) == 4]
    if len(images) == 1:
        _, channels, height, width = images[0].shape or ()
        usual = DataConfig.model_fields["image_size"].default
        side = height if height is not None and height == width else usual
        size = side if channels in (None, 3) else [channels, side]
        if size != usual:
            draft.set("data.image_size", size, "the images of 8 x 8 grey pixels are resized to those of the model")


def propose_image_column(draft: Draft, facts: Facts) -> None:
    """Propose the column of a table that holds images or their paths."""
    if "data.image" in draft.entries or holds_images(facts.format):
        return
    names = [name for name in facts.schema if facts.looks_like_images(name)]
    usual = [name for name in names if name.lower() in IMAGE_COLUMNS]
    likely = usual or names
    column = likely[0] if len(likely) == 1 else image_column({name: facts.column(name) for name in names})
    if column:
        draft.set("data.image.column", column, "its cells are images")
    elif len(names) > 1:
        draft.ask("data.image.column", "the column of the images", dict.fromkeys(names, ""))


def propose_image_settings(draft: Draft, facts: Facts, inputs: Iterable[TensorInfo], written_size: str) -> None:
    """Propose layout, channels and size where the declared shape leaves them open.

    written_size: in the metadata, as ultralytics writes it: "[height, width]"; "" = it is not there.
    """
    column = draft.value("data.image.column", "image")
    for info in inputs:
        if info.shape is None or len(info.shape) != 4:
            continue
        _, *dims = info.shape
        # one or three are numbers of channels; no image has so few rows
        first = dims[0] in (1, 3)
        last = dims[2] in (1, 3)
        nhwc = draft.value("data.image.layout", "nhwc" if last and not first else "nchw") == "nhwc"
        if first == last:  # both may be channels, or neither
            choices = {"nchw": "channels before height and width", "nhwc": "channels behind them"}
            draft.ask("data.image.layout", f"input {info.name} is {shown(info)}: where are the channels?", choices)
        channels, size = (dims[2], dims[:2]) if nhwc else (dims[0], dims[1:])
        if channels is None:
            choices = {"rgb": "", "bgr": "as OpenCV reads files", "grey": ""}
            draft.ask("data.image.color", f"input {info.name} leaves the channels open", choices)
        sizes = facts.image_sizes(column)
        if None in size and (sides := SIZE.fullmatch(written_size)):
            draft.set("data.image.size", [int(side) for side in sides.groups()], "as the file's metadata says (imgsz)")
        elif None in size:
            _propose_size(draft, info, sizes)
        elif sizes and set(sizes) == {tuple(size)}:
            draft.set("data.image.crop_ratio", 1, f"the {len(sizes)} images that were opened have the model's size")


def _propose_size(draft: Draft, info: TensorInfo, sizes: Sequence[tuple[int, int]]) -> None:
    different = Counter(sizes)
    # a model that takes any size takes the images as they are, if all are alike: batches need one size
    if len(different) == 1:
        (height, width) = sizes[0]
        value = height if height == width else [height, width]
        draft.set("data.image.crop_ratio", 1, "nothing is cut off")
        draft.set("data.image.size", value, f"all {len(sizes)} images that were opened have it; the model takes any")
        return
    side = int(np.median([min(size) for size in sizes])) if sizes else 224
    near = max(32, round(side / 32) * 32)
    choices = {224: "what most classifiers were trained with"}
    if near != 224:
        # the first choice is tried where the settings are checked
        choices = {near: f"near the images' own, whose shorter side is {side} in the middle", **choices}
    draft.ask("data.image.size", f"input {info.name} is {shown(info)}, which leaves height and width open", choices)
