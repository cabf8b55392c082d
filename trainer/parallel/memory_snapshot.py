"""Write down what is in the memory of a rank when it runs out (`monitor.memory_snapshot`).

    error ── traceback ── frame of train()        model, optimizer: names of weights, gradients, optimizer state
                       ── frame of Pipeline       the loss: what autograd keeps for the backward pass
                       ── frame of a graph        x, conv2d, relu: the ONNX names of what it has computed
    gc    ── every other tensor that Python knows

The names are read from the frames that the error came through, so nothing is noted while all is well. Only on a GPU
torch records its allocations from the beginning.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from torch import Tensor, fx, nn

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.results import MonitorConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.parallel.pipeline.stage import Stage
from onward.trainer.parallel.profiling.node_ranges import eager_graphs
from onward.trainer.parallel.rank_model import RankModel
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import durable_file
from onward.trainer.run.ending_kinds import is_out_of_memory
from onward.trainer.run.memory_record import Kind, LiveTensor, MemorySnapshot, snapshot_path
from onward.trainer.run.records import write_record

log = logging.getLogger(__name__)

MOST_LISTED = 100
GRAPH_FRAMES = "graph_frames"
"""Attribute of an out-of-memory error: the frames of the graphs that it came through."""
MOST_ALLOCATIONS = 100_000
"""Allocations that torch remembers on a GPU, the newest ones."""


@contextlib.contextmanager
def memory_snapshots(
    config: RunConfig, run: RunDir, mpi: MPIContext, *, attempt: int, step: Callable[[], int]
) -> Iterator[None]:
    """Write a snapshot if memory runs out inside a block, and add its path as a note to the error."""
    if not config.monitor.memory_snapshot:
        yield
        return
    is_cuda = mpi.device.type == "cuda"
    if is_cuda:
        torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            # the error itself must reach its record, whatever happens here with no memory left
            with contextlib.suppress(Exception):
                path = snapshot_path(run, attempt, mpi.rank)
                allocations = _allocations(path) if is_cuda else ""
                # autograd would compute again what recomputation has not kept
                walks = config.recompute.mode == "none"
                found = take_snapshot(error, mpi, attempt=attempt, step=step(), walks_autograd=walks)
                write_record(path, found.model_copy(update={"allocations": allocations}))
                error.add_note(f"What was in the memory of the rank is in {path}")
        raise


def keep_graph_frames(stages: Sequence[Stage], monitor: MonitorConfig) -> None:
    """Let an out-of-memory error keep the frames of the graph that it came through, if a snapshot is wanted.

    torch.fx removes them from the traceback, and with them would go the activations. What is compiled has no frames.
    """
    for stage in stages if monitor.memory_snapshot else ():
        for module in eager_graphs(stage):
            vars(module)["forward"] = partial(_run_and_keep_frames, module, type(module).forward)


def _run_and_keep_frames(module: nn.Module, forward: Callable[..., Any], *values: Any) -> Any:
    try:
        return forward(module, *values)
    except Exception as error:
        if is_out_of_memory(error):
            vars(error).setdefault(GRAPH_FRAMES, []).extend(
                frame for frame, _ in traceback.walk_tb(error.__traceback__)
            )
        raise


def take_snapshot(
    error: BaseException, mpi: MPIContext, *, attempt: int, step: int, walks_autograd: bool
) -> MemorySnapshot:
    """Return what is in memory, with the names that the frames of an error know."""
    memories = _Memories()
    frames = list(_frames(error))
    for frame in frames:
        for value in frame.f_locals.values():
            if isinstance(value, RankModel):
                _add_model(memories, value)
    for frame in frames:
        for value in frame.f_locals.values():
            if isinstance(value, torch.optim.Optimizer):
                _add_optimizer(memories, value)
        _add_activations(memories, frame)
    alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    if walks_autograd:
        _add_saved(memories, alive)
    for tensor in alive:
        memories.add("other", "", tensor)
    listed = sorted(memories.found.values(), key=lambda each: -each.bytes)
    totals: Counter[Kind] = Counter()
    for each in listed:
        totals[each.kind] += each.bytes
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return MemorySnapshot(
        rank=mpi.rank,
        host=socket.gethostname(),
        attempt=attempt,
        step=step,
        error=" ".join(str(error).split())[:1000] or type(error).__name__,
        rss_bytes=psutil.Process().memory_info().rss,
        available_bytes=psutil.virtual_memory().available,
        address_space_limit_bytes=-1 if limit == resource.RLIM_INFINITY else limit,
        device=_device_memory(mpi.device),
        bytes_by_kind=dict(totals),
        num_tensors=len(listed),
        tensors=tuple(listed[:MOST_LISTED]),
    )


@dataclass
class _Memories:
    """Memory of tensors by its address; who names it first decides its kind."""

    found: dict[tuple[str, int], LiveTensor] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    """id of a trained weight -> its name, for the state of the optimizer."""

    def add(self, kind: Kind, name: str, given: Tensor | None) -> None:
        """Add a tensor. Those without memory of their own, such as fake ones, are left out."""
        with contextlib.suppress(Exception):
            tensor = getattr(given, "_local_tensor", given)  # of a DTensor, what this rank holds
            if tensor is None or tensor.device.type == "meta":
                return
            storage = tensor.untyped_storage()
            key = (str(tensor.device), storage.data_ptr())
            if not key[1] or not storage.nbytes():
                return
            known = self.found.get(key)
            if known is None:
                self.found[key] = LiveTensor(
                    kind=kind,
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    device=key[0],
                    bytes=storage.nbytes(),
                )
            elif known.kind == kind and name and name != known.name:
                known.more_names += 1


def _add_model(memories: _Memories, model: RankModel) -> None:
    for weight in model.reducer.weights:
        memories.names[id(weight.tensor)] = weight.name
        memories.add("weight", weight.name, weight.tensor)
    for weight in model.reducer.weights:
        memories.add("gradient", weight.name, weight.tensor.grad)


def _add_optimizer(memories: _Memories, optimizer: torch.optim.Optimizer) -> None:
    for weight, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor):
                memories.add("optimizer state", f"{memories.names.get(id(weight), '')}: {key}", value)


def _add_activations(memories: _Memories, frame: FrameType) -> None:
    """Add what a graph was computing: the local variables of its code have the names of its nodes."""
    owner = frame.f_locals.get("self")
    values: dict[str, Any] = {}
    if isinstance(owner, fx.GraphModule):
        values = {name: value for name, value in frame.f_locals.items() if isinstance(value, Tensor)}
    elif isinstance(owner, fx.Interpreter):  # of a step that is profiled
        values = {node.name: value for node, value in owner.env.items()}
        owner = owner.module
    if not values or not isinstance(owner, fx.GraphModule):
        return
    names = {node.name: str(next(iter(node.meta.get("onnx", ())), node.name)) for node in owner.graph.nodes}
    for name, value in values.items():
        if isinstance(value, Tensor):
            memories.add("activation", names.get(name, name), value)


def _add_saved(memories: _Memories, alive: list[Tensor]) -> None:
    """Add what autograd keeps for the backward passes of live tensors, with the name of the function that keeps it."""
    waiting = [tensor.grad_fn for tensor in alive if tensor.grad_fn is not None]
    seen = set[Any]()
    while waiting:
        function: Any = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        waiting += [following for following, _ in function.next_functions]
        for name in dir(function):
            if name.startswith("_saved_") or name == "saved_tensors":
                with contextlib.suppress(Exception):  # it is released already
                    saved = getattr(function, name)
                    for value in saved if isinstance(saved, tuple | list) else (saved,):
                        if isinstance(value, Tensor):
                            memories.add("activation", f"kept by {function.name()}", value)


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames that an error and its causes came through."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield from (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        yield from vars(error).get(GRAPH_FRAMES, ())
        error = error.__cause__ or error.__context__  # type: ignore[assignment]


def _device_memory(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    used, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"tensors": used, "reserved": reserved, "free": free, "total": total}


def _allocations(record: Path) -> str:
    """Write torch's record of the allocations beside a snapshot; return the name of the file, "" if that fails."""
    path = record.with_suffix(".pickle")
    with contextlib.suppress(Exception):
        with durable_file(path) as partial:
            torch.cuda.memory._dump_snapshot(str(partial))  # type: ignore[no-untyped-call]  # only torch's page reads it
        return path.name
    return ""
