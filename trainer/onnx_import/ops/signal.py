"""Rules for Fourier transforms (DFT, STFT), windows and MelWeightMatrix."""

from __future__ import annotations

import math

import torch

from onward.trainer.onnx_import.lowering.converter_table import Call, lower
from onward.trainer.onnx_import.tracing.values import Traced, Value

Tensor = torch.Tensor

# -- transforms; the last dimension is [real] or [real, imaginary]


@lower("DFT", since=(17, 20))
def dft(c: Call, x: Value, length: Value = None, axis: Value = None) -> Value:
    # version 20 has made the axis an operand, and counts it from the end by default
    where = c.attr("axis", 1 if c.version < 20 else -2) if axis is None else int(c.number(axis))
    size = None if length is None else c.ints(length)[0]
    return c(transform, x, size, c.axis(x, where), bool(c.attr("inverse", 0)), bool(c.attr("onesided", 0)))


def transform(x: Tensor, length: int | None, axis: int, inverse: bool, onesided: bool) -> Tensor:
    """Transform along `axis`, cropped or padded to `length`: [..., 1 or 2] -> [..., 2], of a onesided inverse [..., 1].

    onesided: the length // 2 + 1 distinct frequencies.
    """
    # of a real signal the missing frequencies are the conjugates of those that are there
    if inverse and onesided:
        return torch.unsqueeze(torch.fft.irfft(as_complex(x), length, axis), -1)
    if onesided:
        if x.shape[-1] == 2:
            raise ValueError("onesided is for real signals, and this one is complex")
        return torch.view_as_real(torch.fft.rfft(x[..., 0], length, axis))
    # torch's inverse divides by the length, as ONNX's does; the forward transform does not
    function = torch.fft.ifft if inverse else torch.fft.fft
    return torch.view_as_real(function(as_complex(x), length, axis))


def as_complex(x: Tensor) -> Tensor:
    """Convert [..., 1 or 2] to complex numbers [...]."""
    # a last dimension of 1 is a real signal, whose imaginary part is zero
    return torch.complex(x[..., 0], x[..., 1] if x.shape[-1] == 2 else torch.zeros_like(x[..., 0]))


@lower("STFT", since=(17,))
def stft(c: Call, signal: Value, step: Value, window: Value = None, length: Value = None) -> Value:
    # the frame length is an operand, else that of the window, else that of the signal
    size = c.size(signal, 1) if window is None else c.size(window, 0)
    size = size if length is None else c.ints(length)[0]
    return c(frames_transformed, signal, window, c.ints(step)[0], size, bool(c.attr("onesided", 1)))


def frames_transformed(signal: Tensor, window: Tensor | None, step: int, length: int, onesided: bool) -> Tensor:
    """Transform windowed frames: signal [batch, samples, 1 or 2] -> [batch, frames, frequencies, 2]."""
    frames = signal.unfold(1, length, step).transpose(2, 3)  # [batch, frames, samples of one, 1 or 2]
    # the window broadcasts over batch, frames and the parts of a complex number
    if window is not None:
        frames = frames * window[:, None]
    return transform(frames, None, 2, False, onesided)


# -- windows

WINDOWS = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}
"""Operator -> (a, b, c) of a - b cos(t) + c cos(2t), for t from 0 to 2 pi."""


@lower("HannWindow", "HammingWindow", "BlackmanWindow", since=(17,))
def window(c: Call, size: Value) -> Value:
    periodic = bool(c.attr("periodic", 1))
    dtype = c.dtype(c.attr("output_datatype", 1))
    length = c.ints(size)[0]
    # of a dynamic length the window is made when the graph runs, on the device that the anchor is on
    anchor = c.tracer.anchor if isinstance(length, Traced) else torch.empty(0)
    return c(cosine_window, anchor, length, WINDOWS[c.op], periodic, dtype)


def cosine_window(
    anchor: Tensor, size: int, weights: tuple[float, float, float], periodic: bool, dtype: torch.dtype
) -> Tensor:
    """Return a window [size]; symmetric unless it is periodic."""
    # a periodic window is a symmetric one of size + 1 without its last element
    turn = 2 * math.pi / (size if periodic else max(size - 1, 1))
    # in fp64, so that the window is rounded once
    t = torch.arange(size, dtype=torch.float64, device=anchor.device) * turn
    a, b, c = weights
    return (a - b * torch.cos(t) + c * torch.cos(2 * t)).to(dtype)


# -- mel scale


@lower("MelWeightMatrix", since=(17,))
def mel_weight_matrix(c: Call, num_mels: Value, dft_length: Value, rate: Value, low: Value, high: Value) -> Value:
    mels, length, samples = (int(c.number(value)) for value in (num_mels, dft_length, rate))
    matrix = mel_triangles(mels, length, samples, (float(c.number(low)), float(c.number(high))))
    return matrix.to(c.dtype(c.attr("output_datatype", 1)))


def mel_triangles(num_mels: int, dft_length: int, rate: int, ends: tuple[float, float]) -> Tensor:
    """Return [dft_length // 2 + 1, num_mels]: column i rises from mel edge i to 1 at i + 1, falls to i + 2."""
    # m = 2595 log10(1 + f / 700) is the mel scale of the operator's text
    first, last = (2595 * math.log10(1 + hertz / 700) for hertz in ends)
    # the edges are equally far apart in mel; each triangle spans two of these distances
    step = (last - first) / (num_mels + 2)
    hertz = (700 * (10 ** ((first + i * step) / 2595) - 1) for i in range(num_mels + 2))
    # edges are rounded down to bins, as ONNX defines them
    edges = [int((dft_length + 1) * value // rate) for value in hertz]
    matrix = torch.zeros(dft_length // 2 + 1, num_mels)
    for i, (left, peak, right) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        # set first, since edges that fall into one bin would leave a triangle without any
        matrix[peak, i] = 1
        for bin_ in range(left, peak):
            matrix[bin_, i] = (bin_ - left) / (peak - left)
        for bin_ in range(peak, right):
            matrix[bin_, i] = (right - bin_) / (right - peak)
    return matrix
