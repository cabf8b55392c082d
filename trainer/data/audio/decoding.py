"""Decode an audio file to one channel of a given sample rate, with soundfile (libsndfile) and scipy."""

from __future__ import annotations

import importlib.util
import io
import math

import numpy as np

from onward.trainer.data.columns import Array
from onward.trainer.errors import ConfigError

AUDIO_FORMATS = dict.fromkeys((".wav", ".flac", ".ogg", ".oga", ".aiff", ".mp3"), "audio")
"""Formats that `data.format = "auto"` finds where there is a table [data.audio]."""


class NotAudio(Exception):
    """Why content cannot be decoded, as a clause after "it"."""


def refuse_missing_package() -> None:
    """Raise ConfigError if soundfile is not installed."""
    if importlib.util.find_spec("soundfile") is None:
        raise ConfigError("[data.audio] needs soundfile, which is not installed: pip install soundfile")


def decode_audio(content: bytes, sample_rate: int) -> Array:
    """Return the mean of the channels at the sample rate: float32 [T]. Raises NotAudio.

    Integers are scaled to -1..1. Other rates are resampled with a polyphase filter (scipy.signal.resample_poly).
    """
    import soundfile  # imported here: only sharding needs it

    try:
        samples, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise NotAudio(f"is no audio that libsndfile reads: {error}") from None
    if not len(samples):
        raise NotAudio("holds no sample")
    wave: Array = samples.mean(axis=1, dtype=np.float32)
    if not np.isfinite(wave).all():
        raise NotAudio("holds samples that are not finite")
    if rate != sample_rate:
        from scipy.signal import resample_poly  # imported here: it takes a second

        common = math.gcd(rate, sample_rate)
        wave = resample_poly(wave, sample_rate // common, rate // common).astype(np.float32)
    return wave


def fit_length(wave: Array, length: int) -> Array:
    """Return the middle `length` samples of a waveform [T], or all of them with zeros behind; 0 = it as it is."""
    if not length or len(wave) == length:
        return wave
    if len(wave) > length:
        first = (len(wave) - length) // 2
        return wave[first : first + length]
    return np.pad(wave, (0, length - len(wave)))
