"""Compute log-mel spectrograms of waveforms, by the formula of torchaudio's MelSpectrogram with its defaults.

    waveform [T] --reflected at both ends by window / 2--> frames [1 + T // hop, window], a hop apart
        --Hann window, Fourier transform, |.|^2--> power [frames, window / 2 + 1]
        --triangular filters--> mel bands [mel_bins, frames] --log(max(., floor))-->

The filters are triangles of height 1 between mel_bins + 2 points that are equally spaced on HTK's mel scale, which is
2595 log10(1 + f / 700), from 0 to half of the sample rate.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from onward.trainer.data.schema.columns import Array


def log_mel(wave: Array, *, sample_rate: int, window: int, hop: int, mel_bins: int, floor: float) -> Array:
    """Return the log-mel spectrogram of a waveform [T], T > window / 2: float32 [mel_bins, 1 + T // hop]."""
    # half a window on either side, so that frame i is centred at sample i · hop
    padded = np.pad(wave.astype(np.float64), window // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop]
    power = np.abs(np.fft.rfft(frames * _hann(window), axis=1)) ** 2
    bands = power @ mel_filters(sample_rate, window, mel_bins)
    found: Array = np.log(np.maximum(bands, floor)).T.astype(np.float32)
    return found


@cache
def _hann(window: int) -> Array:
    """Return the periodic Hann window."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)


@cache
def mel_filters(sample_rate: int, window: int, mel_bins: int) -> Array:
    """Return the weights of the frequencies in each mel band: float64 [window // 2 + 1, mel_bins]."""
    frequencies = np.linspace(0.0, sample_rate // 2, window // 2 + 1)
    highest = 2595.0 * np.log10(1.0 + (sample_rate // 2) / 700.0)
    points = 700.0 * (10.0 ** (np.linspace(0.0, highest, mel_bins + 2) / 2595.0) - 1.0)
    # each triangle is the lower of two lines, from its left point up and to its right point down
    rising = (frequencies[:, None] - points[None, :-2]) / np.diff(points)[None, :-1]
    falling = (points[None, 2:] - frequencies[:, None]) / np.diff(points)[None, 1:]
    return np.maximum(0.0, np.minimum(rising, falling))
