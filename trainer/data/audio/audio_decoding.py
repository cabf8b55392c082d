"""Decode an audio file to one channel of a given sample rate, with soundfile (libsndfile) and scipy."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from onward.trainer.bounds import AUDIO_RATE, AUDIO_SAMPLES
from onward.trainer.data.schema.columns import Array
from onward.trainer.errors import ConfigError
from onward.trainer.extras import how_to_install

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".oga", ".aiff", ".mp3")


BLOCK_SAMPLES = 1 << 20


class NotAudio(Exception):
    """Why content cannot be decoded, as a clause after "it"."""


def refuse_missing_package() -> None:
    """Raise ConfigError if soundfile is not installed."""
    if importlib.util.find_spec("soundfile") is None:
        raise ConfigError(f"[data.audio] needs soundfile, which is not installed: {how_to_install('audio')}")


def decode_audio(content: bytes, sample_rate: int) -> Array:
    """Return the mean of the channels at the sample rate: float32 [T]. Raises NotAudio.

    Integers are scaled to -1..1. Other rates are resampled with a polyphase filter (scipy.signal.resample_poly).
    """
    import soundfile  # imported here: only sharding needs it

    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            rate = file.samplerate
            count = file.frames
            # silence is compressed to next to nothing, and a header may state any length
            if count > AUDIO_SAMPLES.most:
                raise NotAudio(f"has {AUDIO_SAMPLES.exceeded(count)}")
            if rate > AUDIO_RATE.most:
                raise NotAudio(f"states {AUDIO_RATE.exceeded(rate)}")
            if (resampled := count * sample_rate // rate) > AUDIO_SAMPLES.most:
                raise NotAudio(f"has, at {sample_rate} Hz, {AUDIO_SAMPLES.exceeded(resampled)}")
            # one channel in one array: a list of blocks would take the memory twice when it is joined
            wave: Array = np.empty(count, np.float32)
            read = 0
            is_finite = True
            for block in _blocks(file):
                channel = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)
                is_finite &= bool(np.isfinite(channel).all())
                wave[read : read + len(block)] = channel
                read += len(block)
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError, MemoryError) as error:
        raise NotAudio(f"is no audio that libsndfile reads: {error}") from None
    # a damaged file may have fewer samples than its header states
    wave = wave[:read]
    if not len(wave):
        raise NotAudio("holds no sample")
    if not is_finite:
        raise NotAudio("holds samples that are not finite")
    if rate != sample_rate:
        from scipy.signal import resample_poly  # imported here: it takes a second

        # a polyphase filter takes a ratio in lowest terms
        common = math.gcd(rate, sample_rate)
        wave = resample_poly(wave, sample_rate // common, rate // common).astype(np.float32)
    return wave


def _blocks(file: Any) -> Iterator[Array]:
    """Yield the samples of an open file, float32 [n, channels], some seconds at a time."""
    while len(block := file.read(BLOCK_SAMPLES, dtype="float32", always_2d=True)):
        yield block


def fit_length(wave: Array, length: int) -> Array:
    """Return the middle `length` samples of a waveform [T], or all of them with zeros behind; 0 = it as it is."""
    if not length or len(wave) == length:
        return wave
    if len(wave) > length:
        first = (len(wave) - length) // 2
        return wave[first : first + length]
    return np.pad(wave, (0, length - len(wave)))
