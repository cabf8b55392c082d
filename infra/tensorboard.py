"""TensorBoard: event files written without torch and without TensorFlow."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

log = logging.getLogger(__name__)


class TensorBoard:
    """Event files in one folder, begun anew: a view is made from the whole event log, so nothing is in it twice.

    Each tag takes only steps greater than its last one: a resumed attempt repeats steps. With
    `wanted=False` the same calls write nothing, and so they do after a disk that failed: it is only a view.
    """

    def __init__(self, folder: Path, *, wanted: bool = True) -> None:
        self._writer: EventFileWriter | None = None
        self._last: dict[str, int] = {}
        with self._giving_up():
            for former in folder.glob("events.out.tfevents.*"):
                former.unlink()
            self._writer = EventFileWriter(str(folder)) if wanted else None

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
            with self._giving_up():
                self._writer.add_event(Event(wall_time=at_ms / 1000, step=step, summary=Summary(value=fresh)))

    def flush(self) -> None:
        """Bring everything so far to disk."""
        with self._giving_up():
            if self._writer:
                self._writer.flush()

    def close(self) -> None:
        """Bring everything to disk and end the writer's thread."""
        with self._giving_up():
            if self._writer:
                self._writer.close()

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """The first OSError inside is said, and ends the writing."""
        try:
            yield
        except OSError as error:
            self._writer = None
            log.warning("TensorBoard gets nothing more until this run is resumed: %s", error)
