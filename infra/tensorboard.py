"""Write TensorBoard event files, without torch and without TensorFlow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """Event files in one folder. Those of an earlier monitor are deleted, because the whole event log is read again.

    Each call raises OSError when the disk takes no more.
    """

    def __init__(self, folder: Path) -> None:
        for former in folder.glob("events.out.tfevents.*"):
            former.unlink()
        self._writer = EventFileWriter(str(folder))

    def scalars(self, values: Mapping[str, float], *, step: int, at_ms: int) -> None:
        """Add one value to each tag."""
        self._add([Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()], step, at_ms)

    def histogram(self, name: str, counts: Sequence[int], edges: Sequence[float], *, step: int, at_ms: int) -> None:
        """Add a histogram; `len(edges) == len(counts) + 1`, sums are taken at the middle of each bin."""
        # single elements are not known any more, and the bins are narrow
        middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        proto = HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
            bucket_limit=edges,  # upper limits; the first bucket, below the first edge, is empty
            bucket=[0, *counts],
        )
        self._add([Summary.Value(tag=name, histo=proto)], step, at_ms)

    def _add(self, values: Sequence[Summary.Value], step: int, at_ms: int) -> None:
        self._writer.add_event(Event(wall_time=at_ms / 1000, step=step, summary=Summary(value=values)))

    def flush(self) -> None:
        """Write everything so far to disk."""
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Write everything to disk and end the writer's thread."""
        self._writer.close()
