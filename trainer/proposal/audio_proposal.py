"""Propose [data.audio]: what the model takes of a clip, found in the shape of its input and in the first files.

input [?, T], [?, 1, T]                   waveforms of T samples
input [?, M, F], [?, 1, M, F]             log-mel spectrograms: M bands, 100 frames a second
input [?, F, M], [?, 1, F, M]             the same with the time first
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onward.trainer.bounds import opened
from onward.trainer.config.sections.audio import AudioConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.audio.audio_decoding import AUDIO_SUFFIXES, refuse_missing_package
from onward.trainer.data.misfits import LONG
from onward.trainer.data.reading import sources
from onward.trainer.data.schema.allowed_files import allowed_files
from onward.trainer.data.schema.signature import TensorInfo
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.proposal.draft import INPUTS, Draft
from onward.trainer.proposal.inputs import shown
from onward.trainer.proposal.source_summary import FEW_FILES, Facts

BANDS = (13, 20, 23, 24, 26, 32, 40, 48, 60, 64, 80, 96, 120, 128, 160, 229, 256)
"""Usual numbers of mel bands, among which frames are told from bands."""
USUAL_RATE = 16000
"""Samples of a second that most models of speech take."""
FRAMES_A_SECOND = 100


@dataclass(frozen=True)
class _Clips:
    """What the headers of the first files say."""

    rates: Counter[int]
    seconds: Sequence[float]

    @property
    def rate(self) -> int:
        """Return the most frequent rate."""
        return self.rates.most_common(1)[0][0]

    @property
    def length_s(self) -> float:
        """Return a length that nine of ten clips do not exceed, in tenths of a second."""
        return float(np.ceil(np.quantile(self.seconds, 0.9) * 10) / 10)

    def __str__(self) -> str:
        rates = " and ".join(f"{rate:,}" for rate in sorted(self.rates))
        least = min(self.seconds)
        most = max(self.seconds)
        return f"the first {len(self.seconds)} files have {rates} Hz and {least:.2g} to {most:.2g} s"


def propose_audio_files(draft: Draft, inputs: Sequence[TensorInfo]) -> bool:
    """Propose [data.audio] for a source that is audio files; return whether it is.

    Raises ConfigError without the package soundfile, and where no input or several can take a clip.
    """
    source = draft.value("data.source")
    try:
        located = sources.locate(source, DataConfig(source=source, audio=AudioConfig()))
    except DataError:
        return False
    if located.format != "audio":
        return False
    # files of one class are often side by side: a few of all folders say more than the first ones
    interval = max(1, len(located.files) // FEW_FILES)
    _propose(draft, inputs, [path for _, path in located.files[::interval]], "audio")
    return True


def propose_audio_column(draft: Draft, facts: Facts, inputs: Sequence[TensorInfo]) -> bool:
    """Propose [data.audio] for a column of a table that names audio files; return whether there is one."""
    allowed = allowed_files(facts.data.source, facts.data)
    for name, cells in facts.cells.items():
        paths = [cell for cell in cells if isinstance(cell, str)]
        if paths and all(path.lower().endswith(AUDIO_SUFFIXES) for path in paths):
            paths = [path for path in paths if not allowed.refusal_of_cell(facts.folder, path)]
            _propose(draft, inputs, [facts.folder / path for path in paths], name)
            return True
    return False


def audio_input(draft: Draft, inputs: Sequence[TensorInfo]) -> TensorInfo | None:
    """Return the input that takes the clips: the one that data.inputs names, else the only one that can."""
    columns = {info.name: draft.value(f"{INPUTS}.{info.name}") for info in inputs}
    audio_column = draft.value("data.audio.column", "audio")
    candidates = [info for info in inputs if columns[info.name] == audio_column]
    if not candidates:
        open_inputs = [info for info in inputs if columns[info.name] is None]
        candidates = [info for info in open_inputs if _is_sound(info)]
    return candidates[0] if len(candidates) == 1 else None


def _is_sound(info: TensorInfo) -> bool:
    """Return whether an input can take waveforms [B, T], [B, 1, T] or spectrograms, [B, M, F], [B, 1, M, F]."""
    shape = info.sample_shape
    if "float" not in info.dtype or not shape:
        return False
    # a short vector is one of features, not a waveform
    if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1):
        return shape[-1] is None or shape[-1] >= LONG
    return len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)


def _propose(draft: Draft, inputs: Sequence[TensorInfo], files: Sequence[Path], column: str) -> None:
    refuse_missing_package()
    if column != "audio":
        draft.set("data.audio.column", column, "its cells name audio files")
    info = audio_input(draft, inputs)
    if info is None:
        names = ", ".join(f"{value.name} {shown(value)}" for value in inputs)
        raise ConfigError(
            f"the data is audio ({len(files)} files were looked at), but not one input alone can take a clip ([?, T], "
            f"[?, M, F] or [?, 1, M, F] of floats): {names}; name it: data.inputs.NAME={column}, and set [data.audio]"
        )
    clips = _read_headers(files)
    draft.set("data.audio", {}, f"{info.name} takes {shown(info)}, and the data is audio files; {clips}")
    shape = list(info.sample_shape or ())
    has_channel = len(shape) == 3 or (len(shape) == 2 and shape[0] == 1)
    shape = shape[1:] if has_channel else shape
    if len(shape) == 1:
        if has_channel:
            draft.set("data.audio.axes", "channel", _channel_of(info))
        _propose_waveform(draft, shape[0], clips)
    else:
        _propose_spectrogram(draft, info, (shape[0], shape[1]), clips, has_channel=has_channel)


def _channel_of(info: TensorInfo) -> str:
    return f"{info.name} has an axis of one channel"


def _propose_waveform(draft: Draft, length: int | None, clips: _Clips) -> None:
    rate = clips.rate
    # a length of whole seconds at the rate of the files says that the model takes them as they are
    if length is None or length % rate:
        rate = min(rate, USUAL_RATE)
    draft.set("data.audio.sample_rate", rate, "the model does not say it; the rate of its training is right")
    rate = draft.value("data.audio.sample_rate", rate)
    if length is not None:
        draft.set("data.audio.seconds", length / rate, f"{length:,} samples, as the model takes them")
    elif draft.value("data.audio.axes") == "channel":
        # samples with an axis of channels are of one length; without it a batch is filled up to its longest clip
        draft.set("data.audio.seconds", clips.length_s, "the model takes any; nine of ten clips are not longer")


def _propose_spectrogram(
    draft: Draft, info: TensorInfo, dims: tuple[int | None, int | None], clips: _Clips, *, has_channel: bool
) -> None:
    bands_first, bands_last = (dim in BANDS for dim in dims)
    if bands_first == bands_last and None in dims:
        # what is open is the time
        bands_first = dims[0] is not None
        bands_last = dims[0] is None
    draft.set("data.audio.features", "log_mel", f"{info.name} has an axis of bands and one of frames")
    before, behind = ("channel", "channel_time_first") if has_channel else ("plain", "time_first")
    if bands_first == bands_last:
        question = f"{info.name} takes {shown(info)}: which axis has the bands?"
        draft.ask("data.audio.axes", question, {before: "bands, then frames", behind: "frames, then bands"})
    elif bands_last:
        draft.set("data.audio.axes", behind, f"{dims[1]} is a usual number of bands, {dims[0] or 'any'} is not")
    elif has_channel:
        draft.set("data.audio.axes", "channel", _channel_of(info))
    is_first = draft.value("data.audio.axes") == behind
    bands, frames = (dims[1], dims[0]) if is_first else dims
    draft.set("data.audio.mel_bins", bands or 80, "as the model takes them" if bands else "a usual number")
    rate = draft.value("data.audio.sample_rate", min(clips.rate, USUAL_RATE))
    draft.set("data.audio.sample_rate", rate, "the model does not say it; the rate of its training is right")
    if rate != USUAL_RATE:  # the defaults are of 16,000 samples a second
        draft.set("data.audio.window", rate // 40, "25 ms")
        draft.set("data.audio.hop", rate // FRAMES_A_SECOND, "10 ms")
    hop = draft.value("data.audio.hop", AudioConfig().hop)
    if frames:
        # a clip of T samples has 1 + T // hop frames
        draft.set("data.audio.seconds", max(frames - 1, 1) * hop / rate, f"{frames} frames of {1000 * hop / rate:g} ms")
    else:
        draft.set("data.audio.seconds", clips.length_s, "the model takes any; nine of ten clips are not longer")


def _read_headers(files: Sequence[Path]) -> _Clips:
    """Return rates and lengths. Raises DataError if none of the files can be opened."""
    import soundfile  # imported here: most data is no audio

    rates = Counter[int]()
    seconds = list[float]()
    failed = ""
    for path in files[:FEW_FILES]:
        try:
            with opened(path) as file:
                header = soundfile.info(file)
        except (soundfile.SoundFileError, OSError, RuntimeError) as error:
            failed = failed or f"{path.name}: {error}"
            continue
        rates[header.samplerate] += 1
        seconds.append(header.duration)
    if not seconds:
        raise DataError(f"none of {len(files)} audio files that were opened can be read; the first is {failed}")
    return _Clips(rates, seconds)
