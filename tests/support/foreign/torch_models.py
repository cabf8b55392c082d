"""Small torch modules of the kinds people train, for make_torch.py and make_onnxruntime.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH = 32, 8, 16


class CNN(nn.Module):
    """Convolutions with BatchNorm, a residual branch whose scale begins at zero, and fixed scaling of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pixel_mean", torch.full((1, 1, 1, 1), 5.0))
        self.conv1, self.norm1 = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8)
        self.alpha = nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(8, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm1(self.conv1(image - self.pixel_mean)).relu()
        x = x + self.alpha * self.norm2(self.conv2(x)).relu()
        return self.head(torch.nn.functional.max_pool2d(x, 2).mean((2, 3)))


class Transformer(nn.Module):
    """An encoder block over token and position embeddings, with a mask of padding (token 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("places", torch.arange(LENGTH)[None])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(self.places)
        padding = torch.where(tokens == 0, -1e4, 0.0)[:, None, None, :]
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2))
        scores = (q @ k.transpose(2, 3)) * (WIDTH // 2) ** -0.5 + padding
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """An LSTM, then a GRU, over a series of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.gru = nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 4)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(series)[0])[0].mean(1))


class Text(nn.Module):
    """The mean of word vectors, with fixed weights of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, 4)
        self.register_buffer("decay", torch.linspace(1.0, 0.5, LENGTH)[None, :, None])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden((self.words(tokens) * self.decay).mean(1)).relu())


class MLP(nn.Module):
    """Dense layers, Swish with a learned factor, and fixed scaling of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(12))
        self.register_buffer("deviation", torch.rand(12) + 0.5)
        self.first, self.norm, self.last = nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)
        self.beta = nn.Parameter(torch.tensor(1.3))

    def forward(self, features: Tensor) -> Tensor:
        x = self.norm(self.first((features - self.mean) / self.deviation))
        return self.last(x * torch.sigmoid(self.beta * x))


IMAGE: dict[str, Any] = {"image": {"shape": [1, 8, 8]}}
TOKENS: dict[str, Any] = {"tokens": {"shape": [LENGTH], "below": VOCABULARY}}
ROWS: dict[str, Any] = {"features": {"shape": [12]}}
SERIES: dict[str, Any] = {"series": {"shape": [LENGTH, 4]}}

MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], nn.Module]]] = {
    "mlp": ("MLP with input scaling", ROWS, MLP),
    "cnn": ("CNN with BatchNorm and ReZero", IMAGE, CNN),
    "transformer": ("transformer block with LayerNorm", TOKENS, Transformer),
    "recurrent": ("LSTM and bidirectional GRU", SERIES, Recurrent),
    "text": ("embedding classifier", TOKENS, Text),
}
"""Name -> (architecture, inputs, the module's class)."""


def built(name: str, changed: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the module in evaluation mode, whose parameters or buffers are `changed`, and example inputs."""
    _, inputs, make = MODELS[name]
    torch.manual_seed(0)
    module = make().eval()
    example = tuple(
        torch.randint(0, what["below"], (2, *what["shape"])) if "below" in what else torch.randn(2, *what["shape"])
        for what in inputs.values()
    )
    with torch.no_grad():
        for key, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point() and key != "alpha":
                tensor += 0.05 * torch.rand_like(tensor)
        for tensor in {"": [], "trainable": module.parameters(), "others": module.buffers()}[changed]:
            if tensor.is_floating_point():
                tensor += 0.1 * torch.rand_like(tensor)
    return module, example
