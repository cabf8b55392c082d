"""Rules for LSTM, GRU and RNN, by torch's fused kernels where they compute the same, else step by step.

ONNX stores the weights of all gates and directions in one W, one R and one B, which are trained as they are. torch
wants another order of the gates, which is made in the graph each time it runs:

    LSTM    ONNX  i o f c    torch  i f c o
    GRU     ONNX  z r h      torch  r z h
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_import.registry import Call, lower
from onward.trainer.onnx_import.values import Value

Tensor = torch.Tensor
Activation = tuple[str, float, float]
"""Name in lower case, alpha, beta."""

STANDARD = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}

# fmt: off
ACTIVATIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "relu": lambda x, alpha, beta: torch.relu(x),
    "tanh": lambda x, alpha, beta: torch.tanh(x),
    "sigmoid": lambda x, alpha, beta: torch.sigmoid(x),
    "affine": lambda x, alpha, beta: alpha * x + beta,
    "leakyrelu": lambda x, alpha, beta: F.leaky_relu(x, alpha),
    "thresholdedrelu": lambda x, alpha, beta: F.threshold(x, alpha, 0.0),
    "scaledtanh": lambda x, alpha, beta: alpha * torch.tanh(beta * x),
    "hardsigmoid": lambda x, alpha, beta: torch.clamp(alpha * x + beta, 0, 1),
    "elu": lambda x, alpha, beta: F.elu(x, alpha),
    "softsign": lambda x, alpha, beta: F.softsign(x),
    "softplus": lambda x, alpha, beta: F.softplus(x),
}
# fmt: on
ALPHA = {"affine": None, "leakyrelu": 0.01, "thresholdedrelu": None, "scaledtanh": None, "hardsigmoid": 0.2, "elu": 1.0}
"""The activations that take an alpha, and its default: None where runtimes disagree on it."""
BETA = {"affine": None, "scaledtanh": None, "hardsigmoid": 0.5}


@dataclass(frozen=True)
class Layer:
    """The attributes of the node."""

    kind: str
    directions: tuple[bool, ...]
    """For each direction, whether it is reversed."""
    activations: tuple[tuple[Activation, ...], ...]
    """For each direction, the activations of its gates."""
    clip: float | None
    input_forget: bool
    linear_before_reset: bool
    batch_first: bool

    @property
    def is_standard(self) -> bool:
        """Whether torch has a kernel for it; peepholes, an operand, are checked when it runs."""
        names = {tuple(name for name, _, _ in each) for each in self.activations}
        usual = names == {STANDARD[self.kind]} or (self.kind == "RNN" and names == {("relu",)})
        plain = self.clip is None and not self.input_forget
        return usual and plain and (self.kind != "GRU" or self.linear_before_reset)


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
        x = x.transpose(0, 1) if first else x
        states = []
        for state in (initial_h, initial_c)[: 2 if self.layer.kind == "LSTM" else 1]:
            zeros = x.new_zeros(w.shape[0], x.shape[1], r.shape[2]) if state is None else state
            states.append(zeros.transpose(0, 1) if first and state is not None else zeros)
        if self.is_standard and peepholes is None:
            y, states = run_kernel(self.layer, x, flat_weights(self.layer, w, r, b), lengths, states)
        else:
            y, states = run_step_by_step(self.layer, x, (w, r, b, peepholes), lengths, states)
        if not first:
            return y.transpose(1, 2), *states
        return y.transpose(0, 1), *[state.transpose(0, 1) for state in states]

    def extra_repr(self) -> str:
        directions = "/".join("reverse" if backward else "forward" for backward in self.layer.directions)
        return f"{self.layer.kind}, {directions}, {'fused' if self.is_standard else 'step by step'}"


# -- torch's kernels


def run_kernel(
    layer: Layer, x: Tensor, flat: list[Tensor], lengths: Tensor | None, states: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """y: [steps, batch, directions, hidden], and the last states; `flat`: see `flat_weights`."""
    kernel: Any = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN": torch.rnn_tanh}[layer.kind]
    if layer.kind == "RNN" and layer.activations[0][0][0] == "relu":
        kernel = torch.rnn_relu
    both, backward = len(layer.directions) == 2, layer.directions == (True,)
    # cuDNN stores what the backward pass needs only with train=True; the numbers are the same
    options = (len(flat) > 2 * len(layer.directions), 1, 0.0, torch.is_grad_enabled(), both)
    # torch's kernels run forward, or both ways; a single reversed direction is a forward one on reversed sequences
    x = reverse(x, lengths) if backward else x
    if lengths is None or x.is_meta:
        y, *last = kernel(x, states if layer.kind == "LSTM" else states[0], flat, *options, False)
    else:
        y, last = _packed(kernel, x, lengths, states, (flat, *options))
    y = y.unflatten(-1, (len(layer.directions), -1))
    return reverse(y, lengths) if backward else y, last


# torch.compile cannot trace it: the number of running sequences in each step depends on data
@torch._disable_dynamo  # type: ignore[attr-defined]
def _packed(
    kernel: Any, x: Tensor, lengths: Tensor, states: list[Tensor], rest: tuple[Any, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Run sequences of different lengths without computing their padding."""
    # torch refuses a sequence of no steps: it is computed with one step, and overwritten with zeros
    steps = lengths.to("cpu", torch.int64)
    # packed: the kernel takes, for each step, only the sequences that have not ended
    packed = nn.utils.rnn.pack_padded_sequence(x, steps.clamp(min=1), enforce_sorted=False)
    order, back = packed.sorted_indices, packed.unsorted_indices
    assert order is not None
    assert back is not None
    sorted_states = [state.index_select(1, order) for state in states]
    hidden = sorted_states if len(states) == 2 else sorted_states[0]
    data, *last = kernel(packed.data, packed.batch_sizes, hidden, *rest)
    y, _ = nn.utils.rnn.pad_packed_sequence(packed._replace(data=data), total_length=x.shape[0])
    last = [state.index_select(1, back) for state in last]
    if bool((steps == 0).any()):
        empty = (lengths == 0).to(x.device)[:, None]
        return y.masked_fill(empty, 0.0), [state.masked_fill(empty, 0.0) for state in last]
    return y, last


def flat_weights(layer: Layer, w: Tensor, r: Tensor, b: Tensor | None) -> list[Tensor]:
    """Return w, r and both biases of each direction, with the gates in torch's order."""
    hidden = r.shape[2]
    parts: list[Sequence[Tensor]] = [_reordered(layer.kind, weight, hidden).unbind(0) for weight in (w, r)]
    if b is not None:
        parts += [_reordered(layer.kind, half, hidden).unbind(0) for half in b.chunk(2, 1)]
    if w.is_cuda:  # cuDNN reads one block of memory, matrices first; otherwise it copies at each call, with a warning
        parts = _views_of_one_block(parts[:2], parts[2:])
    return [part[d] for d in range(w.shape[0]) for part in parts]


def _views_of_one_block(*groups: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Copy tensors into one block of memory and return views of it: by group, then by direction."""
    order = [one for group in groups for direction in zip(*group, strict=True) for one in direction]
    memory = torch.split(torch.cat([one.reshape(-1) for one in order]), [one.numel() for one in order])
    views = iter(part.view(one.shape) for part, one in zip(memory, order, strict=True))
    found: list[Sequence[Tensor]] = []
    for group in groups:
        directions = [[next(views) for _ in group] for _ in (group[0] if group else ())]
        found += [list(each) for each in zip(*directions, strict=True)]
    return found


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


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse each sequence of x [steps, batch, ...]; padding stays at the end."""
    if lengths is None:
        return x.flip(0)
    step = torch.arange(x.shape[0], device=x.device)[:, None]
    source = torch.where(step < lengths, lengths - 1 - step, step).to(torch.int64)
    return x.gather(0, source.reshape(*source.shape, *[1] * (x.ndim - 2)).expand_as(x))


# -- step by step


def run_step_by_step(
    layer: Layer, x: Tensor, weights: Sequence[Tensor | None], lengths: Tensor | None, states: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Run step by step, with any activations, clip, peepholes and coupled gates; results as of `run_kernel`."""
    outputs, last = [], []
    for d, backward in enumerate(layer.directions):
        ordered = reverse(x, lengths) if backward else x
        mine = [None if weight is None else weight[d] for weight in weights]
        y, ended = _one_direction(layer, d, ordered, mine, lengths, [state[d] for state in states])
        outputs.append(reverse(y, lengths) if backward else y)
        last.append(ended)
    return torch.stack(outputs, 2), [torch.stack(each) for each in zip(*last, strict=True)]


def _one_direction(
    layer: Layer, d: int, x: Tensor, weights: list[Tensor | None], lengths: Tensor | None, states: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    w, r, b, *rest = weights
    assert w is not None
    assert r is not None
    of_input, of_state = (None, None) if b is None else b.chunk(2)
    projected = F.linear(x, w, of_input)  # all steps in one product
    step = _STEPS[layer.kind](layer, layer.activations[d], r, of_state, rest[0] if rest else None)
    # outputs after the end of a sequence are zero, by ONNX
    outputs, blank = [], torch.zeros_like(states[0])
    if lengths is not None:  # the last state of a sequence of no steps is zero, not its initial state
        some = (lengths > 0)[:, None]
        states = [torch.where(some, state, blank) for state in states]
    for t, now in enumerate(projected.unbind(0)):
        new = step(now, *states)
        if lengths is None:
            states = new
            outputs.append(states[0])
        else:
            goes_on = (t < lengths)[:, None]
            states = [torch.where(goes_on, one, old) for one, old in zip(new, states, strict=True)]
            outputs.append(torch.where(goes_on, states[0], blank))
    return (torch.stack(outputs) if outputs else projected.new_zeros(0, *blank.shape)), states


Step = Callable[..., list[Tensor]]


def _activate(layer: Layer, activation: Activation) -> Callable[[Tensor], Tensor]:
    name, alpha, beta = activation
    function = ACTIVATIONS[name]
    limit = layer.clip
    if limit is None:
        return lambda x: function(x, alpha, beta)
    return lambda x: function(x.clamp(-limit, limit), alpha, beta)


def _lstm_step(layer: Layer, activations: Sequence[Activation], r: Tensor, b: Tensor | None, p: Tensor | None) -> Step:
    f, g = [_activate(layer, activation) for activation in activations[:2]]
    name, alpha, beta = activations[2]  # of the cell, which is not clipped
    p_i, p_o, p_f = (None, None, None) if p is None else p.chunk(3)

    def peep(gate: Tensor, weight: Tensor | None, cell: Tensor) -> Tensor:
        return gate if weight is None else gate + weight * cell

    def step(now: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        i, o, forget, new = (now + F.linear(h, r, b)).chunk(4, -1)
        i = f(peep(i, p_i, c))
        forget = 1 - i if layer.input_forget else f(peep(forget, p_f, c))
        c = forget * c + i * g(new)
        return [f(peep(o, p_o, c)) * ACTIVATIONS[name](c, alpha, beta), c]

    return step


def _gru_step(layer: Layer, activations: Sequence[Activation], r: Tensor, b: Tensor | None, _: Tensor | None) -> Step:
    f, g = [_activate(layer, activation) for activation in activations]
    hidden = r.shape[1]
    gates, last = torch.split(r, [2 * hidden, hidden])
    gate_bias, last_bias = (None, None) if b is None else torch.split(b, [2 * hidden, hidden])

    def step(now: Tensor, h: Tensor) -> list[Tensor]:
        first, new = torch.split(now, [2 * hidden, hidden], -1)
        z, reset = f(first + F.linear(h, gates, gate_bias)).chunk(2, -1)
        if layer.linear_before_reset:
            new = g(new + reset * F.linear(h, last, last_bias))
        else:
            new = g(new + F.linear(reset * h, last, last_bias))
        return [torch.lerp(new, h, z)]

    return step


def _rnn_step(layer: Layer, activations: Sequence[Activation], r: Tensor, b: Tensor | None, _: Tensor | None) -> Step:
    f = _activate(layer, activations[0])
    return lambda now, h: [f(now + F.linear(h, r, b))]


_STEPS: dict[str, Callable[..., Step]] = {"LSTM": _lstm_step, "GRU": _gru_step, "RNN": _rnn_step}

# -- the rule


@lower("LSTM", "GRU", "RNN", since=(7, 14, 22))
def recurrent(c: Call, x: Value, w: Value, r: Value, b: Value = None, *rest: Value) -> Value:
    c.attr("hidden_size")  # R has it
    directions = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[
        c.attr("direction", "forward")
    ]
    layer = Layer(
        kind=c.op,
        directions=directions,
        activations=_activations(c, len(directions)),
        clip=c.attr("clip"),
        input_forget=c.op == "LSTM" and bool(c.attr("input_forget", 0)),
        linear_before_reset=c.op == "GRU" and bool(c.attr("linear_before_reset", 0)),
        batch_first=bool(c.attr("layout", 0)),
    )
    return c.module(Recurrence(layer), x, w, r, b, *rest)


def _activations(c: Call, directions: int) -> tuple[tuple[Activation, ...], ...]:
    """Return (name, alpha, beta) of each gate; alphas and betas are listed only for activations that take one."""
    usual = STANDARD[c.op]
    names = [name.lower() for name in c.attr("activations") or usual * directions]
    alphas, betas = iter(c.attr("activation_alpha") or ()), iter(c.attr("activation_beta") or ())
    if unknown := sorted(set(names) - set(ACTIVATIONS)):
        raise UnsupportedNode(f"activation {', '.join(unknown)} is not among ONNX's")
    if len(names) != len(usual) * directions:
        raise UnsupportedNode(f"it has {len(names)} activations, and needs {len(usual) * directions}")
    found = tuple((name, _given(name, alphas, ALPHA), _given(name, betas, BETA)) for name in names)
    return tuple(found[len(usual) * d : len(usual) * (d + 1)] for d in range(directions))


def _given(name: str, values: Iterator[float], defaults: Mapping[str, float | None]) -> float:
    if name not in defaults:
        return 0.0
    value = next(values, defaults[name])
    if value is None:
        raise UnsupportedNode(
            f"its activation {name} needs activation_alpha and activation_beta: runtimes disagree on their defaults"
        )
    return value
