"""A stand-in for a GPU: tensors that say they are on another device and compute on the CPU.

    with StandInDevice() as device:
        outputs = module_on_device(model)(device.put(x))
    device.copies_to_device, device.host_reads

Real values flow, so graphs whose control flow and shapes depend on data run too. What a GPU refuses is refused: an
operation that mixes device tensors with host tensors of one or more dimensions, and reading a device tensor as an
array. What makes a GPU wait or copy is recorded: each tensor that is copied from the host to the device, and each
value or length that the host reads from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from onward.trainer.parallel.planning.dry_run import replaced_weights

_setup_privateuseone_for_python_backend("stand_in")  # from now on the accelerator of this process
DEVICE = torch.device("stand_in:0")
aten = torch.ops.aten

HOST_INDICES = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor)
"""Operations that take index tensors on the host beside device tensors; each is copied to the device."""

NO_SHAPE_READ = (aten.index_put.default, aten.index_put_.default)


class MixedDevicesError(RuntimeError):
    """Device tensors and host tensors in one operation: a GPU would refuse it."""


class DeviceTensor(torch.Tensor):
    """A tensor whose device is stand_in:0 and whose values are in `host`."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        made.host = host
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a device tensor outside StandInDevice")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host!r})"


class StandInDevice(TorchDispatchMode):
    """Within this context, the device `stand_in:0` exists."""

    def __init__(self) -> None:
        super().__init__()
        self.copies_to_device: list[str] = []
        """The operation and shape of each tensor that was copied from the host, those of `put` excepted."""
        self.host_reads: list[str] = []
        """The operation of each value or length that the host read from the device."""
        self._settings = ExitStack()

    def __enter__(self) -> StandInDevice:
        self._settings = ExitStack()
        # the threads of autograd's other devices do not exist
        self._settings.enter_context(torch.autograd.set_multithreading_enabled(False))
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._settings.callback(torch._C._set_only_lift_cpu_tensors, before)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._settings.close()

    def put(self, value: Any) -> Any:
        """Return a value with its tensors on the device: a tensor, a list of tensors or None."""
        return pytree.tree_map_only(torch.Tensor, lambda tensor: DeviceTensor(tensor.detach()), value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        on_host = [leaf for leaf in leaves if not isinstance(leaf, DeviceTensor)]
        target = kwargs.get("device")
        to_device = bool(on_device) if target is None else torch.device(target).type == DEVICE.type
        if not on_device and not to_device:
            return func(*args, **kwargs)
        if func is aten._fused_sdp_choice.default:
            return 0  # the kernel of plain operations; the others are not on the CPU
        self._record(func, args, on_device, on_host, to_device)
        if (generator := kwargs.get("generator")) is not None and generator.device.type == "cpu":
            raise MixedDevicesError(f"{func} on the device with a generator of the host")
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        bare_args, bare_kwargs = pytree.tree_map_only(DeviceTensor, lambda tensor: tensor.host, (args, kwargs))
        results = FUSED.get(func, func)(*bare_args, **bare_kwargs)
        if func is aten.copy_.default and not isinstance(args[0], DeviceTensor):
            return args[0]
        if not to_device:
            # a tensor of the host shares no memory with the device
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, results)
        wrapped = pytree.tree_map_only(torch.Tensor, DeviceTensor, results)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def _record(self, func: Any, args: Any, on_device: list[Any], on_host: list[torch.Tensor], to_device: bool) -> None:
        """Record what the operation copies and reads. Raises MixedDevicesError."""
        transfer = func in (aten._to_copy.default, aten.copy_.default)
        if transfer and on_host and to_device:
            self.copies_to_device += [f"{func} {list(tensor.shape)}" for tensor in on_host]
            if func is aten.copy_.default and not isinstance(args[0], DeviceTensor):
                self.host_reads.append(str(func))
            return
        if func is aten._to_copy.default and not to_device:
            self.host_reads.append(str(func))
        waits = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
        if waits and func not in HOST_INDICES:
            self.host_reads.append(str(func))
        indices = args[1] if func in HOST_INDICES else []
        if func not in NO_SHAPE_READ and any(index is not None and index.dtype == torch.bool for index in indices):
            self.host_reads.append(f"{func} by a mask")
        for tensor in on_host:
            if any(tensor is index for index in indices):
                self.copies_to_device.append(f"{func} {list(tensor.shape)}")
            elif tensor.ndim or not _takes_host_numbers(func):
                shapes = [list(other.shape) for other in on_device]
                raise MixedDevicesError(f"{func} of device tensors {shapes} and a host tensor {list(tensor.shape)}")


def _zeros(like: torch.Tensor, *lengths: int) -> torch.Tensor:
    return like.new_zeros(like.shape[0], *lengths)


FUSED: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: lambda gates, _, cx, *biases: (_zeros(cx, cx.shape[1]),) * 2 + (gates * 0,),
    aten._thnn_fused_lstm_cell_backward_impl.default: lambda hy, cy, cx, _, gates, bias: (
        (gates * 0, cx * 0, gates[0] * 0 if bias else None)
    ),
    aten._thnn_fused_gru_cell.default: lambda gates, _, hx, *biases: (hx * 0, _zeros(hx, 5 * hx.shape[1])),
    aten._thnn_fused_gru_cell_backward.default: lambda hy, workspace, bias: (
        (_zeros(hy, 3 * hy.shape[1]), _zeros(hy, 3 * hy.shape[1]), hy * 0)
        + ((hy.new_zeros(3 * hy.shape[1]),) * 2 if bias else (None, None))
    ),
}
"""Kernels that only accelerators have: what gives results of their shapes, all zero."""


def _takes_host_numbers(func: Any) -> bool:
    """Return whether torch takes a host tensor of no dimensions beside device tensors: elementwise operations do."""
    return torch.Tag.pointwise in func.tags or func in (aten.where.self, aten.fill_.Tensor, aten.fill.Tensor)


def weights_on_device(module: nn.Module) -> AbstractContextManager[None]:
    """Replace parameters and buffers of a module by device tensors, as `module.to` would, inside a block."""
    return replaced_weights(module, lambda each: DeviceTensor(each.detach()).requires_grad_(each.requires_grad))
