"""Divide the time of a step among what it was spent on.

Every range of time has a label. Each instant counts for the innermost range that covers it, the one that began last:

    range     |---------------------- pipeline ------------------------|-- optimizer --|
                 |-- conv1 --|  |-- relu --|   |- conv1, backward -|
    counts    p  cccccccccccc  p rrrrrrrrrrr p bbbbbbbbbbbbbbbbbbbbbb p ooooooooooooooooo

So the times add up to that of the step, whatever overlaps. On a CPU the ranges are those in which the host computes. A
GPU computes later than the host has launched a kernel, so there the ranges are the kernels, each with the label of the
host's innermost range at its launch; when no kernel runs, the GPU waits.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Phase = str
"""`forward` or `backward` of a node; "" for what is not a node."""


class Label(NamedTuple):
    """What a range of time was spent on."""

    what: str
    """Key of a node, or name of something else."""
    phase: Phase = ""


class Interval(NamedTuple):
    """A range of time in nanoseconds."""

    begin: int
    end: int
    label: Label


@dataclass(frozen=True)
class Timeline:
    """What the profiler has recorded of some steps, with labels."""

    steps: Sequence[tuple[int, int]]
    """(begin, end) of each."""
    host: Mapping[int, Sequence[Interval]]
    """Thread -> its labelled ranges, properly nested. The steps are on thread `main`."""
    main: int
    launches: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Number of a call that has launched kernels -> (thread, begin)."""
    kernels: Sequence[tuple[int, int, int]] = ()
    """(begin, end, number of the call that has launched it) of what a GPU has run; () on a CPU."""


def account(timeline: Timeline, *, otherwise: Label, idle: Label) -> Counter[Label]:
    """Return label -> nanoseconds of all steps together; they add up to the length of the steps.

    otherwise: what no range covers. idle: the time in which the GPU had nothing to do.
    """
    # a GPU is busy with what the host launched earlier, so the host's own time says nothing
    if timeline.kernels:
        ranges = list(_kernels_with_labels(timeline, otherwise))
        otherwise = idle
    else:
        ranges = list(timeline.host.get(timeline.main, ()))
    times: Counter[Label] = Counter()
    for begin, end in timeline.steps:
        # ranges that reach over an end of the step stay: `divide` cuts them at it
        not_after = [interval for interval in ranges if interval.begin < end]
        overlapping = [interval for interval in not_after if interval.end > begin]
        times.update(divide(overlapping, begin, end, otherwise))
    return times


def divide(ranges: Iterable[Interval], begin: int, end: int, otherwise: Label) -> Counter[Label]:
    """Return label -> nanoseconds between `begin` and `end`; each instant counts for the range that began last.

    Of two that began together, the shorter one began last. otherwise: the label of instants that no range covers.
    """
    times: Counter[Label] = Counter()
    # a heap of (-begin, -order, end, label): on top the range that began last
    covering: list[tuple[int, int, int, Label]] = []
    now = begin

    def advance(until: int) -> None:
        nonlocal now
        while now < until:
            # only the top must be open: ended ranges below it are dropped when they come up
            while covering and covering[0][2] <= now:
                heapq.heappop(covering)
            upto, label = (min(until, covering[0][2]), covering[0][3]) if covering else (until, otherwise)
            times[label] += upto - now
            now = upto

    # the longer one first, so that of two that begin together the shorter one is on top
    for order, each in enumerate(sorted(ranges, key=lambda each: (each.begin, -each.end))):
        # until the next range begins, the covering ones stay the same
        advance(min(max(each.begin, begin), end))
        heapq.heappush(covering, (-each.begin, -order, each.end, each.label))
    advance(end)
    return times


def _kernels_with_labels(timeline: Timeline, otherwise: Label) -> Iterable[Interval]:
    # all launches of a thread at once, in order: one pass over its ranges finds their labels
    wanted: dict[int, list[int]] = {}
    for thread, begin in timeline.launches.values():
        wanted.setdefault(thread, []).append(begin)
    labels = {
        (thread, begin): label
        for thread, begins in wanted.items()
        for begin, label in _innermost(timeline.host.get(thread, ()), sorted({*begins}), otherwise)
    }
    for begin, end, launch in timeline.kernels:
        yield Interval(begin, end, labels.get(timeline.launches.get(launch, (-1, -1)), otherwise))


def _innermost(ranges: Iterable[Interval], instants: Sequence[int], otherwise: Label) -> Iterable[tuple[int, Label]]:
    """Yield (instant, label of the innermost range that covers it) for instants in order."""
    waiting = sorted(ranges, key=lambda each: (each.begin, -each.end))
    open_: list[Interval] = []
    place = 0
    for instant in instants:
        # ranges of a thread are nested: the open ones are a stack, the innermost on top
        while place < len(waiting) and waiting[place].begin <= instant:
            open_.append(waiting[place])
            place += 1
        while open_ and open_[-1].end <= instant:
            open_.pop()
        yield instant, open_[-1].label if open_ else otherwise
