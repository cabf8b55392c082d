"""What an exporter's helper nodes cost: nodes that compute shapes, casts and expansions of constants, for no result.

    Shape(x) -> Expand(bias) -> CastLike -> Add      the same as      Add(bias)

The exported file keeps every node, as it promises, and onnxruntime removes only some of them while it loads a file. The
copy that it writes with its basic optimisations has none of them, and is what quantizers can see through.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onward.trainer.export.measuring.latency import latency_ratio
from onward.trainer.export.measuring.onnx_runner import Array
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session

log = logging.getLogger(__name__)

# fmt: off
HELPERS = {
    "Cast", "CastLike", "Concat", "ConstantOfShape", "Equal", "Expand", "Gather", "Range", "Reshape", "Shape", "Size",
    "Slice", "Squeeze", "Transpose", "Unsqueeze", "Where",
}
# fmt: on
"""Operators of which exporters make shapes and constants; those that onnxruntime fuses are none. Constant and Identity
cost nothing."""
MOST_NUMBERS = 1 << 26
"""Numbers in the weights of the largest file that is looked at."""
LEAST_GAIN = 0.1
"""A smaller share of the time is not worth another file."""


@dataclass(frozen=True)
class HelperNodes:
    """The helper nodes of a file."""

    count: int
    kinds: str
    """The most frequent ones, such as "56 Expand, 28 Shape"."""
    ratio: float
    """The time of the file without them over that of the file; NaN if it was noise."""

    def __str__(self) -> str:
        return (
            f"{self.count} nodes only compute constants and shapes ({self.kinds}): without them the file runs in "
            f"{self.ratio:.0%} of its time"
        )


def without_helpers(file: ModelFile, folder: Path) -> ModelFile | None:
    """Write a copy of a file without its helper nodes into `folder`; None if onnxruntime cannot make one."""
    plain = folder / "plain.onnx"
    try:
        open_session(file.with_external_data(), save=plain, standard=True)  # a copy elsewhere would not find its data
        return ModelFile.read(plain)
    except Exception as error:  # onnxruntime's errors have no common base class
        log.info("the file has no copy without helper nodes: %s", error)
        return None


def costly_helpers(file: ModelFile, feed: Mapping[str, Array]) -> HelperNodes | None:
    """Return the helper nodes of a file if they take more than a tenth of its time; feed: inputs of one batch.

    None for a large file too: it would be copied in memory, and its products take nearly all of the time.
    """
    stored = sum(math.prod(tensor.dims) for tensor in file.proto.graph.initializer)
    if stored > MOST_NUMBERS or not any(node.op_type in HELPERS for node in file.proto.graph.node):
        return None
    with tempfile.TemporaryDirectory(prefix="onward-plain-") as folder:
        plain = without_helpers(file, Path(folder))
        if plain is None:
            return None
        before, after = (Counter(node.op_type for node in each.proto.graph.node) for each in (file, plain))
        # an optimised copy may also have more nodes of a kind: a difference of counters has none below 0
        gone = Counter({kind: number for kind, number in (before - after).items() if kind in HELPERS})
        if not gone:
            return None
        # one thread: latency_ratio counts the time of this thread
        sessions = [open_session(each.path, threads=1) for each in (file, plain)]
        feeds = [{value.name: feed[value.name] for value in session.get_inputs()} for session in sessions]
        ratio = latency_ratio(sessions, feeds)
    if not ratio < 1 - LEAST_GAIN:  # NaN is no gain
        return None
    kinds = ", ".join(f"{number} {kind}" for kind, number in gone.most_common(3))
    return HelperNodes(gone.total(), kinds, ratio)
