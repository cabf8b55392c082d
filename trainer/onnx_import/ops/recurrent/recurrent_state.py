"""Rules for layers that pass a state from one call to the next: causal convolution, linear attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import Value

Tensor = torch.Tensor


@lower("CausalConvWithState", since=(27,))
def causal_conv(c: Call, x: Value, weight: Value, bias: Value = None, past: Value = None) -> Value:
    activation = c.attr("activation", "none")
    if activation not in ("none", "silu", "swish"):
        raise UnsupportedNode(f"activation={activation!r} is not among ONNX's")
    return c(convolve_after, x, weight, bias, past, activation != "none")


def convolve_after(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its own past.

    x: [batch, channels, steps]; weight: [channels, 1, k]; past and returned state: [batch, channels, k - 1].
    """
    # a kernel of k steps reads k - 1 steps before the first; without a past these are zeros
    kept = weight.shape[2] - 1
    x = F.pad(x, (kept, 0)) if past is None else torch.cat((past.to(x.dtype), x), 2)
    y = F.conv1d(x, weight, bias, groups=weight.shape[0])
    return F.silu(y) if silu else y, x.narrow(2, x.shape[2] - kept, kept)


@lower("LinearAttention", since=(27,))
def linear_attention(
    c: Call,
    query: Value,
    key: Value,
    value: Value,
    past: Value = None,
    decay: Value = None,
    beta: Value = None,
) -> Value:
    rule = c.attr("update_rule", "gated_delta")
    scale = c.attr("scale", 0.0)
    c.attr("chunk_size")  # a hint
    if rule not in ("linear", "gated", "delta", "gated_delta"):
        raise UnsupportedNode(f"update_rule={rule!r} is not among ONNX's")
    lacks_decay = "gated" in rule and decay is None
    lacks_beta = "delta" in rule and beta is None
    if lacks_decay or lacks_beta:
        raise UnsupportedNode(f"update_rule={rule!r} needs {'decay' if decay is None else 'beta'}")
    gates = (decay if "gated" in rule else None, beta if "delta" in rule else None)
    heads = (c.attr("q_num_heads"), c.attr("kv_num_heads"))
    return c(attend_linearly, (query, key, value), past, gates, heads, scale)


def attend_linearly(
    packed: tuple[Tensor, Tensor, Tensor],
    past: Tensor | None,
    gates: tuple[Tensor | None, Tensor | None],
    heads: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend to a state: queries, keys, values [batch, steps, heads x width] -> output of the query heads, last state.

    In each step the state S [batch, heads, key width, value width] becomes exp(decay) S + k v', by the delta rule
    S + beta k (v - S' k)', and the output is S' q.
    """
    q_heads, kv_heads = heads
    query, key, value = packed
    steps = key.shape[:2]
    query = query.reshape(*steps, kv_heads, q_heads // kv_heads, -1)  # [batch, steps, heads, queries of each, width]
    key = key.reshape(*steps, kv_heads, -1)
    value = value.reshape(*steps, kv_heads, -1)
    query = query * (scale or 1 / math.sqrt(key.shape[3]))
    decay, beta = gates
    # the factors of all steps at once; the loop below has the recurrence only
    kept = None if decay is None else decay.reshape(*steps, kv_heads, -1, 1).exp().unbind(1)
    rates = None if beta is None else beta.unsqueeze(3).unbind(1)
    state = query.new_zeros(key.shape[0], kv_heads, key.shape[3], value.shape[3]) if past is None else past
    outputs = []
    for t, (q, k, v) in enumerate(zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)):
        if kept is not None:
            state = state * kept[t]
        if rates is not None:
            # the delta rule stores what the state does not yet return for this key
            v = rates[t] * (v - torch.matmul(k.unsqueeze(2), state).squeeze(2))
        state = state + k.unsqueeze(3) * v.unsqueeze(2)
        outputs.append(torch.matmul(q, state).flatten(1))
    return torch.stack(outputs, 1), state
