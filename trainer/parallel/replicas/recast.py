"""Cast weights again in the backward pass, where ZeRO 3 gathers them in fp32 and autocast computes in half precision.

    forward    weight (fp32 shard) -- all-gather --> weight (fp32) -- cast --> weight (bf16) --> matmul
    saved      by autograd: weight (bf16); with these hooks: a reference to weight (fp32), which FSDP frees
    backward   weight (fp32 shard) -- all-gather --> weight (fp32) -- cast --> weight (bf16) --> matmul

Casting again gives the same bits. Weights that are gathered in half precision (see zero.py) need none of this; left are
those that something reads in fp32 as well, such as an embedding that is also the output head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from onward.trainer.model.weight_casts import forget_casts
from onward.trainer.parallel.pipeline.stage import Chain

VIEWS = {f"{view}Backward0" for view in ("T", "Transpose", "Permute", "View", "UnsafeView", "Unsqueeze", "Squeeze")}
"""Nodes of the autograd graph that change the shape of a tensor and not its memory."""
CASTS = ("ToCopyBackward0", "_CastBackwardBackward")
"""Nodes whose first operand is what was cast: torch's, and that of `half_with_own_backward`."""


def recast_in_backward(chain: Chain, device: torch.device) -> None:
    """Let autograd save a reference to a weight in place of its cast to half precision.

    autocast and `weight_casts` keep the casts until the step ends, and autograd until the backward pass: half the bytes
    of all weights, where ZeRO 3 should need those of one unit.
    """
    hooks = saved_tensors_hooks(_pack, _unpack)
    inside = []

    def enter(chain: nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled() and torch.is_autocast_enabled(device.type):
            hooks.__enter__()
            # `leave` also runs after an error, and must end only what `enter` has begun
            inside.append(True)

    def leave(chain: nn.Module, inputs: object, outputs: object) -> None:
        if inside:
            inside.pop()
            hooks.__exit__()

    chain.register_forward_pre_hook(enter)
    chain.register_forward_hook(leave, always_call=True)
    for unit in chain.units:
        # what is kept refers to the casts, and would keep those of all units until the step ends
        unit.register_forward_hook(lambda unit, inputs, outputs: forget_casts())


@dataclass(frozen=True)
class _Cast:
    """Stands for a weight cast to half precision, or a view of the cast, among autograd's saved tensors."""

    weight: Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _pack(tensor: Tensor) -> Tensor | _Cast:
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        return tensor
    # recognised by the autograd node that made it: a cast whose operand is a parameter
    step = _behind_views(tensor.grad_fn)
    if step is None or step.name() not in CASTS:
        return tensor
    weight = getattr(_behind_views(step.next_functions[0][0]), "variable", None)
    if weight is None or not weight.is_contiguous():
        return tensor
    # the cast has the memory order of the weight, so size, stride and offset describe the view of either
    return _Cast(weight, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())


def _behind_views(step: Node | None) -> Node | None:
    while step is not None and step.name() in VIEWS:
        step = step.next_functions[0][0]
    return step


def _unpack(kept: Tensor | _Cast) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.weight.detach().to(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)
