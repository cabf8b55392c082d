"""Audio: decoded like libsndfile, spectrograms equal to torch.stft and the published filters, bad files by policy."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from scipy.signal import resample_poly

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.audio import AudioConfig
from onward.trainer.data.audio import audio_clips
from onward.trainer.data.audio.audio_clips import AudioClips, log_mel
from onward.trainer.data.audio.audio_decoding import NotAudio, decode_audio, fit_length
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.export.preprocessing.preprocessing_file import describe
from onward.trainer.run.recorded.preprocessing_record import AudioInput, Preprocessing
from onward.trainer.run.records import ExportedModel
from tests.support.graphs import tiny_mlp

Array = np.ndarray[Any, np.dtype[Any]]
RATE = 8000


def tone(frequency: float, seconds: float, rate: int = RATE) -> Array:
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def encoded(samples: Array, rate: int = RATE, *, format: str = "WAV", subtype: str = "PCM_16") -> bytes:
    content = io.BytesIO()
    soundfile.write(content, samples, rate, format=format, subtype=subtype)
    return content.getvalue()


# -- decoding


@pytest.mark.parametrize(
    ("format", "subtype", "bits"),
    [("WAV", "PCM_16", 15), ("WAV", "FLOAT", 24), ("WAV", "PCM_U8", 7), ("FLAC", "PCM_16", 15), ("FLAC", "PCM_24", 23)],
)
def test_samples_are_those_of_the_file(format: str, subtype: str, bits: int) -> None:
    wave = tone(440, 0.1)
    found = decode_audio(encoded(wave, format=format, subtype=subtype), RATE)
    assert found.dtype == np.float32
    assert np.abs(found - wave).max() <= 2.0**-bits


def test_channels_are_averaged() -> None:
    left, right = tone(440, 0.1), tone(880, 0.1)
    found = decode_audio(encoded(np.stack([left, right], axis=1), subtype="FLOAT"), RATE)
    np.testing.assert_allclose(found, (left + right) / 2, atol=1e-7)


def test_other_rates_are_resampled() -> None:
    found = decode_audio(encoded(tone(440, 1.0, 44100), 44100, subtype="FLOAT"), RATE)
    assert len(found) == RATE
    np.testing.assert_allclose(found, resample_poly(tone(440, 1.0, 44100), 80, 441), atol=1e-6)
    np.testing.assert_allclose(found[200:-200], tone(440, 1.0)[200:-200], atol=2e-3)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"not audio", "is no audio that libsndfile reads"),
        (encoded(tone(440, 0.1))[:20], "is no audio that libsndfile reads"),
        (encoded(np.zeros(0, np.float32)), "holds no sample"),
        (encoded(np.array([0, np.nan], np.float32), subtype="FLOAT"), "holds samples that are not finite"),
    ],
    ids=["text", "cut off", "no sample", "not finite"],  # some contents hold the time at which they were made
)
def test_content_that_is_no_audio_is_named(content: bytes, why: str) -> None:
    with pytest.raises(NotAudio, match=why):
        decode_audio(content, RATE)


def test_the_middle_of_a_long_clip_is_taken_and_a_short_one_is_filled_with_zeros() -> None:
    wave = np.arange(10, dtype=np.float32)
    assert fit_length(wave, 4).tolist() == [3, 4, 5, 6]
    assert fit_length(wave, 12).tolist() == [*range(10), 0, 0]
    assert fit_length(wave, 0) is wave


# -- spectrograms


def filters_of_the_definition(sample_rate: int, window: int, mel_bins: int) -> Array:
    """Triangles between points that are equally spaced in mel, one by one."""

    def mel(frequency: float) -> float:
        return 2595 * math.log10(1 + frequency / 700)

    points = [700 * (10 ** (mel(sample_rate / 2) * k / (mel_bins + 1) / 2595) - 1) for k in range(mel_bins + 2)]
    weights = np.zeros((window // 2 + 1, mel_bins))
    for place in range(window // 2 + 1):
        frequency = place * sample_rate / window
        for band in range(mel_bins):
            low, peak, high = points[band : band + 3]
            if low < frequency < high:
                up, down = (frequency - low) / (peak - low), (high - frequency) / (high - peak)
                weights[place, band] = min(up, down)
    return weights


@pytest.mark.parametrize(("rate", "window", "hop", "bins"), [(16000, 400, 160, 40), (8000, 256, 100, 20)])
def test_a_log_mel_spectrogram_is_that_of_torch_and_the_definition(rate: int, window: int, hop: int, bins: int) -> None:
    wave = np.random.default_rng(0).normal(size=rate // 2).astype(np.float32)
    hann = torch.hann_window(window, dtype=torch.float64)
    spectrum = torch.stft(
        torch.from_numpy(wave).double(), window, hop, window=hann, center=True, pad_mode="reflect", return_complex=True
    )
    power = spectrum.abs().square().numpy()
    expected = np.log(np.maximum(filters_of_the_definition(rate, window, bins).T @ power, 1e-6))
    found = log_mel(wave, sample_rate=rate, window=window, hop=hop, mel_bins=bins, floor=1e-6)
    assert found.shape == (bins, 1 + len(wave) // hop)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_tone_is_in_its_band() -> None:
    found = log_mel(tone(1000, 1.0), sample_rate=RATE, window=256, hop=128, mel_bins=20, floor=1e-6)
    mel = 2595 * math.log10(1 + 1000 / 700) / (2595 * math.log10(1 + RATE / 2 / 700)) * 21
    assert abs(found.mean(axis=1).argmax() - (mel - 1)) <= 1


# -- in a run


def config(folder: Path, source: Path, *, inputs: int, **audio: Any) -> RunConfig:
    onnx.save_model(tiny_mlp(inputs=inputs, outputs=2), folder / "model.onnx")
    return build_config(
        {
            "model": {"path": folder / "model.onnx"},
            "data": {
                "source": str(source),
                "inputs": {"features": "audio"},
                "evaluation_fraction": 0.25,
                "audio": {"sample_rate": RATE, "seconds": 0.01, **audio},
            },
            "train": {"num_steps": 1, "global_batch_size": 4},
        }
    )


def table_of_paths(folder: Path, rows: int = 8) -> Path:
    """A CSV file beside a folder of clips; class 1 is the higher tone."""
    (folder / "clips").mkdir()
    for row in range(rows):
        wave = tone(400 * (1 + row % 2), 0.02 + 0.001 * row)
        (folder / "clips" / f"{row}.flac").write_bytes(encoded(wave, format="FLAC"))
    lines = [f"clips/{row}.flac,{row % 2}" for row in range(rows)]
    (folder / "clips.csv").write_text("\n".join(["audio,label", *lines]) + "\n")
    return folder / "clips.csv"


def test_paths_of_a_table_become_waveforms_of_one_length(tmp_path: Path) -> None:
    settings = config(tmp_path, table_of_paths(tmp_path), inputs=80)
    assert check_files_and_data(dict(settings)) == []
    directory, manifest, _ = make_training_shards(settings, tmp_path / "cache")
    assert "audio: waveforms, 0.01 s at 8000 Hz" in manifest.preprocessing
    rows = open_shards(directory, "train").read(np.arange(manifest.rows("train")))
    waves, labels = np.asarray(rows["audio"]), np.asarray(rows["label"])
    assert (waves.shape, waves.dtype) == ((len(labels), 80), np.float32)
    for wave, label in zip(waves, labels, strict=True):
        assert np.abs(np.fft.rfft(wave)).argmax() == 4 * (1 + label)  # 100 Hz a bin


def test_contents_in_a_table_become_spectrograms(tmp_path: Path) -> None:
    cells = [{"bytes": encoded(tone(400, 0.2)), "path": None}] * 8
    pq.write_table(pa.table({"audio": cells, "label": [0, 1] * 4}), tmp_path / "clips.parquet")
    shape = {"seconds": 0.1, "features": "log_mel", "mel_bins": 10, "window": 128, "hop": 80, "axes": "time_first"}
    settings = config(tmp_path, tmp_path / "clips.parquet", inputs=4, **shape)
    (problem,) = check_files_and_data(dict(settings))
    assert problem == "input features takes [4] a sample, but column 'audio' is float32 [11, 10]"


def test_a_corrupt_file_is_a_bad_row(tmp_path: Path) -> None:
    settings = config(tmp_path, table_of_paths(tmp_path), inputs=80)
    (tmp_path / "clips/3.flac").write_bytes(b"corrupt")
    with pytest.raises(DataError, match=r"clips.csv, line 5: audio is no audio that libsndfile reads"):
        make_training_shards(settings, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))
    skipping = settings.model_copy(update={"data": settings.data.model_copy(update={"bad_rows": "skip"})})
    assert make_training_shards(skipping, tmp_path / "cache")[1].skipped == 1


@pytest.mark.parametrize(
    ("audio", "sentence"),
    [
        ({"column": "sound"}, "data.audio.column 'sound' is not there, only audio, label"),
        ({"column": "label"}, "data.audio.column 'label' holds int64; name a column of audio files or their paths"),
    ],
)
def test_a_wrong_column_is_refused(tmp_path: Path, audio: dict[str, Any], sentence: str) -> None:
    settings = config(tmp_path, table_of_paths(tmp_path), inputs=80, **audio)
    assert sentence in "\n".join(check_files_and_data(dict(settings)))


@pytest.mark.parametrize(
    ("audio", "sentence"),
    [
        ({"seconds": 0, "features": "log_mel"}, "features 'log_mel' needs clips of one length: set seconds"),
        ({"seconds": 0, "axes": "channel"}, "axes 'channel' needs clips of one length: set seconds"),
        ({"seconds": 0.01, "features": "log_mel"}, "are 80 samples, too few for a window of 400; set seconds above"),
        ({"seconds": 1e-5}, "is less than one sample at sample_rate 8000"),
    ],
)
def test_contradicting_settings_are_refused(tmp_path: Path, audio: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config(tmp_path, tmp_path / "clips.csv", inputs=80, **audio)
    assert sentence in "\n".join(refusal.value.problems)


def test_clips_may_keep_their_own_lengths(tmp_path: Path) -> None:
    clips = AudioClips(AudioConfig(sample_rate=RATE))
    contents = np.array([encoded(tone(440, seconds)) for seconds in (0.01, 0.03)], object)
    clips.describe({"audio": contents})
    assert (clips.columns[0].variable, clips.columns[0].shape) == (True, (240,))
    results, failed = clips.compute({"audio": np.array([*contents, b"corrupt"], object)}, 3)
    assert [len(each) for each in results["audio"]][:2] == [80, 240]
    assert list(failed) == [2]


def test_a_shape_that_the_settings_fix_is_found_with_the_first_file_that_can_be_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other files may last for hours, and are decoded when they are stored."""
    decoded = list[bytes]()

    def counted(content: bytes, sample_rate: int) -> Array:
        decoded.append(content)
        return decode_audio(content, sample_rate)

    monkeypatch.setattr(audio_clips, "decode_audio", counted)
    rows = [b"no audio", *(encoded(tone(440, seconds)) for seconds in (0.1, 0.2, 0.3))]
    fixed = AudioClips(AudioConfig(sample_rate=RATE, seconds=0.1))
    fixed.describe({"audio": np.array(rows, object)})
    assert (fixed.columns[0].shape, len(decoded)) == ((RATE // 10,), 2)
    own = AudioClips(AudioConfig(sample_rate=RATE))
    own.describe({"audio": np.array(rows, object)})
    assert (own.columns[0].shape, len(decoded)) == ((int(0.3 * RATE),), 6)
    with pytest.raises(DataError, match="all of the first rows"):
        fixed.describe({"audio": np.array(rows[:1], object)})


def test_files_in_a_folder_for_each_class_are_read(tmp_path: Path) -> None:
    for label, frequency in (("high", 800), ("low", 400)):
        (tmp_path / "tones" / label).mkdir(parents=True)
        for number in range(10):
            content = encoded(tone(frequency, 0.02 + 0.001 * number), format="FLAC")
            (tmp_path / "tones" / label / f"{number}.flac").write_bytes(content)
    settings = config(tmp_path, tmp_path / "tones", inputs=80)
    assert check_files_and_data(dict(settings)) == []
    directory, manifest, _ = make_training_shards(settings, tmp_path / "cache")
    assert manifest.fitted["label"].classes == ("high", "low")
    rows = open_shards(directory, "train").read(np.arange(manifest.rows("train")))
    for wave, label in zip(np.asarray(rows["audio"]), np.asarray(rows["label"]), strict=True):
        assert np.abs(np.fft.rfft(wave)).argmax() == (8, 4)[label]
    (tmp_path / "tones/low/3.flac").write_bytes(b"corrupt")
    with pytest.raises(DataError, match=r"low/3.flac: audio is no audio that libsndfile reads"):
        make_training_shards(settings, tmp_path / "cache")


def test_what_becomes_of_audio_is_written_beside_the_exported_model(tmp_path: Path) -> None:
    settings = config(tmp_path, table_of_paths(tmp_path), inputs=80)
    _, manifest, _ = make_training_shards(settings, tmp_path / "cache")
    exported = ExportedModel(path=Path("m.onnx"), sha256="0", step=1, parity=0, before={}, after={}, changed=0)
    record = describe(
        settings.data, settings.losses, settings.model, manifest, read_training_signature(settings.model), exported
    )
    found = record.inputs["features"]
    assert isinstance(found, AudioInput)
    assert (found.column, found.sample_rate, found.samples, found.features) == ("audio", RATE, 80, "waveform")
    assert Preprocessing.model_validate_json(record.model_dump_json()) == record
