"""Networks exported by torch with a fixed batch: `FILES` names them, `exported` writes them, `rows` feeds them."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx
import torch
from torch import Tensor, nn

from tests.support.zoo import IGNORED

Exporter = Literal["dynamo", "legacy"]
EXPORTERS: tuple[Exporter, ...] = ("dynamo", "legacy")
CLASSES = 4


class VisionTransformer(nn.Module):
    """Patches of an image [B, 1, 8, 8] and a class token through two attention layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 5, 16))
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 4) for _ in range(2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = x.transpose(0, 1)  # [positions, B, 16]: heads are then merged into the middle dimension
        for attention in self.layers:
            x = x + attention(x, x, x, need_weights=False)[0]
        return self.head(x[0])


class Attention(nn.Module):
    """Causal attention over token ids [B, 7], with the heads in the batch dimension, as [B x heads, 7, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(20, 16), nn.Embedding(9, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        x = self.tokens(ids) + self.positions(torch.arange(length)[None].expand(batch, length))
        hidden = torch.triu(torch.full((length, length), -1e9), 1).expand(batch * 4, length, length)

        def heads(layer: nn.Linear) -> Tensor:
            return layer(x).view(batch, length, 4, 4).transpose(1, 2).reshape(batch * 4, length, 4)

        weights = torch.softmax(torch.bmm(heads(self.query), heads(self.key).transpose(1, 2)) / 2 + hidden, -1)
        mixed = torch.bmm(weights, heads(self.value)).view(batch, 4, length, 4).transpose(1, 2)
        return self.head(mixed.reshape(batch, length, 16)[:, -1])


class Recurrent(nn.Module):
    """An LSTM or a GRU of two layers over [B, 5, 8]."""

    def __init__(self, kind: str = "LSTM") -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(8, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


class OverTheBatch(nn.Module):
    """Features [B, 8] weighted by a softmax over the rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * (0.5 + torch.softmax(self.score(x), 0)))


class Squeezed(nn.Module):
    """One row without its batch dimension inside the network, as code for a single example computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(x)).squeeze(0))[None]


class SqueezedResult(Squeezed):
    """The same, whose result has no batch dimension either."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


@dataclass(frozen=True)
class FixedFile:
    """A network and the batch that its file declares."""

    build: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    """Of one row of its input `x`."""
    use: Literal["any", "own", "joint"]
    ids: int = 0
    """Number of different integers of the input; 0 = it takes floats."""


FILES = {
    "vit-1": FixedFile(VisionTransformer, 1, (1, 8, 8), "any"),
    "vit-2": FixedFile(VisionTransformer, 2, (1, 8, 8), "any"),
    "attention-1": FixedFile(Attention, 1, (7,), "any", ids=20),
    "attention-2": FixedFile(Attention, 2, (7,), "any", ids=20),
    "lstm-4": FixedFile(Recurrent, 4, (5, 8), "any"),
    "gru-3": FixedFile(functools.partial(Recurrent, "GRU"), 3, (5, 8), "any"),
    "over-the-batch-1": FixedFile(OverTheBatch, 1, (8,), "own"),
    "over-the-batch-4": FixedFile(OverTheBatch, 4, (8,), "joint"),
    "squeezed-1": FixedFile(Squeezed, 1, (8,), "own"),
    "squeezed-result-1": FixedFile(SqueezedResult, 1, (8,), "own"),
}


def built(name: str) -> nn.Module:
    """Return the network in evaluation mode, with the same weights at each call, no two of them equal.

    Exporters merge equal ones.
    """
    torch.manual_seed(0)
    module = FILES[name].build().eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return module


def rows(name: str, number: int, *, seed: int = 0) -> Tensor:
    """Return rows of the input."""
    file, generator = FILES[name], torch.Generator().manual_seed(seed)
    if file.ids:
        return torch.randint(0, file.ids, (number, *file.shape), generator=generator)
    return torch.randn((number, *file.shape), generator=generator)


@functools.cache
def exported(name: str, exporter: Exporter) -> onnx.ModelProto:
    """Return the file that an exporter writes by default: no dynamic dimension."""
    module, example = built(name), (rows(name, FILES[name].batch),)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        for opening, category in IGNORED:
            warnings.filterwarnings("ignore", opening, category)
        path = Path(folder) / "model.onnx"
        if exporter == "dynamo":
            torch.onnx.export(module, example, path, dynamo=True, input_names=["x"], output_names=["y"], verbose=False)
        else:
            torch.onnx.export(module, example, path, dynamo=False, input_names=["x"], output_names=["y"])
        return onnx.load(path)
