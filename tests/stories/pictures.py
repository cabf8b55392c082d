"""Jobs with images: a classifier with a new head, masks, two heads, and triplets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from tests.stories.story import Array, Recipe, Story, Trained, export, fit, split

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZE = 32


def digits() -> tuple[Array, Array]:
    """The 1,797 handwritten digits of scikit-learn, uint8 [rows, 8, 8], and their classes."""
    found = load_digits()
    return (found.images * 15).astype(np.uint8), found.target


def classifier(classes: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def as_usual(image: Image.Image) -> torch.Tensor:
    """Return an image as most people feed it: between 0 and 1, normalised as for ImageNet, channels first."""
    pixels = (np.asarray(image, np.float32) / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
    return torch.from_numpy(pixels.astype(np.float32).transpose(2, 0, 1))


# -- a folder of images for each class, and a model with a head for 1,000 classes


def _write_images(folder: Path) -> None:
    images, labels = digits()
    for part, rows in split(len(labels), 500).items():
        for row in rows:
            path = folder / "digits" / part / WORDS[labels[row]] / f"{row:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[row]).resize((SIZE, SIZE), Image.Resampling.BILINEAR).convert("RGB").save(path)
    example = (torch.zeros(2, 3, SIZE, SIZE),)
    export(classifier(1000), example, folder / "model.onnx", input_names=["image"], output_names=["logits"])


def _score_images(trained: Trained) -> Array:
    found = trained.predicted("digits/val")
    return np.array([Path(file).parent.name == name for file, name in zip(found["file"], found["class"], strict=True)])


def _images_by_hand(folder: Path, recipe: Recipe) -> Array:
    parts = {}
    for part in ("train", "val"):
        paths = sorted((folder / "digits" / part).rglob("*.png"))
        labels = torch.tensor([WORDS.index(path.parent.name) for path in paths])
        parts[part] = torch.stack([as_usual(Image.open(path)) for path in paths]), labels
    module = classifier(1000)
    module[-1] = nn.Linear(64, 10)  # type: ignore[operator]
    fit(module, parts["train"], nn.functional.cross_entropy, recipe)
    images, labels = parts["val"]
    return np.asarray(module(images).argmax(1) == labels)


# -- images with masks: which pixels belong to the digit that lies on a noisy ground


class UNet(nn.Module):
    """Two levels; each is a convolution with a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = self._block(3, 16), self._block(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.third, self.last = self._block(32, 16), nn.Conv2d(16, 1, 1)

    def _block(self, before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        first = self.first(image)
        second = self.up(self.second(nn.functional.max_pool2d(first, 2)))
        return self.last(self.third(torch.cat([first, second], 1)))  # type: ignore[no-any-return]


def _write_masks(folder: Path) -> None:
    images, _ = digits()
    random = np.random.default_rng(0)
    for part, rows in split(400, 100).items():
        for kind in ("images", "masks"):
            (folder / "scans" / part / kind).mkdir(parents=True)
        for row in rows:
            digit = np.asarray(Image.fromarray(images[row]).resize((20, 20), Image.Resampling.BILINEAR), np.float32)
            left, top = random.integers(0, SIZE - 20, 2)
            shown = np.zeros((SIZE, SIZE), np.float32)
            shown[top : top + 20, left : left + 20] = digit
            noisy = 0.4 * shown[..., None] + random.integers(0, 150, (SIZE, SIZE, 3))
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / "scans" / part / f"images/{row}.png")
            Image.fromarray(((shown > 120) * 255).astype(np.uint8)).save(folder / "scans" / part / f"masks/{row}.png")
    names: dict[str, Any] = {"input_names": ["image"], "output_names": ["mask"]}
    export(UNet(), (torch.zeros(2, 3, SIZE, SIZE),), folder / "model.onnx", **names)


def _masks(folder: Path, part: str) -> list[tuple[Image.Image, Array]]:
    found: list[tuple[Image.Image, Array]] = []
    for path in sorted((folder / "scans" / part / "images").iterdir()):
        found.append((Image.open(path), np.asarray(Image.open(path.parents[1] / "masks" / path.name)) > 0))
    return found


def _overlap(predicted: Array, mask: Array) -> float:
    return float((predicted & mask).sum() / (predicted | mask).sum())


def _score_masks(trained: Trained) -> Array:
    out = trained.folder / "predicted"
    trained.workshop.onward(
        "predict", str(trained.model), str(trained.folder / "scans" / "val" / "images"), "-o", f"{out}/"
    )
    found = []
    for path in sorted((trained.folder / "scans" / "val" / "images").iterdir()):
        mask = np.asarray(Image.open(path.parents[1] / "masks" / path.name)) > 0
        found.append(_overlap(np.asarray(Image.open(out / path.name)) > 0, mask))
    return np.array(found)


def _masks_by_hand(folder: Path, recipe: Recipe) -> Array:
    train = _masks(folder, "train")
    images = torch.stack([as_usual(image) for image, _ in train])
    labels = torch.stack([torch.tensor(mask[None], dtype=torch.float32) for _, mask in train])
    module = UNet()
    fit(module, (images, labels), nn.functional.binary_cross_entropy_with_logits, recipe)
    held_out = _masks(folder, "val")
    scores = module(torch.stack([as_usual(image) for image, _ in held_out])).detach().numpy()[:, 0]
    return np.array([_overlap(score > 0, mask) for score, (_, mask) in zip(scores, held_out, strict=True)])


# -- two heads: the digit, and the share of ink


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.digit, self.ink = nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.body(pixels)
        return self.digit(seen), self.ink(seen)


def _write_two_heads(folder: Path) -> None:
    images, labels = digits()
    pixels = images.reshape(-1, 64)
    table = pd.DataFrame(pixels, columns=[f"p{at}" for at in range(64)])
    table["digit"], table["ink"] = [WORDS[label] for label in labels], pixels.mean(1).round(1)
    (folder / "table").mkdir()
    for part, rows in split(len(table), 500).items():
        table.iloc[rows].to_csv(folder / "table" / f"{part}.csv", index=False)
    names: dict[str, Any] = {"input_names": ["pixels"], "output_names": ["digit", "ink"]}
    export(TwoHeads(), (torch.zeros(2, 64),), folder / "model.onnx", **names)


def _two_scores(digit: Array, ink: Array, table: pd.DataFrame) -> Array:
    """A row scores 1 if its class is right and its ink within 3 of 255."""
    return np.asarray((digit == table["digit"].to_numpy()) & (np.abs(ink - table["ink"].to_numpy()) < 3))


def _score_two_heads(trained: Trained) -> Array:
    table = pd.read_csv(trained.folder / "table" / "val.csv")
    found = trained.predicted("table/val.csv")
    return _two_scores(found["digit_class"].to_numpy(), found["predicted_ink"].to_numpy(), table)


def _two_heads_by_hand(folder: Path, recipe: Recipe) -> Array:
    train, held_out = (pd.read_csv(folder / "table" / f"{part}.csv") for part in ("train", "val"))
    pixels = train.filter(regex="^p").to_numpy(np.float32)
    mean, scale = pixels.mean(0), np.maximum(pixels.std(0), 1e-6)
    ink_mean, ink_scale = train["ink"].mean(), train["ink"].std()
    classes = {name: at for at, name in enumerate(WORDS)}
    labels = np.stack([train["digit"].map(classes), (train["ink"] - ink_mean) / ink_scale], 1).astype(np.float32)

    def loss(outputs: tuple[torch.Tensor, torch.Tensor], both: torch.Tensor) -> torch.Tensor:
        of_digit = nn.functional.cross_entropy(outputs[0], both[:, 0].long())
        return of_digit + nn.functional.mse_loss(outputs[1][:, 0], both[:, 1])

    module = TwoHeads()
    fit(module, (torch.from_numpy((pixels - mean) / scale), torch.from_numpy(labels)), loss, recipe)
    seen = (held_out.filter(regex="^p").to_numpy(np.float32) - mean) / scale
    digit, ink = (output.detach().numpy() for output in module(torch.from_numpy(seen)))
    return _two_scores(np.array(WORDS)[digit.argmax(1)], ink[:, 0] * ink_scale + ink_mean, held_out)


# -- triplets: an embedding in which images of a digit are near each other


class Triplets(nn.Module):
    """The same network for the anchor, an image like it and one unlike it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, anchor: torch.Tensor, like: torch.Tensor, unlike: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.body(anchor), self.body(like), self.body(unlike)


def _triplets(part: str) -> tuple[dict[str, Array], Array, Array]:
    """Return triplets of training images, and the images and classes of a part."""
    images, labels = digits()
    pixels = images.reshape(-1, 64).astype(np.float32) / 255
    parts, random = split(len(labels), 500), np.random.default_rng(0)
    rows = parts["train"]
    like = np.array([random.choice(rows[labels[rows] == labels[row]]) for row in rows])
    unlike = np.array([random.choice(rows[labels[rows] != labels[row]]) for row in rows])
    columns = {"anchor": pixels[rows], "like": pixels[like], "unlike": pixels[unlike]}
    return columns, pixels[parts[part]], labels[parts[part]]


def _write_triplets(folder: Path) -> None:
    np.savez(folder / "triplets.npz", **_triplets("train")[0])  # type: ignore[arg-type]
    names: dict[str, Any] = {"input_names": ["anchor", "like", "unlike"], "output_names": ["a", "b", "c"]}
    example = tuple(torch.arange(128.0).reshape(2, 64) * factor for factor in (1, 2, 3))
    export(Triplets(), example, folder / "model.onnx", **names)


def _nearest(known: Array, asked: Array) -> Array:
    """A row scores 1 if the nearest training image in the embedding has its class."""
    distances = ((asked[:, None] - known[None]) ** 2).sum(-1)
    return np.asarray(_triplets("train")[2][distances.argmin(1)] == _triplets("val")[2])


def _score_triplets(trained: Trained) -> Array:
    session = onnxruntime.InferenceSession(str(trained.model), providers=["CPUExecutionProvider"])
    found = []
    for part in ("train", "val"):
        feed = dict.fromkeys(("anchor", "like", "unlike"), _triplets(part)[1])
        found.append(np.asarray(session.run(["a"], feed)[0]))
    return _nearest(*found)


def _triplets_by_hand(folder: Path, recipe: Recipe) -> Array:
    columns = [torch.from_numpy(column) for column in _triplets("train")[0].values()]

    def loss(outputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
        anchor, like, unlike = outputs
        return nn.functional.triplet_margin_loss(anchor, like, unlike)

    module = Triplets()
    fit(module, (*columns, torch.zeros(len(columns[0]))), loss, recipe)
    known, asked = (module.body(torch.from_numpy(_triplets(part)[1])).detach().numpy() for part in ("train", "val"))
    return _nearest(known, asked)


TRIPLETS = """
metrics = ["triplet_accuracy"]
[model]
path = "model.onnx"
[data]
source = "triplets.npz"
[[loss]]
name = "triplet"
output = ["a", "b", "c"]
[train]
global_batch_size = 32
num_epochs = 6
[optimizer]
learning_rate = 1e-3
[schedule]
mode = "cosine"
"""
PICTURES = {
    "images in folders, and a new head": Story(
        _write_images,
        "digits",
        _score_images,
        _images_by_hand,
        given=("train.num_epochs=12", 'export.variants=["int8_static", "fp16"]'),
        variants=("int8_static", "fp16"),
        at_least=0.9,
    ),
    "masks": Story(_write_masks, "scans", _score_masks, _masks_by_hand, given=("train.num_epochs=8",), at_least=0.5),
    "two heads": Story(_write_two_heads, "table", _score_two_heads, _two_heads_by_hand, at_least=0.7),
    "triplets": Story(
        _write_triplets, "triplets.npz", _score_triplets, _triplets_by_hand, config=TRIPLETS, at_least=0.9
    ),
}
