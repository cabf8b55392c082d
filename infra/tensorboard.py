"""TensorBoard: event files written without torch and without TensorFlow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """Event files in one folder, begun anew: a view is made from the whole event log, so nothing is in it twice.

    Each tag takes only steps greater than its last one: a resumed attempt repeats steps. With
    `wanted=False` the same calls write nothing.
    """

    def __init__(self, folder: Path, *, wanted: bool = True) -> None:
        for former in folder.glob("events.out.tfevents.*"):
            former.unlink()
        self._writer = EventFileWriter(str(folder)) if wanted else None
        self._last: dict[str, int] = {}

    def scalars(self, values: Mapping[str, float], *, step: int, at_ms: int) -> None:
        """Add one value to each tag."""
        self._add([Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()], step, at_ms)

    def histogram(self, name: str, counts: Sequence[int], edges: Sequence[float], *, step: int, at_ms: int) -> None:
        """Add a histogram; `len(edges) == len(counts) + 1`, sums are taken at the middle of each bin."""
        middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        proto = HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
            bucket_limit=edges,  # upper ends: the first bucket, below the first edge, is empty
            bucket=[0, *counts],
        )
        self._add([Summary.Value(tag=name, histo=proto)], step, at_ms)

    def _add(self, values: Sequence[Summary.Value], step: int, at_ms: int) -> None:
        fresh = [value for value in values if step > self._last.get(value.tag, -1)]
        if fresh and self._writer:
            self._last |= {value.tag: step for value in fresh}
            self._writer.add_event(Event(wall_time=at_ms / 1000, step=step, summary=Summary(value=fresh)))

    def flush(self) -> None:
        """Bring everything so far to disk."""
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Bring everything to disk and end the writer's thread."""
        if self._writer:
            self._writer.close()
