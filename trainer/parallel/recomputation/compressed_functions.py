"""Operators that keep less for their backward pass: a bit for an element, a byte for a window, a rounded input.

    relu, leaky_relu, clamp     4 bytes an element          the bit "the gradient passes", eight in a byte
    max_pool                    its input, int64 indices    where in its window each maximum is: 1 byte a result, 2
                                                            where a window spans more than 255 elements of the plane
    RoundedInputs               its input in fp32           the input in bf16 (2 bytes) or fp8 (1 byte an element)

All but the last have exactly the bits of torch's own operators, whose backward kernels they call. Source: Jain et al.
2018, Gist: Efficient Data Encoding for Deep Neural Network Training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten


def _needs_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


# -- one bit an element

# eight bytes that are 0 or 1, read as one integer and multiplied by this, have their bits in the highest byte
GATHER_BITS = 0x0102040810204080
# multiplied by this, a byte is repeated eight times ...
REPEAT_BYTE = 0x0101010101010101
# ... and this leaves another bit of each
ONE_BIT_EACH = 0x8040201008040201 - 2**64


def pack_bits(mask: Tensor) -> Tensor:
    """Return a boolean tensor [...] without gaps in memory as uint8 [elements / 8, rounded up]: its bits in order."""
    flat = mask.as_strided((mask.numel(),), (1,)).view(torch.uint8)
    # the last byte is filled up, as eight bytes are read as one integer
    if missing := -mask.numel() % 8:
        flat = torch.cat((flat, flat.new_zeros(missing)))
    return flat.view(torch.int64).mul(GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(packed: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return uint8 [*shape], not 0 where the bit is set. packed: uint8 [elements / 8], of `pack_bits`."""
    spread = packed.to(torch.int64).mul_(REPEAT_BYTE).bitwise_and_(ONE_BIT_EACH)
    return spread.view(torch.uint8).as_strided(shape, strides)


def relu(x: Tensor) -> Tensor:
    """Return torch.relu(x), [...] as x."""
    return _Masked.apply(x, "relu") if _needs_gradient(x) else torch.relu(x)  # type: ignore[no-untyped-call]


def leaky_relu(x: Tensor, slope: float) -> Tensor:
    """Return F.leaky_relu(x, slope), [...] as x."""
    return _Masked.apply(x, "leaky_relu", slope) if _needs_gradient(x) else F.leaky_relu(x, slope)  # type: ignore[no-untyped-call]


def clamp(x: Tensor, least: float | None, most: float | None) -> Tensor:
    """Return x [...], with `least` and `most` in place of what is below and above."""
    return _Masked.apply(x, "clamp", least, most) if _needs_gradient(x) else _clamp(x, least, most)[0]  # type: ignore[no-untyped-call]


def _clamp(x: Tensor, least: float | None, most: float | None) -> tuple[Tensor, Tensor]:
    """Return the result, and what was compared with the second bound."""
    raised = x if least is None else torch.clamp_min(x, least)
    return raised if most is None else torch.clamp_max(raised, most), raised


@functools.cache
def _passes_at_bounds() -> bool:
    """Return whether torch's clamp passes a gradient on where x is one of the bounds, as it does before torch 2.14."""
    x = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(torch.clamp_min(x, 0.0), x)
    return bool(gradient)


class _Masked(torch.autograd.Function):
    """A function that passes a gradient on where a bit is set, and elsewhere 0 or `slope` times the gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, name: str, *numbers: Any) -> Tensor:
        context.slope = None
        if name == "relu":
            result = torch.relu(x)
            # as in torch, NaN passes its gradient on
            mask = result != 0
        elif name == "leaky_relu":
            (context.slope,) = numbers
            result = F.leaky_relu(x, context.slope)
            mask = x > 0
        else:
            least, most = numbers
            result, raised = _clamp(x, least, most)
            below, above = (torch.le, torch.ge) if _passes_at_bounds() else (torch.lt, torch.gt)
            mask = below(raised, most) if most is not None else above(x, least)
            if least is not None and most is not None:
                mask.logical_and_(above(x, least))
        context.save_for_backward(pack_bits(mask))
        context.shape = mask.shape
        context.strides = mask.stride()
        context.num_numbers = len(numbers)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = context.saved_tensors
        # 0 or a positive number for each element: the kernels of torch need no more of x
        x = unpack_bits(packed, context.shape, context.strides).to(gradient.dtype)
        if context.slope is None:
            # on a CPU six times as fast as `where`
            result = aten.threshold_backward(gradient, x, 0)
        else:
            result = aten.leaky_relu_backward(gradient, x, context.slope, False)
        return result, None, *[None] * context.num_numbers


# -- one byte a window


def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    ceil_mode: bool = False,
) -> Tensor:
    """Return F.max_pool1d, 2d or 3d of x [batch, channels, ...]."""
    window = tuple(tuple(each) for each in (kernel, stride, padding, dilation))
    if x.ndim == 3:  # torch computes these in two dimensions, too
        window = tuple((first, *each) for first, each in zip((1, 1, 0, 1), window, strict=True))
        return max_pool(x.unsqueeze(2), *window, ceil_mode=ceil_mode).squeeze(2)
    pool: Any = F.max_pool2d if x.ndim == 4 else F.max_pool3d
    result: Tensor = (
        _MaxPool.apply(x, *window, ceil_mode) if _needs_gradient(x) else pool(x, *window, ceil_mode=ceil_mode)  # type: ignore[no-untyped-call]
    )
    return result


class _MaxPool(torch.autograd.Function):
    """Max pooling, whose indices are kept relative to the beginning of their window."""

    @staticmethod
    def forward(context: Any, x: Tensor, *window: Any) -> Tensor:
        forward = aten.max_pool2d_with_indices if x.ndim == 4 else aten.max_pool3d_with_indices
        result, index = forward(x, *window)
        lengths, (kernel, _, _, dilation, _) = x.shape[2:], window
        farthest = 0
        for length, k, d in zip(lengths, kernel, dilation, strict=True):
            farthest = farthest * length + (k - 1) * d
        dtype = torch.uint8 if farthest < 2**8 else torch.int16 if farthest < 2**15 else torch.int32
        begins = _window_begins(lengths, index.shape[2:], window, index.device)
        context.save_for_backward(index.sub_(begins).to(dtype))
        context.window = window
        context.shape = x.shape
        context.strides = x.stride()
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (offset,) = context.saved_tensors
        index = offset.to(torch.int64)
        index += _window_begins(context.shape[2:], index.shape[2:], context.window, index.device)
        # the kernels read the shape and the memory format of the input and not its elements
        x = gradient.new_empty_strided(context.shape, context.strides)
        two = len(context.shape) == 4
        backward = aten.max_pool2d_with_indices_backward if two else aten.max_pool3d_with_indices_backward
        return backward(gradient, x, *context.window, index), *[None] * 5


def _window_begins(lengths: Sequence[int], results: Sequence[int], window: Any, device: torch.device) -> Tensor:
    """Return the flat index in a plane of the first element of each window; in front of the plane it is negative."""
    _, stride, padding, _, _ = window
    begins = torch.zeros((), dtype=torch.int64, device=device)
    for length, count, s, p in zip(lengths, results, stride, padding, strict=True):
        begins = begins.unsqueeze(-1) * length + torch.arange(-p, count * s - p, s, device=device)
    return begins


# -- rounded inputs

SMALLEST = 4096
"""Inputs with fewer elements are kept as they are."""
LARGEST_FP8 = 448.0


class Rounded(NamedTuple):
    """A tensor in fewer bits, in the order of its memory."""

    values: Tensor
    factor: Tensor | None
    """What the values are to be multiplied by; None in bf16."""
    version: int
    """That of the tensor, which an operator may have written over since."""


class _Saved(NamedTuple):
    """What autograd keeps in place of a tensor."""

    rounded: Rounded
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int | torch.SymInt


# Two operators that read one tensor keep one rounded copy. The entry is gone with the tensor, at the latest when all
# operators that read it have run.
_roundings: Any = WeakIdKeyDictionary()


class RoundedInputs(nn.Module):
    """Call a function or a module, for whose backward pass activations among its operands are kept in fewer bits.

    Operands that are not the result of an operator (weights, data, what another stage has sent) are kept as they are:
    others refer to them, too. The result of the call has the same bits as without.
    """

    def __init__(self, call: Callable[..., Any], positions: Sequence[int], stash: str) -> None:
        """positions: of the activations among the operands. stash: "bf16" or "fp8"."""
        super().__init__()
        self.call = call
        self.positions = tuple(positions)
        self.stash = stash

    def forward(self, *operands: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.call(*operands, **options)
        given = list(operands)
        rounded: dict[int, Tensor] = {}
        for position in self.positions:
            x = given[position]
            if not isinstance(self.call, nn.Module):
                # as autocast will do, which would save a tensor that is not the one given
                x = given[position] = _autocast(x)
            if self._is_worth_it(x):
                rounded[x.untyped_storage()._cdata] = x
        with saved_tensors_hooks(partial(_pack, rounded, self.stash), _unpack):
            result = self.call(*given, **options)
        # autograd keeps both functions, and with them what they refer to
        rounded.clear()
        return result

    def _is_worth_it(self, x: Tensor) -> bool:
        """Return whether x is a large activation in more bits, and all that is in its memory."""
        bytes_each = 2 if self.stash == "bf16" else 1
        is_wider = x.is_floating_point() and x.element_size() > bytes_each
        is_activation = x.grad_fn is not None
        if not is_wider or not is_activation or x.numel() < SMALLEST:
            return False
        # the rest of a larger memory may be kept by others, and then the compressed copy would come on top
        return x.untyped_storage().nbytes() == x.nbytes

    def extra_repr(self) -> str:
        return f"{getattr(self.call, '__name__', '')}, {self.stash}"


def _autocast(x: Tensor) -> Tensor:
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _pack(rounded: dict[int, Tensor], stash: str, saved: Tensor) -> Tensor | _Saved:
    x = rounded.get(saved.untyped_storage()._cdata)
    if x is None:
        return saved
    known = _roundings.get(x)
    if known is None or known.version != x._version:
        known = _roundings[x] = round_(x.detach().as_strided((x.numel(),), (1,)), stash, x._version)
    return _Saved(known, saved.dtype, saved.shape, saved.stride(), saved.storage_offset())


def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return restore(saved.rounded, saved.dtype).as_strided(saved.shape, saved.strides, saved.offset)


def round_(flat: Tensor, stash: str, version: int = 0) -> Rounded:
    """Return a tensor [elements] in bf16, or in fp8 (e4m3) with a factor that makes the largest element 448."""
    if stash == "bf16":
        return Rounded(flat.to(torch.bfloat16), None, version)
    # fp8 has a small range, so that the largest element decides the factor; 1e-30: zeros have none
    low, high = flat.aminmax()
    largest = torch.maximum(high, -low).float().clamp_min(1e-30)
    return Rounded((flat.float() * (LARGEST_FP8 / largest)).to(torch.float8_e4m3fn), largest / LARGEST_FP8, version)


def restore(rounded: Rounded, dtype: torch.dtype) -> Tensor:
    """Return the tensor [elements] cast back to its dtype."""
    values, factor, _ = rounded
    if factor is None:
        return values.to(dtype)
    if values.is_cuda:
        return (values.float() * factor).to(dtype)
    # The CPU converts fp8 one element at a time, and fp16 by vectors. The exponents and fractions of fp8 are moved to
    # the place that they have in fp16, whose numbers are then smaller by 2^8, denormal ones too:
    #   s eeee mmm   ->   s 0 eeee mmm 0000000
    moved = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(0xBFFF - 2**16)
    return moved.view(torch.float16).float().mul_(factor * 256).to(dtype)
