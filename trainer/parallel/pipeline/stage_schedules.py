"""Run the stages of one rank in the schedules of torch.distributed.pipelining, where there is more than one stage.

    data ──inputs of micro-batch i──┐                              ┌── labels of micro-batch i
                                    ▼                              ▼
    stage k-1 ──activations──► _ScheduledStage k ──activations──► last stage ─► on_outputs ─► loss
              ◄──gradients────                   ◄──gradients────

torch's schedules send and receive activations and gradients, and call forward and backward in their order. Three things
are kept from them: the micro-batches (each stage reads its inputs of the graph from the data), the weights (ZeRO and
the reducer count backward passes themselves), and the loss.
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

from onward.trainer.config.pipeline_schedules import PIPELINE_SCHEDULES, SPLIT_BACKWARD, PipelineSize, ScheduleName
from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.mesh import message_device
from onward.trainer.errors import ConfigError
from onward.trainer.parallel.pipeline.stage import Stage

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    Schedule = PipelineScheduleMulti | PipelineScheduleSingle

Autocast = Callable[[], AbstractContextManager[object]]
StagesFor = Callable[[Sequence[Tensor]], Sequence[Stage]]
"""Inputs of the graph for one micro-batch -> this rank's stages with `received_meta` and `output_meta` for such inputs,
under the autocast of the forward pass. Called once for each combination of shapes and types; reads nothing else."""
OnOutputs = Callable[[Batch, Sequence[Tensor]], Tensor | None]
"""Called by the last stage with a micro-batch and the graph's outputs; in training it returns the scalar to
differentiate."""


class ScheduledStages:
    """This rank's stages in torch's schedules. A schedule is kept for each shape and number of micro-batches."""

    MAX_SCHEDULES = 6
    """Most schedules kept. Each has receive buffers for all of its micro-batches."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: ScheduleName,
        stages_for: StagesFor,
        autocast: Autocast,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self.schedule = schedule
        self._stages_for = stages_for
        self._message_device = message_device(group, device)
        self._group = group
        splits_backward = PIPELINE_SCHEDULES[schedule].splits_backward
        self._modules = [
            _ScheduledStage(stage, autocast, device, self._message_device, copies=splits_backward) for stage in stages
        ]
        self._schedules: OrderedDict[object, tuple[Schedule, list[PipelineStage]]] = OrderedDict()
        if splits_backward and (problem := _split_backward_problem(stages)):
            raise ConfigError(f"parallel.schedule {schedule!r} {problem}; use 'interleaved' or '1f1b'")

    def splits_backward(self, num_micro_batches: int) -> bool:
        """Return whether backward passes are split where so many micro-batches run."""
        size = PipelineSize(self._group.size(), len(self._modules), num_micro_batches)
        return PIPELINE_SCHEDULES[self.schedule].torch_classes(size)[0] in SPLIT_BACKWARD

    def run(self, batches: Sequence[Batch], on_outputs: OnOutputs, beat: Callable[[], None]) -> None:
        """Run the forward passes of batches of one shape, and the backward passes unless gradients are off.

        Collective: every rank of the pipeline axis.
        """
        schedule, torch_stages = self._schedule_for(batches[0].inputs, len(batches), backward=torch.is_grad_enabled())
        for module in self._modules:
            module.batches = batches
            module.on_outputs = on_outputs
            module.beat = beat
        # torch splits what it is given into micro-batches: numbers alone, by which stages find their batch
        numbers = torch.arange(len(batches))
        try:
            schedule.step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            cause = _root_cause(error)
            if cause is error:
                raise
            raise cause  # noqa: B904  its own cause is the one to show
        for module, stage in zip(self._modules, torch_stages, strict=True):
            module.batches = ()
            stage.clear_runtime_states()  # frees the activations that were sent, which torch keeps until the next step

    def _schedule_for(
        self, inputs: Sequence[Tensor], num: int, *, backward: bool
    ) -> tuple[Schedule, list[PipelineStage]]:
        # torch allocates receive buffers by shape and type when it makes a schedule
        key = (self.schedule, backward, num, *((value.shape, value.dtype) for value in inputs))
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(inputs, num, backward=backward)
            if len(self._schedules) > self.MAX_SCHEDULES:
                # the least recently used one
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _make_schedule(
        self, inputs: Sequence[Tensor], num: int, *, backward: bool
    ) -> tuple[Schedule, list[PipelineStage]]:
        from torch.distributed.pipelining import PipelineStage, schedules  # here: a single stage needs neither

        torch_stages = []
        for module, stage in zip(self._modules, self._stages_for(inputs), strict=True):
            module.received_meta = stage.received_meta
            # the last stage sends nothing: its output is the loss
            is_last = stage.index == stage.num_stages - 1
            loss = (torch.empty((), device="meta"),) * backward
            # Shapes are given, because torch would find them by an extra forward pass, which draws random numbers and
            # updates running statistics.
            torch_stages.append(
                PipelineStage(
                    module,
                    stage.index,
                    stage.num_stages,
                    self._message_device,
                    input_args=tuple(map(_receive_buffer, stage.received_meta)),
                    output_args=loss if is_last else tuple(map(_receive_buffer, stage.output_meta)),
                    group=self._group,
                )
            )
        # evaluation has no backward passes to interleave
        order = PIPELINE_SCHEDULES[self.schedule if backward else "gpipe"]
        size = PipelineSize(self._group.size(), len(torch_stages), num)
        kind = getattr(schedules, order.torch_classes(size)[0])
        takes_several = issubclass(kind, schedules.PipelineScheduleMulti)
        # the last stage returns the loss itself
        loss_function = (lambda outputs, target: outputs[0]) if backward else None
        schedule: Schedule = kind(
            torch_stages if takes_several else torch_stages[0], num, loss_function, scale_grads=False
        )
        return schedule, torch_stages


def _root_cause(error: BaseException) -> BaseException:
    """Return the first of a chain of errors: torch wraps an error inside a stage into one that shows its inputs."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


class _ScheduledStage(nn.Module):
    """A stage as torch's schedules see it: called with what it receives and the micro-batch's number.

    device: where it computes; message_device: where what it receives and sends is, another one only with gloo and GPUs.
    copies: whether sent tensors are copies. A split backward pass needs that, because it detaches what it sends while
    this stage's own graph may still read it.
    """

    def __init__(
        self, stage: Stage, autocast: Autocast, device: torch.device, message_device: torch.device, *, copies: bool
    ) -> None:
        super().__init__()
        self._device = device
        self._message_device = message_device
        # In a tuple torch does not find the stage's modules. It would reset the gradients of FSDP modules whenever it
        # prepares for other shapes, and divide the gradients of weights that two stages share twice.
        self._hidden = (stage,)
        self._autocast = autocast
        self._is_last = stage.index == stage.num_stages - 1
        self._copies = copies
        self.received_meta: Sequence[Tensor] = ()
        self.batches: Sequence[Batch] = ()
        self.on_outputs: OnOutputs
        self.beat: Callable[[], None]

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Return the stage's parameters; only a split backward pass calls this, for the gradients of weights alone."""
        return self._hidden[0].chain.parameters(recurse)

    def forward(self, *received: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        batch = self.batches[int(number)]
        (stage,) = self._hidden
        values: tuple[Tensor, ...]
        with self._autocast():
            inputs = [batch.inputs[position] for position in stage.input_positions]
            # with gloo messages travel through host memory
            unpacked = [value.to(self._device) for value in _unpack_received(received, self.received_meta)]
            values = stage.chain(*unpacked, *inputs)
        self.beat()
        if self._is_last:
            loss = self.on_outputs(batch, values)
            values = () if loss is None else (loss,)
        else:
            # what autograd sends back arrives on the message device, and `to` moves it
            sent = [value.to(self._message_device) for value in values]
            values = tuple(_pack_to_send(value, copies=self._copies) for value in sent)
        # one hook for each pass is enough to show progress
        for value in [value for value in values if value.requires_grad][:1]:
            value.register_hook(self._beat_in_backward)  # type: ignore[no-untyped-call]
        return values

    def _beat_in_backward(self, gradient: Tensor) -> None:
        self.beat()


# -- messages between stages

INTEGERS_AS_FLOATS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
"""Whether torch's stages can receive only tensors that may have a gradient. Integers then travel as floats with the
same bits."""
CARRIERS = {
    torch.int64: (torch.int64, torch.float64),
    torch.int32: (torch.int32, torch.float32),
    torch.int16: (torch.int16, torch.float16),
    **dict.fromkeys((torch.int8, torch.uint8, torch.bool), (torch.int16, torch.float16)),
}
"""Type -> (the integer type that it is converted to, the float type of the same size that it is viewed as)."""


def _receive_buffer(meta: Tensor) -> Tensor:
    """Return a meta tensor like the message that carries a tensor."""
    is_carried = INTEGERS_AS_FLOATS and meta.dtype in CARRIERS
    dtype = CARRIERS[meta.dtype][1] if is_carried else meta.dtype
    return torch.empty(meta.shape, dtype=dtype, device="meta", requires_grad=meta.requires_grad)


def _pack_to_send(value: Tensor, *, copies: bool) -> Tensor:
    if INTEGERS_AS_FLOATS and value.dtype in CARRIERS:
        integer, floating = CARRIERS[value.dtype]
        value = value.to(integer).contiguous().view(floating)
    return value.clone(memory_format=torch.contiguous_format) if copies else value.contiguous()


def _unpack_received(received: Sequence[Tensor], metas: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # all in one function: each gradient that is sent back must exist, also of a tensor that nothing reads
    differentiable = [value for value in received if value.requires_grad]
    passed = iter(_DenseGradients.apply(*differentiable)) if differentiable else iter(())  # type: ignore[no-untyped-call]
    values = []
    for value, meta in zip(received, metas, strict=True):
        value = next(passed) if value.requires_grad else value
        # torch before 2.12 receives every tensor as one that may have a gradient
        value = value if meta.requires_grad else value.detach()
        if value.dtype != meta.dtype:
            value = value.view(CARRIERS[meta.dtype][0]).to(meta.dtype)
        values.append(value)
    return tuple(values)


class _DenseGradients(torch.autograd.Function):
    """The identity; its gradients are contiguous, and zeros where there are none, as sending them back requires."""

    @staticmethod
    def forward(context: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.contiguous() for gradient in gradients)


# -- backward passes that are split


def _split_backward_problem(stages: Iterable[Stage]) -> str:
    """Return why the backward passes of these stages cannot be split; empty if they can."""
    from torch.distributed.tensor import DTensor

    for stage in stages:
        if any(isinstance(weight, DTensor) for weight in stage.chain.parameters()):
            return "needs all weights complete on every rank, but parallel.zero shards them"
        for module in stage.chain.modules():
            if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl:
                return "cannot split the backward pass of compiled stages, and graph.compile is true"
    return ""


@contextlib.contextmanager
def restored_state(stages: Sequence[Stage], device: torch.device) -> Iterator[None]:
    """Restore running statistics and the state of the random number generators at the end of a block."""
    # the check runs the forward passes of a step that is run again afterwards
    before = [(buffer, buffer.clone()) for stage in stages for buffer in stage.chain.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type):
        yield
    for buffer, value in before:
        buffer.copy_(value)


def trained_parameters(stages: Iterable[Stage]) -> list[tuple[str, Parameter]]:
    """Return (path, parameter) for each trained parameter; one that two stages share is listed twice."""
    named = (pair for stage in stages for pair in stage.chain.named_parameters())
    return [(name, weight) for name, weight in named if weight.requires_grad]


def copy_gradients(stages: Iterable[Stage]) -> list[Tensor]:
    """Return copies of the gradients of `trained_parameters`, zeros where there is none."""
    weights = [weight for _, weight in trained_parameters(stages)]
    return [torch.zeros_like(weight) if weight.grad is None else weight.grad.clone() for weight in weights]
