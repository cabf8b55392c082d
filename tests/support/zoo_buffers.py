"""Small torch modules whose buffers look like weights: `BUFFERS`, with the shape of one sample of their input `x`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH, LENGTH = 16, 10
VECTOR, SEQUENCE, IMAGE, SOUND, TABLE = (WIDTH,), (LENGTH, WIDTH), (3, 12, 12), (64,), (40,)


def waves(rows: int, width: int) -> Tensor:
    """Return the sinusoidal table [rows, width] of the Transformer."""
    angles = torch.arange(rows)[:, None] * 10000 ** -(torch.arange(0, width, 2)[None] / width)
    return torch.cat((angles.sin(), angles.cos()), 1)


class WithBuffers(nn.Module):
    """A linear layer behind buffers that a subclass registers by `keep`."""

    def __init__(self, width: int, **buffers: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 3)
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


class ALiBi(WithBuffers):
    """Attention scores lowered by the distance, with a slope for each head."""

    def __init__(self) -> None:
        places, slopes = torch.arange(LENGTH), 2.0 ** -torch.arange(1.0, 3.0)
        distances = (places[None] - places[:, None]).abs().float()
        super().__init__(WIDTH, alibi=-slopes[:, None, None] * distances, causal_alibi=slopes[:, None, None] * places)
        self.qk = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qk(x).view(x.shape[0], LENGTH, 2, 8).transpose(1, 2)
        scores = heads @ heads.transpose(2, 3) + self.alibi + self.causal_alibi
        return self.fc((scores.softmax(-1) @ heads).transpose(1, 2).flatten(2))


class Spectrum(WithBuffers):
    """Sound as a mel spectrogram: a windowed Fourier transform as a convolution, and triangular filters."""

    def __init__(self) -> None:
        n, bins = torch.arange(32.0), torch.arange(17.0)
        angles = 2 * math.pi * bins[:, None] * n[None] / 32
        window = torch.hann_window(32)
        bases = torch.cat((angles.cos(), angles.sin()))[:, None] * window
        super().__init__(6, bases=bases, filters=mel_filters(17, 6))

    def forward(self, x: Tensor) -> Tensor:
        real, imaginary = F.conv1d(x[:, None], self.bases, stride=8).chunk(2, dim=1)
        power = real.square() + imaginary.square()
        return self.fc(torch.log(power.transpose(1, 2) @ self.filters + 1e-6))


def mel_filters(bins: int, filters: int) -> Tensor:
    """Return triangular filters [bins, filters] whose widths grow with the frequency."""
    edges = torch.linspace(0, 1, filters + 2) ** 1.5 * (bins - 1)
    places = torch.arange(float(bins))[:, None]
    rise, fall = (places - edges[:-2]) / (edges[1:-1] - edges[:-2]), (edges[2:] - places) / (edges[2:] - edges[1:-1])
    return torch.minimum(rise, fall).clamp(min=0)


class FourierTransform(WithBuffers):
    """A Fourier transform as two matrix products."""

    def __init__(self) -> None:
        angles = 2 * math.pi * torch.arange(WIDTH)[:, None] * torch.arange(9)[None] / WIDTH
        super().__init__(9, real=angles.cos(), imaginary=angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((x @ self.real).square() + (x @ self.imaginary).square())


class Filters(WithBuffers):
    """Blur and Sobel kernels in front of and inside a convolutional network."""

    def __init__(self) -> None:
        line, ramp = torch.tensor([1.0, 2.0, 1.0]), torch.tensor([-1.0, 0.0, 1.0])
        sobel = torch.stack((torch.outer(line, ramp), torch.outer(ramp, line)))[:, None].repeat(3, 1, 1, 1)
        gauss = torch.exp(-torch.arange(-2.0, 3.0).square() / 2)
        gauss = torch.outer(gauss, gauss) / gauss.sum().square()
        super().__init__(
            8,
            sobel=sobel,
            blur=(torch.outer(line, line) / 16)[None, None].repeat(8, 1, 1, 1),
            smooth=gauss[None, None].repeat(8, 1, 1, 1),
        )
        self.conv = nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(F.conv2d(x, self.sobel, groups=3, padding=1)))
        h = F.conv2d(F.conv2d(h, self.blur, groups=8, stride=2), self.smooth, groups=8)
        return self.fc(h.mean((2, 3)))


class Anchors(WithBuffers):
    """Boxes around anchors: centres and sizes."""

    def __init__(self) -> None:
        rows, columns = torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")
        centres = (torch.stack((columns, rows), -1).reshape(9, 2) + 0.5) / 3
        super().__init__(WIDTH, anchors=torch.cat((centres, torch.full((9, 2), 0.3)), 1))
        self.boxes = nn.Linear(WIDTH, 36)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raw = self.boxes(x).view(-1, 9, 4)
        centres = raw[..., :2] * self.anchors[:, 2:] + self.anchors[:, :2]
        return self.fc(x), torch.cat((centres, raw[..., 2:].exp() * self.anchors[:, 2:]), -1)


class Standardised(WithBuffers):
    """Mean and deviation of 40 features."""

    def __init__(self) -> None:
        super().__init__(40, mean=torch.randn(40), std=torch.rand(40) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((x - self.mean) / self.std)


class MinMax(WithBuffers):
    """scikit-learn's MinMaxScaler: a factor, then a shift."""

    def __init__(self) -> None:
        super().__init__(40, scale=torch.rand(40) + 0.5, minimum=torch.randn(40))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * self.scale + self.minimum)


class Pixels(WithBuffers):
    """Pixels divided by 255, and torchvision's mean and deviation."""

    def __init__(self) -> None:
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        super().__init__(4, factor=torch.tensor(1 / 255), pixel_mean=mean[:, None, None], pixel_std=std[:, None, None])
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv((x * self.factor - self.pixel_mean) / self.pixel_std)).mean((2, 3)))


class FourierFeatures(WithBuffers):
    """Random projections of coordinates, then sines and cosines."""

    def __init__(self) -> None:
        super().__init__(24, frequencies=torch.randn(WIDTH, 12))

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * math.pi * (x @ self.frequencies)
        return self.fc(torch.cat((angles.sin(), angles.cos()), -1))


class SpectralNorm(nn.Module):
    """Weights divided by their greatest singular value, which two buffers estimate."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.fc = norm(nn.Linear(WIDTH, 8))
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.fc(x)))


class FrozenBatchNorm2d(nn.Module):
    """Four buffers: torchvision's formula, or torch's own operator, as in detectron2."""

    def __init__(self, *, formula: bool) -> None:
        super().__init__()
        self.formula = formula
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.formula:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False)
        scale = self.weight * torch.rsqrt(self.running_var + 1e-5)
        bias = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)


class FrozenBatchNorm(nn.Module):
    """A convolution, a BatchNormalization that is not trained, and a linear layer."""

    def __init__(self, *, formula: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), FrozenBatchNorm2d(formula=formula)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class RadialBasis(WithBuffers):
    """SchNet's distances: Gaussians around evenly spaced centres."""

    def __init__(self) -> None:
        super().__init__(12, offset=torch.linspace(0, 5, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.exp(-0.5 * (x.abs().sum(-1, keepdim=True) - self.offset).square()))


class Positions(WithBuffers):
    """The Transformer's sines as a buffer; a causal mask as a buffer."""

    def __init__(self) -> None:
        mask = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        super().__init__(WIDTH, places=waves(LENGTH, WIDTH), mask=mask)
        self.qk = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.qk(x + self.places)
        return self.fc((h @ h.transpose(1, 2) + self.mask).softmax(-1) @ x)


class Codebook(WithBuffers):
    """Vectors that an average of features updates, not a gradient: nothing but the file says that."""

    def __init__(self) -> None:
        super().__init__(8, codes=torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.softmax(x @ self.codes.t(), -1))


BUFFERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "alibi": (ALiBi, SEQUENCE),
    "spectrum": (Spectrum, SOUND),
    "fourier_transform": (FourierTransform, VECTOR),
    "filters": (Filters, IMAGE),
    "anchors": (Anchors, VECTOR),
    "standardised": (Standardised, TABLE),
    "min_max": (MinMax, TABLE),
    "pixels": (Pixels, IMAGE),
    "fourier_features": (FourierFeatures, VECTOR),
    "spectral_norm": (functools.partial(SpectralNorm, parametrizations.spectral_norm), VECTOR),
    "older_spectral_norm": (functools.partial(SpectralNorm, nn.utils.spectral_norm), VECTOR),
    "frozen_batch_norm": (functools.partial(FrozenBatchNorm, formula=True), IMAGE),
    "frozen_operator": (functools.partial(FrozenBatchNorm, formula=False), IMAGE),
    "radial_basis": (RadialBasis, SEQUENCE),
    "positions": (Positions, SEQUENCE),
    "codebook": (Codebook, VECTOR),
}
