"""Recurrent layers computed step by step: any activations, clip, peepholes, coupled gates.

torch has no fused kernel for these; rnn.py uses this file for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from onward.trainer.onnx_import.ops.elementwise import hard_sigmoid
from onward.trainer.onnx_import.ops.gather import reverse_sequence

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
    "hardsigmoid": hard_sigmoid,
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
        names = {tuple(name for name, _, _ in gates) for gates in self.activations}
        usual = names == {STANDARD[self.kind]} or (self.kind == "RNN" and names == {("relu",)})
        plain = self.clip is None and not self.input_forget
        # torch's GRU applies the reset gate after the product with R
        if self.kind == "GRU" and not self.linear_before_reset:
            return False
        return usual and plain


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse each sequence of x [steps, batch, ...]; padding stays at the end."""
    return x.flip(0) if lengths is None else reverse_sequence(x, lengths, batch_axis=1, time_axis=0)


def run_step_by_step(
    layer: Layer, x: Tensor, weights: Sequence[Tensor | None], lengths: Tensor | None, states: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Run step by step, with any activations, clip, peepholes and coupled gates; results as of `run_kernel`."""
    if lengths is not None:  # without reading them on the host, which would wait for the device
        fits = ((lengths >= 0) & (lengths <= x.shape[0])).all()
        torch._assert_async(fits, f"sequence_lens must be 0 to {x.shape[0]}, the number of steps")
    outputs = []
    last = []
    for d, backward in enumerate(layer.directions):
        ordered = reverse(x, lengths) if backward else x
        # the reversed direction runs forward over reversed sequences, and its outputs are reversed back
        mine = [None if weight is None else weight[d] for weight in weights]
        y, ended = _one_direction(layer, d, ordered, mine, lengths, [state[d] for state in states])
        outputs.append(reverse(y, lengths) if backward else y)
        last.append(ended)
    return torch.stack(outputs, 2), [torch.stack(state) for state in zip(*last, strict=True)]


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
    outputs = []
    blank = torch.zeros_like(states[0])
    if lengths is not None:  # the last state of a sequence of no steps is zero, not its initial state
        some = (lengths > 0)[:, None]
        states = [torch.where(some, state, blank) for state in states]
    for t, now in enumerate(projected.unbind(0)):
        new = step(now, *states)
        if lengths is None:
            states = new
            outputs.append(states[0])
        else:
            # a sequence that has ended keeps its last state, while the others of the batch run on
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
        # coupled gates: what is forgotten is what is not taken in
        forget = 1 - i if layer.input_forget else f(peep(forget, p_f, c))
        c = forget * c + i * g(new)
        # the peephole of the output gate sees the new cell, those of the others the old one
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
        # under autocast the gates are in half precision, and the state is not
        return [torch.lerp(new.to(h.dtype), h, z.to(h.dtype))]

    return step


def _rnn_step(layer: Layer, activations: Sequence[Activation], r: Tensor, b: Tensor | None, _: Tensor | None) -> Step:
    f = _activate(layer, activations[0])
    return lambda now, h: [f(now + F.linear(h, r, b))]


_STEPS: dict[str, Callable[..., Step]] = {"LSTM": _lstm_step, "GRU": _gru_step, "RNN": _rnn_step}
