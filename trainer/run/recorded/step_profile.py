"""StepProfile: where the time of the profiled steps went on one rank, by node of the ONNX file.

    profile/rank-00000.json             the record of rank 0
    profile/rank-00000.csv              the same rows as a table
    profile/rank-00000.trace.json.gz    the events themselves, for ui.perfetto.dev

The rows divide the time of a step among them: each instant counts for one row, and for the innermost one.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import read_record

COLUMNS = ("kind", "name", "operator", "calls", "forward_ms", "backward_ms", "ms", "share", "output_bytes", "fused")
"""Of the table, in order. `fused` lists names, separated by spaces."""


class ProfileRow(BaseModel):
    """One node, or one thing that is not a node. Times are milliseconds of one step, the mean of the profiled ones."""

    kind: Literal["node", "other"]
    name: str
    """Of a node its name in the file; if it has none, the tensor that it computes."""
    operator: str = ""
    """Of a node; with those that are fused into it, such as `MatMul + Add`."""
    calls: float = 0.0
    """How often the node ran forward in a step: once for each micro-batch."""
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    """With recomputation, the second forward pass as well."""
    ms: float
    share: float
    """Of the time of the step."""
    output_bytes: int = 0
    """Of what one call returns, also where that is only another view of its input."""
    fused: tuple[str, ...] = ()
    """Other nodes of the file that are computed together with this one."""


class StepProfile(BaseModel):
    """The profiled steps of one rank."""

    rank: int
    replica: int
    stage: int
    tensor: int
    """The coordinates of the rank."""
    attempt: int
    device: str
    first_step: int
    last_step: int
    """The steps that were recorded; fewer than `monitor.profile_steps` if the attempt began or ended between them."""
    step_ms: float
    """Of one step, by a clock that the profiler does not know; the mean."""
    rows: tuple[ProfileRow, ...]
    """The slowest one first."""
    note: str = ""
    """Why there are no rows of nodes, if there are none."""
    trace_bytes: int = 0


def table_of(profile: StepProfile) -> str:
    """Return the rows as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in profile.rows:
        values = row.model_dump() | {"fused": " ".join(row.fused)}
        writer.writerow([round(value, 6) if isinstance(value := values[key], float) else value for key in COLUMNS])
    return text.getvalue()


def record_of(run: RunDir, rank: int) -> Path:
    """Return the path of the record of a rank."""
    return run.profile / f"rank-{rank:05d}.json"


def trace_of(run: RunDir, rank: int) -> Path:
    """Return the path of the trace of a rank."""
    return run.profile / f"rank-{rank:05d}.trace.json.gz"


def read_profiles(run: RunDir) -> list[StepProfile]:
    """Return the profile of every rank that has left one. Raises RecordError for a damaged one."""
    return [read_record(path, StepProfile) for path in sorted(run.profile.glob("rank-?????.json"))]


def slowest_nodes(profiles: Iterable[StepProfile], most: int = 10) -> list[ProfileRow]:
    """Return the nodes with the longest time in a step, over all stages.

    A node that several ranks compute, because they are replicas or tensor parallel, counts with their mean.
    """
    # ranks that compute a node together do so at the same time, so their times are not added
    return _means(profiles, "node")[:most]


def other_rows(profiles: Iterable[StepProfile]) -> list[ProfileRow]:
    """Return what is not a node, with the mean over the ranks."""
    return _means(profiles, "other")


def _means(profiles: Iterable[StepProfile], kind: str) -> list[ProfileRow]:
    """Return the rows of a kind, each as the mean over the ranks that have it, the slowest first."""
    found = defaultdict[str, list[ProfileRow]](list)
    for profile in profiles:
        for row in profile.rows:
            if row.kind == kind:
                found[row.name].append(row)
    return sorted(map(_mean, found.values()), key=lambda row: -row.ms)


def _mean(rows: Sequence[ProfileRow]) -> ProfileRow:
    def of(field: str) -> float:
        # over the ranks that have the row, and not over all: a node belongs to one stage
        return float(sum(getattr(row, field) for row in rows)) / len(rows)

    return rows[0].model_copy(
        update={field: of(field) for field in ("calls", "forward_ms", "backward_ms", "ms", "share")}
    )
