"""What one rank holds at the peak of a step, foretold: formulas for what stays, a rehearsal for what comes and goes.

    weights | gradients | optimizer | what the micro-batches in flight keep | what comes and goes

The rehearsal runs one micro-batch forward and backward through a stage on fake tensors (shapes and types alone): the
very calls that training makes, with their fusions, halves, recomputation and collectives, while every tensor is
counted from its making to its end.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections import OptimizerConfig, ParallelConfig
from onward.trainer.distributed.weights import Weight
from onward.trainer.parallel.cost import Autocast
from onward.trainer.parallel.pipeline.stage import Stage
from onward.trainer.parallel.plan_record import Memory
from onward.trainer.parallel.replicas.zero import divides

# -- one micro-batch through one stage


@dataclass(frozen=True)
class Rehearsal:
    """One micro-batch through one stage, in bytes beyond weights and gradients."""

    kept: int
    """Alive between its forward and its backward pass."""
    most: int
    """At the worst moment of either."""
    collectives: tuple[tuple[str, int], ...]
    """Of the tensor axis, in both passes: what it is called, and the bytes of its result."""


def rehearse(
    stage: Stage,
    inputs: Sequence[Tensor],
    autocast: Autocast,
    *,
    device: torch.device,
    finish: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> Rehearsal:
    """inputs: of the graph, all of them, for one micro-batch. finish: on the last stage, outputs -> loss.

    Changes nothing. The stage must have been priced (cut.stages) and may be on any device.
    """
    count = Alive()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():

        def fake(like: Tensor) -> Tensor:
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
            count.ignore(made)
            return made.requires_grad_(like.requires_grad)

        with _fake_weights(stage.chain, fake):
            given = [
                fake(value)
                for value in (*stage.received_meta, *(inputs[place].detach() for place in stage.input_positions))
            ]
            with count:
                with autocast():
                    outputs = stage.chain(*given)
                kept = count.now
                if finish is not None:
                    results: list[Tensor] = [finish(outputs)]
                else:
                    results = [output for output in outputs if output.requires_grad]
                gradients = [fake(result.detach()) for result in results]
                if any(result.requires_grad for result in results):
                    torch.autograd.backward(results, gradients)
    return Rehearsal(kept, count.most, tuple(count.collectives))


@contextmanager
def _fake_weights(module: nn.Module, fake: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Tensors without data in place of what a module stores, each trained one with a gradient."""
    places = [
        (table, name, tensor)
        for owner in module.modules()
        for table in (owner._parameters, owner._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    made: dict[int, Tensor] = {}
    for table, name, tensor in places:
        if id(tensor) not in made:
            new = fake(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                new.grad = fake(tensor.detach()) if tensor.requires_grad else None
            made[id(tensor)] = new
        table[name] = made[id(tensor)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, name, tensor in places:
            table[name] = tensor  # type: ignore[assignment]


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors made inside and still alive, each storage once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.collectives: list[tuple[str, int]] = []
        self._known: set[int] = set()

    def ignore(self, tensor: Tensor) -> None:
        """Not to be counted: it is there anyway."""
        self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func._opname != "wait_tensor":
            self.collectives.append((func._opname, result.nbytes))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.most = max(self.most, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


# -- a whole step


def order(parallel: ParallelConfig, num_micro_batches: int, pipeline: int) -> Iterator[tuple[bool, int]]:
    """(is it forward, which of the rank's stages) of each pass of a step, as torch's schedules order them.

    Source: torch.distributed.pipelining.schedules; Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473).
    """
    ranks, per_rank = parallel.pipeline, parallel.stages_per_rank
    total = num_micro_batches * per_rank
    in_round = num_micro_batches // max(1, num_micro_batches // ranks)
    if parallel.schedule == "gpipe":
        ahead = total
    elif per_rank == 1:
        ahead = ranks - pipeline
    else:
        ahead = (per_rank - 1) * in_round + 2 * (ranks - 1 - pipeline) + 1
    ahead = min(ahead, total)
    for number in range(total + ahead):
        if number < total:
            yield True, number // in_round % per_rank
        if number >= ahead - 1 and number - ahead + 1 < total:
            yield False, per_rank - 1 - (number - ahead + 1) // in_round % per_rank


def foretell(
    rehearsals: Sequence[Rehearsal],
    stages: Sequence[Stage],
    weights: Sequence[Weight],
    config: RunConfig,
    *,
    pipeline: int,
    batch_bytes: int,
) -> Memory:
    """What a rank with these stages and weights holds at its peak. batch_bytes: of one micro-batch's data."""
    now = kept = most = 0
    for forward, which in order(config.parallel, config.train.gradient_accumulation_steps, pipeline):
        found = rehearsals[which]
        most = max(most, now + found.most - (0 if forward else found.kept))
        now += found.kept if forward else -found.kept
        kept = max(kept, now)
    stays = _stays(stages, weights, config)
    return Memory(
        weights=stays.weights,
        gradients=stays.gradients,
        optimizer=stays.optimizer,
        activations=kept,
        transient=most - kept + stays.passing + _buffers(stages, config, batch_bytes),
    )


def budget(
    stages: Sequence[Stage], weights: Sequence[Weight], config: RunConfig, *, pipeline: int, batch_bytes: int
) -> tuple[int, int]:
    """(bytes that `parallel.memory_gib` leaves for activations, micro-batches in flight at most on this rank)."""
    passes = order(config.parallel, config.train.gradient_accumulation_steps, pipeline)
    in_flight = max(itertools.accumulate(1 if forward else -1 for forward, _ in passes))
    stays = _stays(stages, weights, config)
    taken = stays.weights + stays.gradients + stays.optimizer + stays.passing + _buffers(stages, config, batch_bytes)
    return int(config.parallel.memory_gib * 2**30) - taken, math.ceil(in_flight / config.parallel.stages_per_rank)


# -- what stays


@dataclass(frozen=True)
class Sharding:
    """What the replicas divide of one rank's weights (ZeRO 1-3), in bytes of the whole ones."""

    size: int
    """Replicas that divide them."""
    units: tuple[int, ...]
    """Weights that each unit gathers; of no unit alone, what several use."""
    trained: int

    @property
    def whole(self) -> int:
        return sum(self.units)


def sharding(stages: Sequence[Stage], weights: Sequence[Weight], parallel: ParallelConfig) -> Sharding:
    """What trainer/parallel/replicas/zero.py divides, and what travels together."""
    size = parallel.shard or parallel.data
    divided = [weight for weight in weights if parallel.zero and divides(weight, zero=parallel.zero)]
    sizes = {id(weight.tensor): weight.tensor.nbytes for weight in divided}
    units: list[int] = []
    for stage in stages:
        own = [{id(parameter) for parameter in unit.parameters()} & sizes.keys() for unit in stage.chain.units]
        uses = Counter(key for keys in own for key in keys)
        units.append(sum(sizes[key] for key, times in uses.items() if times > 1))
        units += [sum(sizes[key] for key in keys if uses[key] == 1) for keys in own]
    trained = sum(weight.tensor.nbytes for weight in divided if weight.trained)
    return Sharding(size, tuple(filter(None, units)), trained)


@dataclass(frozen=True)
class _Stays:
    weights: int
    gradients: int
    optimizer: int
    passing: int
    """What ZeRO holds of units for a moment."""


def _stays(stages: Sequence[Stage], weights: Sequence[Weight], config: RunConfig) -> _Stays:
    zero = config.parallel.zero
    trained = sum(weight.tensor.nbytes for weight in weights if weight.trained)
    held = sum(weight.tensor.nbytes for weight in weights if isinstance(weight.tensor, nn.Parameter))
    held += sum({id(buffer): buffer.nbytes for stage in stages for buffer in stage.chain.buffers()}.values())
    if not zero:
        return _Stays(held, trained, _state_bytes(config.optimizer, trained), 0)
    found = sharding(stages, weights, config.parallel)
    largest = max(found.units, default=0)
    held -= found.whole - found.whole // found.size
    own = trained - found.trained + found.trained // found.size
    gathered = found.whole if zero < 3 else 2 * largest
    state = _state_bytes(config.optimizer, own)
    return _Stays(held + gathered, own + (found.trained if zero == 1 else 0), state, 2 * largest)


def _state_bytes(config: OptimizerConfig, trained: int) -> int:
    if config.name == "sgd":
        return trained if config.momentum else 0
    return trained if config.moments == "bf16" else 2 * trained


def _buffers(stages: Sequence[Stage], config: RunConfig, batch_bytes: int) -> int:
    """What the data takes, this step's and the next one's, and what torch's stages receive into: all micro-batches."""
    received = 0
    for stage in stages if config.parallel.pipeline > 1 else ():
        received += sum(value.nbytes for value in stage.received_meta)
        if stage.index < stage.num_stages - 1:
            received += sum(value.nbytes for value in stage.output_meta if value.requires_grad)
    return config.train.gradient_accumulation_steps * (received + 2 * batch_bytes)
