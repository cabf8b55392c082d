"""Rules for LSTM, GRU and RNN, by torch's fused kernels where they compute the same, else step by step.

ONNX stores the weights of all gates and directions in one W, one R and one B, which are trained as they are. torch
wants another order of the gates, which is made in the graph each time it runs:

    LSTM    ONNX  i o f c    torch  i f c o
    GRU     ONNX  z r h      torch  r z h
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.fixed_batch.batch_constants import one_row
from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.ops.recurrent.recurrent_steps import (
    ACTIVATIONS,
    ALPHA,
    BETA,
    STANDARD,
    Activation,
    Layer,
    reverse,
    run_step_by_step,
)
from onward.trainer.onnx_import.tracing.values import Traced, Value

Tensor = torch.Tensor
STATES = ("initial_h", "initial_c")
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


class Recurrence(nn.Module):
    """Run a recurrent layer whose W, R, B, P and initial states are operands."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.is_standard = layer.is_standard

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        r: Tensor,
        b: Tensor | None = None,
        lengths: Tensor | None = None,
        initial_h: Tensor | None = None,
        initial_c: Tensor | None = None,
        peepholes: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """x: [steps, batch, features]; w: [directions, gates x hidden, features]; r: [.., hidden];
        b: [directions, 2 x gates x hidden]; lengths: [batch]; states: [directions, batch, hidden].

        Returns Y [steps, directions, batch, hidden], Y_h, and of an LSTM Y_c [directions, batch, hidden]. With
        `batch_first` the batch comes first in x, Y and the states.
        """
        first = self.layer.batch_first
        given = [initial_h, initial_c][: 2 if self.layer.kind == "LSTM" else 1]
        if first:
            x = x.transpose(0, 1)
            given = [None if state is None else state.transpose(0, 1) for state in given]
        named = dict(zip(STATES, given, strict=False))  # only an LSTM has initial_c
        check_operands(self.layer, x, w, r, B=b, sequence_lens=lengths, P=peepholes, **named)
        states = [x.new_zeros(w.shape[0], x.shape[1], r.shape[2]) if state is None else state for state in given]
        # only shapes are asked for: torch's kernels make a dozen calls in Python for each step, also without numbers
        if x.is_meta and not any(operand.requires_grad for operand in (x, w, r)):
            y = x.new_empty(*x.shape[:2], w.shape[0], r.shape[2])
        elif self.is_standard and peepholes is None:
            y, states = run_kernel(self.layer, x, flat_weights(self.layer, w, r, b), lengths, states)
        else:
            y, states = run_step_by_step(self.layer, x, (w, r, b, peepholes), lengths, states)
        if not first:
            return y.transpose(1, 2), *states
        return y.transpose(0, 1), *[state.transpose(0, 1) for state in states]

    def extra_repr(self) -> str:
        directions = "/".join("reverse" if backward else "forward" for backward in self.layer.directions)
        return f"{self.layer.kind}, {directions}, {'fused' if self.is_standard else 'step by step'}"


class QuantizedRecurrence(Recurrence):
    """Run an LSTM whose W and R are integers [directions, features or hidden, gates x hidden], dequantized each time.

    The integers stay in memory, 1 byte each; W and R in fp32 exist from the forward to the backward pass.
    """

    def forward(self, x: Tensor, w: Tensor, r: Tensor, scales: Sequence[Tensor], *rest: Tensor | None) -> Any:  # type: ignore[override]
        """scales: scale and zero point of w, then of r, [directions] or [directions, gates x hidden]."""
        w_scale, w_zero, r_scale, r_zero = scales
        return super().forward(x, dequantize_gates(w, w_scale, w_zero), dequantize_gates(r, r_scale, r_zero), *rest)


def dequantize_gates(integers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return weights [directions, gates x hidden, columns] of integers [directions, columns, gates x hidden]."""
    scale, zero = (of.reshape(of.shape[0], 1, -1) for of in (scale, zero))
    return ((integers.to(scale.dtype) - zero.to(scale.dtype)) * scale).transpose(1, 2).contiguous()


def check_operands(layer: Layer, x: Tensor, w: Tensor, r: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError unless the shape and type of every operand fit x [steps, batch, features] and r.

    torch's kernels do not check them all, and read or write beyond an operand that is smaller than they expect.
    """
    if x.ndim != 3 or r.ndim != 3:
        raise ValueError(
            f"the {layer.kind} has an input of shape {list(x.shape)} and R of shape {list(r.shape)}, and both need 3 "
            "dimensions"
        )
    (steps, batch, features), directions, hidden = x.shape, len(layer.directions), r.shape[2]
    rows = GATES[layer.kind] * hidden
    needed = {
        "W": (directions, rows, features),
        "R": (directions, rows, hidden),
        "B": (directions, 2 * rows),
        "P": (directions, 3 * hidden),
        "sequence_lens": (batch,),
        **dict.fromkeys(STATES, (directions, batch, hidden)),
    }
    for name, operand in {"W": w, "R": r, **others}.items():
        if operand is None:
            continue
        if tuple(operand.shape) != needed[name]:
            # a state of another batch is the most likely mistake: that of the exporter's example
            stored = operand.shape[1] if name in STATES and operand.ndim == 3 else batch
            remedy = f"; it fits batches of {stored}: feed these, or export the file with a dynamic batch"
            raise ValueError(
                f"{name} of the {layer.kind} has shape {list(operand.shape)}, but an input of {steps} steps, batch "
                f"{batch} and {features} features, with R {list(r.shape)}, needs {list(needed[name])}"
                f"{remedy if stored != batch else ''}"
            )
        # under autocast torch casts the operands of its kernels
        mixed = name != "sequence_lens" and operand.dtype != x.dtype
        if mixed and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"{name} of the {layer.kind} is {operand.dtype}, but its input is {x.dtype}")


# -- torch's kernels


def run_kernel(
    layer: Layer, x: Tensor, flat: list[Tensor], lengths: Tensor | None, states: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """y: [steps, batch, directions, hidden], and the last states; `flat`: see `flat_weights`."""
    kernel: Any = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN": torch.rnn_tanh}[layer.kind]
    if layer.kind == "RNN" and layer.activations[0][0][0] == "relu":
        kernel = torch.rnn_relu
    both = len(layer.directions) == 2
    backward = layer.directions == (True,)
    # cuDNN stores what the backward pass needs only with train=True; the numbers are the same
    options = (len(flat) > 2 * len(layer.directions), 1, 0.0, torch.is_grad_enabled(), both)
    # torch's kernels run forward, or both ways; a single reversed direction is a forward one on reversed sequences
    steps = None if lengths is None or x.is_meta else _on_host(lengths, x.shape[0])
    x = reverse(x, lengths) if backward else x
    # cuDNN takes no other; a state that the graph expands to the batch has strides of 0
    states = [state.contiguous() for state in states]
    if steps is None:
        y, *last = kernel(x, states if layer.kind == "LSTM" else states[0], flat, *options, False)
    else:
        y, last = _packed(kernel, x, steps, states, (flat, *options))
    y = y.unflatten(-1, (len(layer.directions), -1))
    return reverse(y, lengths) if backward else y, last


@torch._disable_dynamo  # type: ignore[attr-defined]
def _on_host(lengths: Tensor, steps: int) -> Tensor:
    """Return the lengths of sequences on the host. Raises ValueError if one does not fit the number of steps."""
    on_host = lengths.to("cpu", torch.int64)
    # torch packs sequences that are longer than the input without an error, and its kernels then read beyond it
    if on_host.numel() and not 0 <= int(on_host.min()) <= int(on_host.max()) <= steps:
        raise ValueError(f"sequence_lens holds {on_host.tolist()}, but the input has {steps} steps")
    return on_host


# torch.compile cannot trace it: the number of running sequences in each step depends on data
@torch._disable_dynamo  # type: ignore[attr-defined]
def _packed(
    kernel: Any, x: Tensor, steps: Tensor, states: list[Tensor], rest: tuple[Any, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Run sequences of different lengths without computing their padding; `steps`: the lengths, on the host."""
    # torch refuses a sequence of no steps: it is computed with one step, and overwritten with zeros
    # packed: the kernel takes, for each step, only the sequences that have not ended
    packed = nn.utils.rnn.pack_padded_sequence(x, steps.clamp(min=1), enforce_sorted=False)
    order = packed.sorted_indices
    back = packed.unsorted_indices
    assert order is not None
    assert back is not None
    sorted_states = [state.index_select(1, order) for state in states]
    hidden = sorted_states if len(states) == 2 else sorted_states[0]
    # packing sorts the sequences by length; states go in and come out in that order
    data, *last = kernel(packed.data, packed.batch_sizes, hidden, *rest)
    y, _ = nn.utils.rnn.pad_packed_sequence(packed._replace(data=data), total_length=x.shape[0])
    last = [state.index_select(1, back) for state in last]
    if bool((steps == 0).any()):
        empty = (steps == 0).to(x.device)[:, None]
        return y.masked_fill(empty, 0.0), [state.masked_fill(empty, 0.0) for state in last]
    return y, last


def flat_weights(layer: Layer, w: Tensor, r: Tensor, b: Tensor | None) -> list[Tensor]:
    """Return w, r and both biases of each direction, with the gates in torch's order.

    w: [directions, gates x hidden, features]; r: [.., hidden]; b: [directions, 2 x gates x hidden]. Returns for each
    direction w, r and, with b, two biases [gates x hidden].
    """
    hidden = r.shape[2]
    # ONNX orders the gates i, o, f, c (LSTM) and z, r, h (GRU); torch i, f, g, o and r, z, n
    parts: list[Sequence[Tensor]] = [_reordered(layer.kind, weight, hidden).unbind(0) for weight in (w, r)]
    if b is not None:
        parts += [_reordered(layer.kind, half, hidden).unbind(0) for half in b.chunk(2, 1)]
    if w.is_cuda:  # cuDNN reads one block of memory, matrices first; otherwise it copies at each call, with a warning
        parts = _views_of_one_block(parts[:2], parts[2:])
    return [part[d] for d in range(w.shape[0]) for part in parts]


def _views_of_one_block(*groups: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Copy tensors into one block of memory and return views of it: by group, then by direction."""
    order: list[Tensor] = []
    for group in groups:
        for direction in zip(*group, strict=True):
            order += direction
    memory = torch.split(torch.cat([tensor.reshape(-1) for tensor in order]), [tensor.numel() for tensor in order])
    views = iter(part.view(tensor.shape) for part, tensor in zip(memory, order, strict=True))
    # taken from the block in the order in which they were laid there, and grouped as they came
    parts: list[Sequence[Tensor]] = []
    for group in groups:
        num_directions = len(group[0]) if group else 0
        directions = [[next(views) for _ in group] for _ in range(num_directions)]
        parts += [list(part) for part in zip(*directions, strict=True)]
    return parts


def _reordered(kind: str, weight: Tensor, hidden: int) -> Tensor:
    """Return [directions, gates x hidden, ...] in torch's order of gates.

    One split and one concatenation, so that the backward pass is as small.
    """
    if kind == "LSTM":
        i, o, fc = torch.split(weight, [hidden, hidden, 2 * hidden], 1)
        return torch.cat((i, fc, o), 1)
    if kind == "GRU":
        z, reset, new = torch.split(weight, hidden, 1)
        return torch.cat((reset, z, new), 1)
    return weight


# -- the rule


@lower("LSTM", "GRU", "RNN", since=(7, 14, 22))
def recurrent(c: Call, x: Value, w: Value, r: Value, b: Value = None, *rest: Value) -> Value:
    layer = _layer(c, c.op)
    states = [_of_any_batch(c, layer, x, state) for state in rest[1:3]]
    return c.module(Recurrence(layer), x, w, r, b, *rest[:1], *states, *rest[3:])


@lower("com.microsoft.DynamicQuantizeLSTM", since=(1,))
def dynamic_quantize_lstm(
    c: Call,
    x: Value,
    w: Value,
    r: Value,
    b: Value,
    lengths: Value,
    initial_h: Value,
    initial_c: Value,
    peepholes: Value,
    *scales: Value,
) -> Value:
    """Lower as LSTM with frozen 8-bit weights; what onnxruntime rounds of x and h is not rounded here."""
    layer = _layer(c, "LSTM")
    states = [_of_any_batch(c, layer, x, state) for state in (initial_h, initial_c)]
    return c.module(QuantizedRecurrence(layer), x, w, r, scales, b, lengths, *states, peepholes)


def _layer(c: Call, kind: str) -> Layer:
    c.attr("hidden_size")  # R has it
    directions = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[
        c.attr("direction", "forward")
    ]
    return Layer(
        kind=kind,
        directions=directions,
        activations=_activations(c, kind, len(directions)),
        clip=c.attr("clip"),
        input_forget=kind == "LSTM" and bool(c.attr("input_forget", 0)),
        linear_before_reset=kind == "GRU" and bool(c.attr("linear_before_reset", 0)),
        batch_first=bool(c.attr("layout", 0)),
    )


def _of_any_batch(c: Call, layer: Layer, x: Value, state: Value) -> Value:
    """Expand a constant initial state to the batch size of x, if it is the same for every row of its own batch.

        stored initial_h [1, 2, 6]: two equal rows    ->    expand([1, 1, 6], 1, size(x, 1), 6)

    An exporter that is given a fixed batch size stores the zeros of that many rows. A state of different rows is left
    as it is, and holds only for its own batch size (`check_operands`).
    """
    batch_dim = 0 if layer.batch_first else 1
    # a weight that is trained is traced as well; it is expanded where the file's batch is treated as dynamic
    is_known = c.batch is not None and isinstance(state, Traced) and state.known
    if c.eager or not (isinstance(state, Tensor) or is_known):
        return state
    if state.ndim != 3 or not isinstance(size := c.size(x, batch_dim), Traced):
        return state
    # of a trained state, `one_row` returns a row that collects the gradients of all rows
    row = one_row(c, state, batch_dim)
    if c.size(row, batch_dim) != 1:
        return state
    return c("expand", row, [size if dim == batch_dim else -1 for dim in range(3)])


def _activations(c: Call, kind: str, directions: int) -> tuple[tuple[Activation, ...], ...]:
    """Return (name, alpha, beta) of each gate; alphas and betas are listed only for activations that take one."""
    usual = STANDARD[kind]
    names = [name.lower() for name in c.attr("activations") or usual * directions]
    # one list for all gates of all directions, from which each activation takes what it needs, in order
    alphas = iter(c.attr("activation_alpha") or ())
    betas = iter(c.attr("activation_beta") or ())
    if unknown := sorted(set(names) - set(ACTIVATIONS)):
        raise UnsupportedNode(f"activation {', '.join(unknown)} is not among ONNX's")
    if len(names) != len(usual) * directions:
        raise UnsupportedNode(f"it has {len(names)} activations, and needs {len(usual) * directions}")
    activations = tuple((name, _given(name, alphas, ALPHA), _given(name, betas, BETA)) for name in names)
    return tuple(activations[len(usual) * d : len(usual) * (d + 1)] for d in range(directions))


def _given(name: str, values: Iterator[float], defaults: Mapping[str, float | None]) -> float:
    if name not in defaults:
        return 0.0
    value = next(values, defaults[name])
    if value is None:
        raise UnsupportedNode(
            f"its activation {name} needs activation_alpha and activation_beta: runtimes disagree on their defaults"
        )
    return value
