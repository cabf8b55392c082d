"""Decode a column of audio files while shards are written: a waveform or a log-mel spectrogram for each row.

audio    bytes of a .flac file, 44,100 Hz, stereo, 2.1 s
             | one channel, 16,000 Hz, the middle second
stored   float32 [16000], or float32 [80, 101] (log-mel)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

import numpy as np

from onward.trainer.config.sections.audio import AudioConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.audio.audio_decoding import NotAudio, decode_audio, fit_length, refuse_missing_package
from onward.trainer.data.schema.columns import BYTES, Array, Column, ColumnType, Schema, Values
from onward.trainer.data.schema.fitted import FittedComputer
from onward.trainer.errors import ConfigError, DataError


def open_audio(data: DataConfig, schema: Schema) -> list[AudioClips]:
    """Return a computer for the column of [data.audio]; [] without that table.

    `schema` describes the columns of the source. Raises ConfigError for a column that is not there or holds numbers,
    and without the package soundfile.
    """
    audio = data.audio
    if audio is None:
        return []
    refuse_missing_package()
    column = schema.get(audio.column)
    if column is None or column.holds_numbers:
        what = f"holds {column.kind}" if column else f"is not there, only {', '.join(schema)}"
        raise ConfigError(f"data.audio.column {audio.column!r} {what}; name a column of audio files or their paths")
    return [AudioClips(audio)]


class AudioClips(FittedComputer):
    """Computes the waveforms or spectrograms of one column of audio files, in its place."""

    def __init__(self, config: AudioConfig) -> None:
        self._config = config
        self._name = config.column
        self.reads = {config.column: ColumnType(BYTES)}
        self.makes = self.consumed = frozenset({config.column})
        settings = config.model_dump(exclude={"axes"})
        # under their former names, so that earlier runs keep their shards
        settings |= {"time_first": config.time_first, "channel_axis": config.channel_axis}
        self.digest = json.dumps(["audio", 1, _versions(), settings])

    @property
    def summary(self) -> str:
        """Return in words what the model gets."""
        config = self._config
        length = f"{config.seconds:g} s" if config.seconds else "their own length"
        kind = f"log-mel spectrograms of {config.mel_bins} bands" if config.features == "log_mel" else "waveforms"
        return f"{config.column}: {kind}, {length} at {config.sample_rate} Hz"

    @property
    def is_fitted(self) -> bool:
        """Return True: nothing is found on the data."""
        return True

    def observe(self, rows: Mapping[str, Values], training: Array) -> None:
        """Do nothing: nothing is found on the data."""

    def finish(self) -> None:
        """Do nothing: nothing is found on the data."""

    def describe(self, values: Mapping[str, Values]) -> None:
        """Find the shape from the first rows. Raises DataError if none of them can be decoded."""
        varies = not self._config.seconds
        good = list[Array]()
        failed = list[str]()
        for content in values[self._name]:
            try:
                good.append(self._clip(content))
            except NotAudio as error:
                failed.append(f"{self._name} {error}")
            if good and not varies:
                break  # all have this shape, and a file may last for hours
        if not good:
            raise DataError(f"{failed[0]} (and so do all of the first rows)")
        shape = (max(map(len, good)),) if varies else good[0].shape
        self.columns = (Column(name=self._name, dtype="float32", shape=shape, variable=varies),)

    def compute(self, rows: Mapping[str, Values], count: int) -> tuple[dict[str, Values], dict[int, str]]:
        """Return what the files hold, and row -> why it cannot be decoded."""
        found = []
        failed = {}
        for at, content in enumerate(rows[self._name]):
            try:
                found.append(self._clip(content))
            except NotAudio as error:
                failed[at] = f"{self._name} {error}"
                # a bad row keeps its place until it is left out
                found.append(self._features(np.zeros(self._config.length or 1, np.float32)))
        return {self._name: np.stack(found) if self._config.seconds else found}, failed

    def _clip(self, content: object) -> Array:
        assert isinstance(content, bytes)
        return self._features(fit_length(decode_audio(content, self._config.sample_rate), self._config.length))

    def _features(self, wave: Array) -> Array:
        config = self._config
        if config.features == "log_mel":
            settings = config.model_dump(include={"sample_rate", "window", "hop", "mel_bins", "floor"})
            wave = log_mel(wave, **settings)
            wave = np.ascontiguousarray(wave.T) if config.time_first else wave
        return wave[None] if config.channel_axis else wave


def _versions() -> list[str]:
    """Return the versions that may change a decoded sample."""
    import scipy
    import soundfile

    return [soundfile.__libsndfile_version__, scipy.__version__]


# -- compute log-mel spectrograms of waveforms, by the formula of torchaudio's MelSpectrogram with its defaults
#
#     waveform [T] --reflected at both ends by window / 2--> frames [1 + T // hop, window], a hop apart
#         --Hann window, Fourier transform, |.|^2--> power [frames, window / 2 + 1]
#         --triangular filters--> mel bands [mel_bins, frames] --log(max(., floor))-->
#
# The filters are triangles of height 1 between mel_bins + 2 points that are equally spaced on HTK's mel scale, which is
# 2595 log10(1 + f / 700), from 0 to half of the sample rate.


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
