"""More than one stage: this rank's stages in torch's schedules.

What torch is not told: the micro-batches (each stage takes from the data what it needs of them; only values of the
graph travel), the weights (ZeRO and the reducer count backward passes on their own), and the loss.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from onward.trainer.data.batches import Batch
from onward.trainer.errors import ConfigError
from onward.trainer.parallel.pipeline.stage import Stage

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    Schedule = PipelineScheduleMulti | PipelineScheduleSingle

Autocast = Callable[[], AbstractContextManager[object]]
Shapes = Callable[[Sequence[Tensor]], Sequence[Stage]]
"""Graph inputs of one micro-batch -> this rank's stages with `crossing` and `produced` as they are for such inputs,
under the autocast of the forward pass. Only shapes and types are read; asked once for each combination of them."""


Finish = Callable[[Batch, Sequence[Tensor]], Tensor | None]
"""What the last stage does with the graph's outputs: in training it gives the scalar to differentiate."""


ZERO_BUBBLE = "ScheduleInterleavedZeroBubble"


def schedule_class(wanted: str, num_micro_batches: int, num_ranks: int, stages_per_rank: int) -> str:
    """Name of the class of torch.distributed.pipelining that runs so many micro-batches.

    The wanted schedule if it takes them, else the one nearest to it that does: the last of a step go through in
    smaller numbers.
    """
    enough = num_micro_batches >= num_ranks
    whole_rounds = num_micro_batches % max(1, num_micro_batches // num_ranks) == 0
    if wanted == "zero_bubble" and enough and whole_rounds:
        return ZERO_BUBBLE
    if stages_per_rank == 1:
        return "Schedule1F1B" if wanted != "gpipe" and enough else "ScheduleGPipe"
    return "ScheduleInterleaved1F1B" if wanted != "gpipe" and whole_rounds else "ScheduleLoopedBFS"


class Scheduled:
    """This rank's stages in torch's schedules; a schedule is kept for each shape and number of micro-batches."""

    KEPT = 6
    """Each holds buffers for what its micro-batches receive."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: str,
        shapes: Shapes,
        autocast: Autocast,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self.schedule = schedule
        self._shapes = shapes
        self._device = device
        self._group = group
        self._shells = [_Shell(stage, autocast, fresh=schedule == "zero_bubble") for stage in stages]
        self._kept: OrderedDict[object, tuple[Schedule, list[PipelineStage]]] = OrderedDict()
        if schedule == "zero_bubble" and (problem := _indivisible(stages)):
            raise ConfigError(f"parallel.schedule 'zero_bubble' {problem}; use 'interleaved' or '1f1b'")

    def takes_apart(self, num: int) -> bool:
        """Whether so many micro-batches have the gradients of their weights computed apart from the others."""
        return schedule_class("zero_bubble", num, self._group.size(), len(self._shells)) == ZERO_BUBBLE

    def run(self, batches: Sequence[Batch], finish: Finish, beat: Callable[[], None]) -> None:
        """Forward, and backward unless gradients are off. Collective: every rank of the pipeline axis.

        batches: of one shape.
        """
        schedule, stages = self._for(batches[0].inputs, len(batches), backward=torch.is_grad_enabled())
        for shell in self._shells:
            shell.batches, shell.finish, shell.beat = batches, finish, beat
        numbers = torch.arange(len(batches))
        try:
            schedule.step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            reason = _reason(error)
            if reason is error:
                raise
            raise reason  # noqa: B904  its own cause is the one to show
        for shell, stage in zip(self._shells, stages, strict=True):
            shell.batches = ()
            stage.clear_runtime_states()  # or it would keep what it sent until the next time

    def _for(self, inputs: Sequence[Tensor], num: int, *, backward: bool) -> tuple[Schedule, list[PipelineStage]]:
        key = (self.schedule, backward, num, *((value.shape, value.dtype) for value in inputs))
        if key not in self._kept:
            self._kept[key] = self._make(inputs, num, backward=backward)
            if len(self._kept) > self.KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _make(self, inputs: Sequence[Tensor], num: int, *, backward: bool) -> tuple[Schedule, list[PipelineStage]]:
        from torch.distributed.pipelining import PipelineStage, schedules  # here: one rank needs neither

        made = []
        for shell, stage in zip(self._shells, self._shapes(inputs), strict=True):
            shell.crossing = stage.received_meta
            last = stage.index == stage.num_stages - 1
            loss = (torch.empty((), device="meta"),) * backward
            # shapes given, or torch would find them out by a forward pass that counts and draws like any other
            made.append(
                PipelineStage(
                    shell,
                    stage.index,
                    stage.num_stages,
                    self._device,
                    input_args=tuple(map(_buffer, stage.received_meta)),
                    output_args=loss if last else tuple(map(_buffer, stage.output_meta)),
                    group=self._group,
                )
            )
        name = schedule_class(self.schedule if backward else "gpipe", num, self._group.size(), len(made))
        several = name not in ("ScheduleGPipe", "Schedule1F1B")
        computed = (lambda outputs, target: outputs[0]) if backward else None  # by the shell
        schedule: Schedule = getattr(schedules, name)(made if several else made[0], num, computed, scale_grads=False)
        return schedule, made


def _reason(error: BaseException) -> BaseException:
    """What really happened: torch wraps an error inside a stage into one that shows the stage's inputs instead."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


class _Shell(nn.Module):
    """A stage as torch's schedules see it: called with what it receives and the micro-batch's number.

    The stage is held in a tuple, where torch does not find it: it would undo the gradients of sharded modules
    whenever it prepares for other shapes, and divide those of weights that two stages share twice.
    """

    def __init__(self, stage: Stage, autocast: Autocast, *, fresh: bool) -> None:
        super().__init__()
        self._hidden = (stage,)
        self._autocast = autocast
        self._last = stage.index == stage.num_stages - 1
        self._fresh = fresh
        self.crossing: Sequence[Tensor] = ()
        """Types of what it receives."""
        self.batches: Sequence[Batch] = ()
        self.finish: Finish
        self.beat: Callable[[], None]

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """For the schedule that computes the gradients of weights apart, and no other."""
        return self._hidden[0].chain.parameters(recurse)

    def forward(self, *received: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        batch = self.batches[int(number)]
        (stage,) = self._hidden
        values: tuple[Tensor, ...]
        with self._autocast():
            values = stage.chain(
                *_arrived(received, self.crossing), *(batch.inputs[place] for place in stage.input_positions)
            )
        self.beat()
        if self._last:
            loss = self.finish(batch, values)
            values = () if loss is None else (loss,)
        else:
            values = tuple(_departing(value, fresh=self._fresh) for value in values)
        for value in [value for value in values if value.requires_grad][:1]:
            value.register_hook(self._beat_backward)  # type: ignore[no-untyped-call]
        return values

    def _beat_backward(self, gradient: Tensor) -> None:
        self.beat()


def _departing(value: Tensor, *, fresh: bool) -> Tensor:
    """What is sent; `fresh`: a tensor of its own, for a schedule that detaches it while its own stage may need it."""
    if CARRIED and value.dtype in CARRIERS:
        integer, floating = CARRIERS[value.dtype]
        value = value.to(integer).contiguous().view(floating)
    return value.clone(memory_format=torch.contiguous_format) if fresh else value.contiguous()


def _arrived(received: Sequence[Tensor], metas: Sequence[Tensor]) -> tuple[Tensor, ...]:
    differentiable = [value for value in received if value.requires_grad]
    passed = iter(_Arrival.apply(*differentiable)) if differentiable else iter(())  # type: ignore[no-untyped-call]
    values = [next(passed) if value.requires_grad else value for value in received]
    return tuple(_as_sent(value, meta) for value, meta in zip(values, metas, strict=True))


def _as_sent(value: Tensor, meta: Tensor) -> Tensor:
    value = value if meta.requires_grad else value.detach()
    return value if value.dtype == meta.dtype else value.view(CARRIERS[meta.dtype][0]).to(meta.dtype)


CARRIED = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
"""Whether all that is received must be able to have a gradient: integers travel as floats of the same bits."""
CARRIERS = {
    torch.int64: (torch.int64, torch.float64),
    torch.int32: (torch.int32, torch.float32),
    torch.int16: (torch.int16, torch.float16),
    **dict.fromkeys((torch.int8, torch.uint8, torch.bool), (torch.int16, torch.float16)),
}


class _Arrival(torch.autograd.Function):
    """What a stage receives; the gradients it sends back are contiguous, and 0 rather than none."""

    @staticmethod
    def forward(context: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.contiguous() for gradient in gradients)


def _buffer(meta: Tensor) -> Tensor:
    """What is received into, on the meta device."""
    carried = CARRIED and meta.dtype in CARRIERS
    dtype = CARRIERS[meta.dtype][1] if carried else meta.dtype
    return torch.empty(meta.shape, dtype=dtype, device="meta", requires_grad=meta.requires_grad)


# -- zero_bubble


def _indivisible(stages: Iterable[Stage]) -> str:
    """Why the gradients of weights cannot be computed apart from those of activations; empty if they may."""
    from torch.distributed.tensor import DTensor

    for stage in stages:
        if any(isinstance(weight, DTensor) for weight in stage.chain.parameters()):
            return "needs whole weights on every rank, but parallel.zero divides them"
        if any(
            type(module).__name__ == "OptimizedModule" or module._compiled_call_impl for module in stage.chain.modules()
        ):
            return "cannot take compiled stages apart, and graph.compile is true"
    return ""


@contextlib.contextmanager
def unchanged(stages: Sequence[Stage], device: torch.device) -> Iterator[None]:
    """Put back running statistics and the state of the random numbers."""
    before = [(buffer, buffer.clone()) for stage in stages for buffer in stage.chain.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type):
        yield
    for buffer, value in before:
        buffer.copy_(value)


def trained(stages: Iterable[Stage]) -> list[tuple[str, Parameter]]:
    """Path and weight of each, a weight of two stages twice."""
    named = (pair for stage in stages for pair in stage.chain.named_parameters())
    return [(name, weight) for name, weight in named if weight.requires_grad]


def gradients_of(stages: Iterable[Stage]) -> list[Tensor]:
    """Copies, in the order of `trained`."""
    return [torch.zeros_like(it) if it.grad is None else it.grad.clone() for _, it in trained(stages)]
