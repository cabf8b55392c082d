"""The job with sounds: clips in a folder for each class, and a network on their spectrograms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import nn

from tests.stories.story import Array, Recipe, Story, Trained, export, fit

RATE, BINS, FRAMES, HOP, WINDOW = 16000, 40, 101, 160, 400
KINDS = ("down", "steady", "up", "wobble")


def _clip(kind: str, random: np.random.Generator) -> Array:
    """A second of a tone that falls, stays, rises or wobbles, in noise."""
    time = np.arange(RATE) / RATE
    low = random.uniform(300, 1500)
    bend = {"down": -0.4 * time, "steady": 0 * time, "up": 0.4 * time, "wobble": 0.2 * np.sin(2 * np.pi * 3 * time)}
    phase = 2 * np.pi * np.cumsum(low * (1 + bend[kind])) / RATE
    return np.asarray(0.2 * np.sin(phase + random.uniform(0, 6)) + random.normal(0, 0.15, RATE))


def _module() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((1, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 5 * 13, len(KINDS)))


def _write_clips(folder: Path) -> None:
    random = np.random.default_rng(0)
    for part, each in (("train", 60), ("val", 40)):
        for kind in KINDS:
            (folder / "clips" / part / kind).mkdir(parents=True)
            for at in range(each):
                soundfile.write(folder / "clips" / part / kind / f"{at}.wav", _clip(kind, random), RATE)
    names: dict[str, Any] = {"input_names": ["mel"], "output_names": ["logits"]}
    export(_module(), (torch.zeros(2, 1, BINS, FRAMES),), folder / "model.onnx", **names)


def _score_clips(trained: Trained) -> Array:
    found = trained.predicted("clips/val")
    return np.array([Path(file).parent.name == name for file, name in zip(found["file"], found["class"], strict=True)])


def _mel_filters() -> torch.Tensor:
    """Return triangles on the mel scale, [bins, frequencies]."""
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    mels = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), BINS + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    return torch.from_numpy(np.maximum(0, np.minimum(rising, falling)).astype(np.float32))


def _clips_by_hand(folder: Path, recipe: Recipe) -> Array:
    filters, window = _mel_filters(), torch.hann_window(WINDOW)

    def rows(part: str) -> tuple[torch.Tensor, torch.Tensor]:
        paths = sorted((folder / "clips" / part).rglob("*.wav"))
        waves = torch.stack([torch.from_numpy(soundfile.read(path, dtype="float32")[0]) for path in paths])
        power = torch.stft(waves, WINDOW, HOP, window=window, return_complex=True).abs() ** 2
        mels = torch.log((filters @ power).clamp(min=1e-6))[:, None]
        return mels, torch.tensor([KINDS.index(path.parent.name) for path in paths])

    module = _module()
    fit(module, rows("train"), nn.functional.cross_entropy, recipe)
    mels, labels = rows("val")
    return np.asarray(module(mels).argmax(1) == labels)


SOUNDS = {
    "sounds": Story(_write_clips, "clips", _score_clips, _clips_by_hand, given=("train.num_epochs=20",), at_least=0.6),
}
