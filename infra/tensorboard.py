"""Write TensorBoard event files, without torch and without TensorFlow."""

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
    """Event files in one folder. Those of an earlier monitor are deleted, because the whole event log is read again.

    A resumed attempt repeats steps, so each tag takes only steps greater than its last one. With `wanted=False`, and
    after an OSError of the disk, the calls write nothing.
    """

    def __init__(self, folder: Path, *, wanted: bool = True) -> None:
        self._writer: EventFileWriter | None = None
        self._last: dict[str, int] = {}
        with self._disabled_by_errors():
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
            bucket_limit=edges,  # upper limits; the first bucket, below the first edge, is empty
            bucket=[0, *counts],
        )
        self._add([Summary.Value(tag=name, histo=proto)], step, at_ms)

    def _add(self, values: Sequence[Summary.Value], step: int, at_ms: int) -> None:
        # A resumed attempt repeats steps, which TensorBoard would draw twice.
        fresh = [value for value in values if step > self._last.get(value.tag, -1)]
        if fresh and self._writer:
            self._last |= {value.tag: step for value in fresh}
            with self._disabled_by_errors():
                self._writer.add_event(Event(wall_time=at_ms / 1000, step=step, summary=Summary(value=fresh)))

    def flush(self) -> None:
        """Write everything so far to disk."""
        with self._disabled_by_errors():
            if self._writer:
                self._writer.flush()

    def close(self) -> None:
        """Write everything to disk and end the writer's thread."""
        with self._disabled_by_errors():
            if self._writer:
                self._writer.close()

    @contextlib.contextmanager
    def _disabled_by_errors(self) -> Iterator[None]:
        """Log the first OSError inside and write nothing from then on: TensorBoard is only a view of the event log."""
        try:
            yield
        except OSError as error:
            self._writer = None
            log.warning("no more TensorBoard files are written until this run is resumed: %s", error)
