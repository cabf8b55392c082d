r"""Estimate the memory of one rank at the peak of a step.

    bytes
      |         __                  __
      |        /  \                /  \              transient: inside one pass, buffers
      |     __/    \__          __/    \__
      |    /          \        /          \          activations: of the micro-batches in flight
      |---/------------\------/------------\----
      |                                              optimizer state
      |-----------------------------------------
      |                                              gradients
      |-----------------------------------------
      |                                              weights
      +----F0-----B0-------F1------B1-----------> time

With W = bytes of all weights and running statistics of the rank, T = of the trained ones, S and T_S = of those that
ZeRO shards over n replicas (of these, trained), u = of the largest unit that ZeRO gathers as one:

                 no ZeRO    ZeRO 1                ZeRO 2              ZeRO 3
    weights      W          W + S/n               W + S/n             W - S + S/n + 2u
    gradients    T          T + T_S/n             T - T_S + T_S/n     T - T_S + T_S/n
    optimizer    O          O - O_S + O_S/n       the same            the same
    transient    ...        ... + 2u              ... + 2u            ... + 2u

In bf16 and fp16 there is one cast of each weight that products read, in half of its bytes: W contains it without ZeRO.
With ZeRO such a weight is gathered in half of its bytes instead (u, and S in ZeRO 1 and 2), if nothing else reads it.

O is the state of the optimizer and O_S that of what ZeRO shards, by the table in trainer/optim/rules/table.py: 2 T for
Adam and LAMB (T if their moments are bf16), T for Lion and for SGD with momentum; a
moving average of the weights is one T more. The factor 2u is
the unit in use and the one that is gathered or scattered meanwhile. Source: Rajbhandari et al. 2020
(https://arxiv.org/abs/1910.02054), with copies as trainer/parallel/replicas/zero.py keeps them.

While a rank model is built, the device holds W - S + S/n and at most one unit and two shards of it: less than in a
step. What ZeRO shards stays in the model's file until then, which is mapped. Weights that the file holds in half
precision are converted when it is opened: of those each rank has all on the host first, which these numbers do not
contain.

Activations and the rest of the transient bytes come from a dry run of each stage (dry_run.py) and from the order of the
passes in the schedule: the activations of all micro-batches in flight are
held during each pass.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.sections.training import AverageConfig, TrainConfig
from onward.trainer.distributed.weights import Weight
from onward.trainer.model.weight_casts import cast_weights
from onward.trainer.optim.state import state_bytes
from onward.trainer.parallel.pipeline.stage import Stage
from onward.trainer.parallel.planning.device_model import reserve
from onward.trainer.parallel.planning.dry_run import DryRun
from onward.trainer.parallel.planning.plan_record import Memory
from onward.trainer.parallel.replicas.fsdp_groups import gathered_in_half
from onward.trainer.parallel.replicas.reducer import is_statistic
from onward.trainer.parallel.replicas.zero import is_sharded


@dataclass(frozen=True)
class _StaticMemory:
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Units that ZeRO gathers or scatters at the time."""


class RankMemory:
    """Counts what a rank holds. pipeline: its coordinate. batch_bytes: of the data of one micro-batch."""

    def __init__(
        self, stages: Sequence[Stage], weights: Sequence[Weight], config: RunConfig, *, pipeline: int, batch_bytes: int
    ) -> None:
        self._stages = stages
        self._weights = weights
        self._config = config
        self._passes = [*pass_order(config.parallel, config.train.gradient_accumulation_steps, pipeline)]
        self._buffers = _buffer_bytes(stages, config.train, config.parallel, batch_bytes)

    def at_peak(self, dry_runs: Sequence[DryRun]) -> Memory:
        """Return what the rank holds at its peak. dry_runs: of its stages."""
        in_flight = activations = peak = 0
        for is_forward, stage in self._passes:
            run = dry_runs[stage]
            # at the beginning of a backward pass its own kept bytes are part of both numbers
            peak = max(peak, in_flight + run.peak_bytes - (0 if is_forward else run.kept_bytes))
            in_flight += run.kept_bytes if is_forward else -run.kept_bytes
            activations = max(activations, in_flight)
        static = self._static()
        return Memory(
            weights=static.weights,
            gradients=static.gradients,
            optimizer=static.optimizer,
            activations=activations,
            transient=peak - activations + static.gathered + self._buffers,
        )

    def left_for_activations(self, device_type: str) -> tuple[int, int]:
        """Return (bytes that `parallel.memory_gib` leaves for activations, most micro-batches in flight)."""
        parallel = self._config.parallel
        # the most forward passes whose backward pass has not run yet
        in_flight = max(itertools.accumulate(1 if is_forward else -1 for is_forward, _ in self._passes))
        static = self._static()
        taken = static.weights + static.gradients + static.optimizer + static.gathered + self._buffers
        limit = int(parallel.memory_gib * 2**30)
        taken += reserve(parallel, device_type, limit).total
        return limit - taken, math.ceil(in_flight / parallel.stages_per_rank)

    def _static(self) -> _StaticMemory:
        """Return the first four rows of the table above."""
        zero = self._config.parallel.zero
        own = [weight for weight in self._weights if weight.trained]
        trained = sum(weight.tensor.nbytes for weight in own)
        # parameters once for each stage that has them: stages of one rank have copies of a shared weight
        held = sum(weight.tensor.nbytes for weight in self._weights if isinstance(weight.tensor, nn.Parameter))
        # each buffer once, where several parts of the graph read it
        buffers = {buffer for stage in self._stages for buffer in stage.chain.buffers()}
        held += sum(buffer.nbytes for buffer in buffers)
        parts = [part for stage in self._stages for part in stage.chain.parts]
        casts = {weight for part in parts for weight in _cast_weights(part.module)}
        if not zero:
            held += _bytes_in_half(casts)
            updates = state_bytes(self._config.optimizer, own) + _average_bytes(
                self._weights, trained, self._config.average
            )
            return _StaticMemory(held, trained, updates, 0)
        sharding = zero_sharding(self._stages, self._weights, self._config.parallel)
        # the rank keeps its shard of these only; what is gathered at a time is added below
        held -= sharding.stored_bytes - sharding.stored_bytes // sharding.num_shards
        own_trained = trained - sharding.trained_bytes + sharding.trained_bytes // sharding.num_shards
        sharded_state = state_bytes(self._config.optimizer, [weight for weight in own if is_sharded(weight, zero=zero)])
        state = state_bytes(self._config.optimizer, own) - sharded_state + sharded_state // sharding.num_shards
        # ZeRO 1 and 2 keep the gathered weights for the whole step, ZeRO 3 two units at a time
        gathered = sharding.total_bytes if zero < 3 else 2 * max(sharding.unit_bytes, default=0)
        if zero < 3:
            # what is not gathered in half precision is cast; ZeRO 3 casts it again in each pass
            gathered += _bytes_in_half(casts.difference(*(gathered_in_half(stage.chain) for stage in self._stages)))
        # ZeRO 1 accumulates complete gradients and scatters them at the end of the step
        unsharded_gradients = sharding.trained_bytes if zero == 1 else 0
        return _StaticMemory(
            weights=held + gathered,
            gradients=own_trained + unsharded_gradients,
            optimizer=state + _average_bytes(self._weights, own_trained, self._config.average),
            gathered=2 * max(sharding.scattered_bytes, default=0),
        )


def pass_order(parallel: ParallelConfig, num_micro_batches: int, pipeline: int) -> Iterator[tuple[bool, int]]:
    """Yield (is it a forward pass, number of the stage on this rank) for each pass of a step, in order.

    As config/pipeline_schedules.py describes it. Here for 1f1b with 2 stages and 4 micro-batches, ahead = 2 on rank 0
    and 1 on rank 1:

        rank 0    F F B F B F B B
        rank 1    F B F B F B F B
    """
    size = parallel.pipeline_size(num_micro_batches)
    per_rank = size.stages_per_rank
    round_size = size.round_size
    total = num_micro_batches * per_rank
    ahead = min(parallel.order.ahead(size, pipeline), total)
    for number in range(total + ahead):
        if number < total:
            yield True, number // round_size % per_rank
        if number >= ahead - 1 and number - ahead + 1 < total:
            yield False, per_rank - 1 - (number - ahead + 1) // round_size % per_rank


# -- what does not change during a step


@dataclass(frozen=True)
class ZeroSharding:
    """What ZeRO shards of one rank's weights, in bytes before sharding."""

    num_shards: int
    unit_bytes: tuple[int, ...]
    """The weights that are gathered as one: those of each unit alone, and those that several units of a stage use."""
    trained_bytes: int

    scattered_bytes: tuple[int, ...]
    """The gradients of the same groups, fp32."""
    stored_bytes: int
    """All of these weights in fp32."""

    @property
    def total_bytes(self) -> int:
        return sum(self.unit_bytes)


def zero_sharding(stages: Sequence[Stage], weights: Sequence[Weight], parallel: ParallelConfig) -> ZeroSharding:
    """Return what trainer/parallel/replicas/zero.py shards, and what it gathers together."""
    sharded = []
    if parallel.zero:
        sharded = [weight for weight in weights if is_sharded(weight, zero=parallel.zero)]
    tensors = {weight.tensor for weight in sharded}
    # (parameters that are gathered as one, whether in half precision)
    groups: list[tuple[list[nn.Parameter], bool]] = []
    for stage in stages:
        halves = gathered_in_half(stage.chain)
        units = []
        for unit in stage.chain.units:
            units.append([tensor for tensor in unit.parameters() if tensor in tensors])
        uses = Counter(tensor for parameters in units for tensor in parameters)
        # a weight that several units of a stage use is gathered with none of them, but with the stage
        common = [tensor for tensor, times in uses.items() if times > 1]
        groups.append((common, False))
        for parameters in units:
            own = [tensor for tensor in parameters if uses[tensor] == 1]
            # FSDP gathers one type at a time, so that a unit has a group of each type
            groups.append(([tensor for tensor in own if tensor not in halves], False))
            groups.append(([tensor for tensor in own if tensor in halves], True))
    unit_bytes = []
    # gradients are scattered in fp32, also those of weights that are gathered in half precision
    scattered_bytes = []
    for group, is_half in groups:
        size = sum(tensor.nbytes for tensor in group)
        if group:
            unit_bytes.append(size // 2 if is_half else size)
            scattered_bytes.append(size)
    trained_bytes = sum(weight.tensor.nbytes for weight in sharded if weight.trained)
    return ZeroSharding(
        num_shards=parallel.shard or parallel.data,
        unit_bytes=tuple(unit_bytes),
        trained_bytes=trained_bytes,
        scattered_bytes=tuple(scattered_bytes),
        stored_bytes=sum(weight.tensor.nbytes for weight in sharded),
    )


def _cast_weights(module: nn.Module) -> set[nn.Parameter]:
    return cast_weights(module) if isinstance(module, fx.GraphModule) else set()


def _bytes_in_half(weights: Iterable[Tensor]) -> int:
    return sum(weight.nbytes // 2 for weight in weights)


def _average_bytes(weights: Sequence[Weight], trained: int, average: AverageConfig) -> int:
    """Return the size of the moving averages (optim/averages.py): of the trained weights and running statistics."""
    statistics = sum(weight.tensor.nbytes for weight in weights if is_statistic(weight.tensor))
    return trained + statistics if average.kind != "none" else 0


def _buffer_bytes(stages: Sequence[Stage], train: TrainConfig, parallel: ParallelConfig, batch_bytes: int) -> int:
    """Return the size of the data, of this step and the next, and of torch's receive buffers, for all micro-batches."""
    # one stage sends nothing, so there are no receive buffers
    received = 0
    if parallel.pipeline > 1:
        for stage in stages:
            received += sum(value.nbytes for value in stage.received_meta)
            # the last stage receives no gradient
            if stage.index < stage.num_stages - 1:
                received += sum(value.nbytes for value in stage.output_meta if value.requires_grad)
    return train.gradient_accumulation_steps * (received + 2 * batch_bytes)
