"""Profile the steps of `monitor.profile_steps`: a trace, and a table by node of the ONNX file, for each rank.

    loop      with profiler.step(step):      the blocks of the clock (step_clock.py) are ranges in it, the rest is other
              |- data wait -|-- pipeline ------|-- gradient reduction ------|-- optimizer -- other --|
    nodes                      conv1 relu ... loss ... conv1 backward

Outside of these steps nothing is measured and nothing is put in between.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from onward.trainer.distributed.exchange import gather_bytes
from onward.trainer.distributed.mesh import Coordinate
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import ConfigError
from onward.trainer.parallel.pipeline.engine import Pipeline
from onward.trainer.parallel.profiling.accounting import Label, account
from onward.trainer.parallel.profiling.node_ranges import LOSS, STEP, NodeRanges, TimedLosses, is_compiled
from onward.trainer.parallel.profiling.recording import OTHERS, timeline_of, write_trace
from onward.trainer.parallel.rank_model import RankModel
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import write_durably
from onward.trainer.run.recorded.step_profile import (
    ProfileRow,
    StepProfile,
    record_of,
    slowest_nodes,
    table_of,
    trace_of,
)
from onward.trainer.run.records import write_record

log = logging.getLogger(__name__)

COMPILED = (
    "graph.compile fuses the nodes into other kernels, so none has a time of its own, and `between nodes` has all of "
    "theirs: the trace has the kernels; profile with graph.compile = false for the nodes"
)


class StepProfiler:
    """Profiles the chosen steps of one rank. The end of the last one is collective: every rank.

    wanted: `monitor.profile_steps`. num_steps: of the whole run. Raises ConfigError, on every rank, for steps that the
    run does not have.
    """

    def __init__(
        self,
        wanted: Sequence[int],
        run: RunDir,
        model: RankModel,
        pipeline: Pipeline,
        here: Coordinate,
        mpi: MPIContext,
        attempt: int,
        num_steps: int,
        beat: Callable[[], None],
    ) -> None:
        self._here = here
        self._run = run
        self._model = model
        self._pipeline = pipeline
        self._mpi = mpi
        self._attempt = attempt
        self._beat = beat
        first, last = wanted or (1, 0)
        if last > num_steps:
            raise ConfigError(
                f"monitor.profile_steps [{first}, {last}]: the run has {num_steps} steps; choose some of these"
            )
        self._wanted = range(first, last + 1)
        self._profile: profile | None = None
        self._ranges = NodeRanges()
        self._seconds: list[float] = []
        self._steps: list[int] = []

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile a block if it is one of the chosen steps; after the last of them, write what was recorded.

        Of a step that overflows and is tried again at another loss scale, each try counts as a step, but for those
        after the first try of the last step.
        """
        if step not in self._wanted:
            yield
            return
        self._start()
        losses = TimedLosses(self._model.losses, self._ranges)
        with self._ranges.installed(self._model.stages), self._pipeline.with_losses(losses):
            self._synchronize()
            began_at = time.perf_counter()
            with record_function(f"{STEP}{step}"):
                yield
                self._synchronize()
            self._seconds.append(time.perf_counter() - began_at)
        self._steps.append(step)
        if step == self._wanted[-1]:
            self.close()

    def _start(self) -> None:
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if self._mpi.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
            with record_function("first range"):  # which takes longer than all others
                pass

    def close(self) -> None:
        """Write what was recorded, if it is not written yet. Collective: every rank."""
        if self._profile is None:
            return
        self._profile.stop()
        self._beat()
        self._write(self._profile)
        self._profile = None
        # nothing is profiled after the record is written, not even a step that is tried again
        self._wanted = range(0)
        self._beat()

    def _synchronize(self) -> None:
        if self._mpi.device.type == "cuda":
            torch.cuda.synchronize(self._mpi.device)

    # -- what is left in the run directory

    def _write(self, recorded: profile) -> None:
        rank = self._mpi.rank
        timeline = timeline_of(recorded, self._ranges)
        times = account(timeline, otherwise=Label("other"), idle=Label("idle"))
        # the trace first: the record says how large it is
        trace = trace_of(self._run, rank)
        write_trace(recorded, trace, self._ranges)
        found = StepProfile(
            rank=rank,
            replica=self._here.data,
            stage=self._here.pipeline,
            tensor=self._here.tensor,
            attempt=self._attempt,
            device=str(self._mpi.device),
            first_step=self._steps[0],
            last_step=self._steps[-1],
            step_ms=1e3 * sum(self._seconds) / len(self._seconds),
            rows=tuple(rows_of(times, self._ranges, num_steps=len(self._seconds))),
            note=COMPILED if is_compiled(self._model.stages) else "",
            trace_bytes=trace.stat().st_size,
        )
        record = record_of(self._run, rank)
        write_durably(record.with_suffix(".csv"), table_of(found).encode())
        write_record(record, found)
        # all ranks: none goes on, and waits in a collective, while another one still writes
        everywhere = gather_bytes(self._mpi, found.model_dump_json().encode())
        if rank == 0:
            for line in report([StepProfile.model_validate_json(text) for text in everywhere], trace.parent):
                log.info("%s", line)


def rows_of(times: Counter[Label], ranges: NodeRanges, *, num_steps: int) -> Iterator[ProfileRow]:
    """Yield a row for each node and for each other thing, the slowest first. times: nanoseconds of all steps."""
    total = max(1, times.total())

    def ms(label: Label) -> float:
        return times[label] / 1e6 / num_steps

    rows = []
    for name, origin in ranges.origins.items():
        if origin == LOSS:
            continue
        forward = ms(Label(origin.output, "forward"))
        backward = ms(Label(origin.output, "backward"))
        fused = [*ranges.fused.get(origin, ())]
        row = ProfileRow(
            kind="node",
            name=name,
            operator=" + ".join([*(each.operator for each in reversed(fused)), origin.operator]),
            calls=ranges.calls[origin] / num_steps,
            forward_ms=forward,
            backward_ms=backward,
            ms=forward + backward,
            share=(forward + backward) * 1e6 * num_steps / total,
            output_bytes=ranges.output_bytes.get(origin, 0),
            fused=tuple(each.name for each in fused),
        )
        rows.append(row)
    for what, name in OTHERS.items():
        forward = ms(Label(what, "forward"))
        backward = ms(Label(what, "backward"))
        whole = ms(Label(what)) + forward + backward
        # these two rows appear only where there is ZeRO, or a GPU
        if whole or what not in ("weights", "idle"):
            row = ProfileRow(
                kind="other",
                name=name,
                forward_ms=forward,
                backward_ms=backward,
                ms=whole,
                share=whole * 1e6 * num_steps / total,
            )
            rows.append(row)
    yield from sorted(rows, key=lambda row: -row.ms)


def report(profiles: list[StepProfile], folder: Path) -> Iterator[str]:
    """Yield the lines of the log about a profile: the slowest nodes of all stages."""
    first = profiles[0]
    steps = f"step {first.first_step}" + f" to {first.last_step}" * (first.last_step > first.first_step)
    longest = max(each.step_ms for each in profiles)
    yield f"profiled {steps}: {longest:.1f} ms a step; tables and traces of all ranks are in {folder}"
    if first.note:
        yield first.note
    for row in slowest_nodes(profiles):
        times = f"forward {row.forward_ms:.2f} ms, backward {row.backward_ms:.2f} ms"
        yield f"{100 * row.share:5.1f} % {row.name} ({row.operator}): {times}, {row.calls:g} calls"
