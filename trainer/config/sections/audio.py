"""The settings of audio: [data.audio]."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from onward.trainer.bounds import AUDIO_SAMPLES
from onward.trainer.config.section import Length, Section


class AudioConfig(Section):
    """A column of audio files (wav, flac, ogg), decoded to a waveform or to log-mel spectrograms when data is read."""

    column: str = "audio"
    """The column: paths relative to the table's directory, contents of files, or `{bytes, path}` of Hugging Face
    `datasets`. The results have its name."""
    sample_rate: Length = 16000
    """Samples of a second. Files with another rate are resampled; channels are averaged."""
    seconds: NonNegativeFloat = 0.0
    """Length of every clip: of longer ones the middle is taken, shorter ones are filled up with zeros at their end. 0 =
    their own lengths (waveforms only), which a batch pads with `data.pad_values`."""
    features: Literal["waveform", "log_mel"] = "waveform"
    """`waveform`: float32 [T] between -1 and 1. `log_mel`: float32 [mel_bins, frames], the logarithm of the power in
    each mel band, by the formula of torchaudio's MelSpectrogram (HTK scale, no normalisation)."""
    mel_bins: Length = 80
    """Log-mel: number of mel bands, up to half of the sample rate."""
    window: Length = 400
    """Log-mel: samples of one Fourier transform and of its Hann window."""
    hop: Length = 160
    """Log-mel: samples from one frame to the next; a clip of T samples has 1 + T // hop frames."""
    floor: PositiveFloat = 1e-6
    """Log-mel: the least power of which the logarithm is taken."""
    axes: Literal["plain", "channel", "time_first", "channel_time_first"] = "plain"
    """`plain`: [T], or log-mel [mel_bins, frames]. `time_first`: log-mel [frames, mel_bins]. `channel`: with an axis of
    one channel in front, [1, T] or [1, mel_bins, frames]. `channel_time_first`: [1, frames, mel_bins]."""

    @model_validator(mode="after")
    def _has_a_length_where_it_needs_one(self) -> AudioConfig:
        if self.seconds and self.length < 1:
            raise ValueError(f"seconds {self.seconds:g} is less than one sample at sample_rate {self.sample_rate}")
        if self.length > AUDIO_SAMPLES.most:
            raise ValueError(f"seconds {self.seconds:g} are {AUDIO_SAMPLES.exceeded(self.length)}")
        if (self.features == "log_mel" or self.channel_axis) and not self.seconds:
            what = "features 'log_mel'" if self.features == "log_mel" else f"axes {self.axes!r}"
            raise ValueError(f"{what} needs clips of one length: set seconds")
        if self.features == "log_mel" and self.length <= self.window // 2:
            raise ValueError(
                f"seconds {self.seconds:g} at sample_rate {self.sample_rate} are {self.length} samples, too few for a "
                f"window of {self.window}; set seconds above {(self.window // 2) / self.sample_rate:g}"
            )
        return self

    @property
    def channel_axis(self) -> bool:
        """Whether an axis of one channel is in front."""
        return self.axes.startswith("channel")

    @property
    def time_first(self) -> bool:
        """Whether frames come before mel bands."""
        return self.axes.endswith("time_first")

    @property
    def length(self) -> int:
        """Return the samples of a clip; 0 if clips have their own lengths."""
        return round(self.seconds * self.sample_rate)
