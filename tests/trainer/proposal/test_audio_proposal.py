"""Folders and tables of audio files are proposed from the shape of the input and the headers of the files."""

from __future__ import annotations

import csv
import wave
from pathlib import Path

import numpy as np
import onnx
import pytest

import onward
from onward.trainer.config.loading import load_config
from onward.trainer.config.sections.audio import AudioConfig
from onward.trainer.data.completed_settings import completed
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.proposal.initialise import Proposed

Shape = tuple[int | str, ...]


def listener(folder: Path, shape: Shape, *, classes: int = 2, beside: Shape | None = None) -> Path:
    """A model that takes clips: the mean over the last axis, and a linear layer on what is left."""
    g = GraphWriter("listener")
    x = g.input("mel", ("batch", *shape))
    x = g.op("ReduceMean", x, g.weight("last", [-1]), keepdims=0)
    x = g.op("Flatten", x) if len(shape) > 1 else g.op("Unsqueeze", x, g.weight("one", [1]))
    width = int(np.prod([size for size in shape[:-1] if isinstance(size, int)]))
    x = g.op("MatMul", x, g.weight("weight", g.normal(0.1, width, classes)))
    if beside:
        other = g.op("ReduceMean", g.input("other", ("batch", *beside)), g.weight("all", [1, 2]), keepdims=0)
        x = g.op("Add", x, g.op("Unsqueeze", other, g.weight("two", [1])))
    g.op("Add", x, g.weight("bias", np.zeros(classes, np.float32)), outputs="logits")
    g.output("logits", ("batch", classes))
    onnx.save(g.model(), folder / "model.onnx")
    return folder / "model.onnx"


def tone(path: Path, frequency: float, *, rate: int = 16000, seconds: float = 1.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = 0.4 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def clips(folder: Path, *, rate: int = 16000, seconds: float = 1.0) -> Path:
    for at in range(24):
        name = ("low", "high")[at % 2]
        tone(folder / "clips" / name / f"{at}.wav", (300 + at, 2000 + at)[at % 2], rate=rate, seconds=seconds)
    return folder / "clips"


def initialised(folder: Path, data: Path, *given: str, steps: int = 0) -> Proposed:
    return onward.init(folder / "model.onnx", data, given, output=folder / "config.toml", steps=steps)


def proposed(folder: Path) -> AudioConfig:
    audio = load_config(folder / "config.toml").data.audio
    assert audio is not None
    return audio


@pytest.mark.parametrize("shape", [(1, 40, 101), (40, 101)])
def test_a_folder_of_sounds_for_each_class_trains_as_proposed(shape: Shape, tmp_path: Path) -> None:
    listener(tmp_path, shape)
    found = initialised(tmp_path, clips(tmp_path), steps=20)
    assert not found.questions
    assert found.proof is not None, found.refused
    assert found.proof.loss_after < found.proof.loss_before
    audio = proposed(tmp_path)
    assert (audio.features, audio.mel_bins, audio.seconds, audio.sample_rate) == ("log_mel", 40, 1.0, 16000)
    assert audio.axes == ("channel" if len(shape) == 3 else "plain")
    config = load_config(tmp_path / "config.toml")
    assert config.data.inputs == {}, "the only input that takes a clip needs no setting"
    assert completed(config).data.inputs == {"mel": "audio"}
    reasons = {guess.setting: guess.reason for guess in found.guesses}
    assert "the first 24 files have 16,000 Hz and 1 to 1 s" in reasons["data.audio"]


@pytest.mark.parametrize(
    ("shape", "rate", "wanted"),
    [
        ((16000,), 16000, {"features": "waveform", "sample_rate": 16000, "seconds": 1.0}),
        ((8000,), 8000, {"features": "waveform", "sample_rate": 8000, "seconds": 1.0}),
        ((1, 4000), 8000, {"axes": "channel", "sample_rate": 8000, "seconds": 0.5}),
        (("time",), 22050, {"features": "waveform", "sample_rate": 16000, "seconds": 0.0}),
        (("frames", 80), 16000, {"axes": "time_first", "mel_bins": 80, "seconds": 0.7}),
        ((80, "frames"), 8000, {"axes": "plain", "mel_bins": 80, "hop": 80, "window": 200, "seconds": 0.7}),
        ((51, 64), 16000, {"axes": "time_first", "mel_bins": 64, "seconds": 0.5}),
    ],
)
def test_features_rate_and_length_are_those_of_the_input_and_the_files(
    shape: Shape, rate: int, wanted: dict[str, object], tmp_path: Path
) -> None:
    listener(tmp_path, shape)
    initialised(tmp_path, clips(tmp_path, rate=rate, seconds=0.7))
    audio = proposed(tmp_path)
    assert {name: getattr(audio, name) for name in wanted} == wanted


def test_two_axes_that_may_both_be_bands_are_asked(tmp_path: Path) -> None:
    listener(tmp_path, (64, 80))
    found = initialised(tmp_path, clips(tmp_path), steps=20)
    (question,) = found.questions
    assert question.setting == "data.audio.axes"
    assert '"plain" (bands, then frames) or "time_first" (frames, then bands)' in question.what


def test_a_table_that_names_audio_files_trains_as_proposed(tmp_path: Path) -> None:
    listener(tmp_path, (40, 101))
    clips(tmp_path)
    with (tmp_path / "clips" / "tones.csv").open("w", newline="") as file:
        rows = [(f"{('low', 'high')[at % 2]}/{at}.wav", ("low", "high")[at % 2]) for at in range(24)]
        csv.writer(file).writerows([("file", "pitch"), *rows])
    found = initialised(tmp_path, tmp_path / "clips" / "tones.csv", steps=3)
    assert found.proof is not None, found.refused
    assert proposed(tmp_path).column == "file"
    assert load_config(tmp_path / "config.toml").data.label == "pitch"


def test_a_run_finds_the_only_input_of_audio_as_images_are_found(tmp_path: Path) -> None:
    model = listener(tmp_path, (40, 101))
    settings = {
        "model": {"path": model},
        "data": {"source": str(clips(tmp_path)), "audio": {"features": "log_mel", "mel_bins": 40, "seconds": 1.0}},
        "train": {"num_steps": 1},
    }
    assert completed(load_config(settings)).data.inputs == {"mel": "audio"}
    named = {**settings, "data": {**settings["data"], "inputs": {"mel": "label"}}}  # type: ignore[dict-item]
    assert completed(load_config(named)).data.inputs == {"mel": "label"}, "a setting decides"
    listener(tmp_path, (40, 101), beside=(40, 101))
    assert completed(load_config(settings)).data.inputs == {}, "two inputs may take it"


def test_several_inputs_that_may_take_a_clip_are_named(tmp_path: Path) -> None:
    listener(tmp_path, (40, 101), beside=(40, 101))
    with pytest.raises(ConfigError, match=r"mel float32 \[\?, 40, 101\], other .*; name it: data\.inputs\.NAME=audio"):
        initialised(tmp_path, clips(tmp_path))


def test_files_that_are_no_audio_are_refused_with_the_first_of_them(tmp_path: Path) -> None:
    listener(tmp_path, (40, 101))
    (tmp_path / "clips" / "low").mkdir(parents=True)
    (tmp_path / "clips" / "low" / "a.wav").write_bytes(b"no sound")
    with pytest.raises(DataError, match=r"none of 1 audio files that were opened can be read; the first is a\.wav: "):
        initialised(tmp_path, tmp_path / "clips")
