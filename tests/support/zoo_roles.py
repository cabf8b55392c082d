"""Small torch modules whose parameters look like constants, and modules whose buffers look like weights.

`PARAMETERS` and `BUFFERS` name them, with the shape of one sample of their input `x`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH, LENGTH = 16, 10


# -- parameters that look like constants


class ContrastiveHead(nn.Module):
    """CLIP: the product of normalised features with class vectors, times the exponential of a learned scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.classes = nn.Linear(WIDTH, 8), nn.Parameter(torch.randn(5, 8))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor) -> Tensor:
        features = F.normalize(self.image(x), dim=-1)
        return self.logit_scale.exp() * features @ F.normalize(self.classes, dim=-1).t()


class ReZero(nn.Module):
    """Residual blocks whose branch is multiplied by a learned number that begins at zero, as [1] or as a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.alpha = nn.ParameterList([torch.zeros(1), torch.zeros(())])

    def forward(self, x: Tensor) -> Tensor:
        for block, alpha in zip(self.blocks, self.alpha, strict=True):
            x = x + alpha * torch.tanh(block(x))
        return x


class Swish(nn.Module):
    """x * sigmoid(beta * x) with a learned beta."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.beta, self.leave = nn.Linear(WIDTH, 8), nn.Parameter(torch.ones(1)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        return self.leave(h * torch.sigmoid(self.beta * h))


class GeM(nn.Module):
    """Generalised mean pooling with a learned exponent."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.p, self.fc = nn.Conv2d(3, 6, 3), nn.Parameter(torch.ones(1) * 3), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).clamp(min=1e-6).pow(self.p)
        return self.fc(h.mean((2, 3)).pow(1.0 / self.p))


class LearnedState(nn.Module):
    """A recurrent layer that begins in a learned state, zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.GRU(WIDTH, 6, batch_first=True), nn.Linear(6, 3)
        self.h0 = nn.Parameter(torch.zeros(1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x, self.h0.expand(-1, x.shape[0], -1).contiguous())
        return self.fc(y[:, -1])


class GlobalBias(nn.Module):
    """A factorisation machine: pairs of features, and one number for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, 1, bias=False), nn.Parameter(torch.zeros(1))
        self.v = nn.Parameter(torch.randn(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        pairs = ((x @ self.v).square() - x.square() @ self.v.square()).sum(1, keepdim=True)
        return self.linear(x) + 0.5 * pairs + self.bias


class EyeLinear(nn.Module):
    """A recurrence and a projection that begin as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.fc = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8, bias=False)
        nn.init.eye_(self.mix.weight)
        nn.init.eye_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.mix(x)))


class DiracConv(nn.Module):
    """Convolutions that begin as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=6)
        nn.init.dirac_(self.conv.weight)
        nn.init.dirac_(self.wide.weight, groups=6)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.wide(torch.relu(self.conv(x)))).mean((2, 3)))


class Temperature(nn.Module):
    """Attention divided by a learned temperature, and a learned threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 8) for _ in range(3))
        self.temperature, self.threshold = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / self.temperature
        return scores.softmax(-1) @ F.relu(self.v(x) - self.threshold)


class ZeroTables(nn.Module):
    """A class token, positions and an attention bias that begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, LENGTH + 1, WIDTH))
        self.scores = nn.Parameter(torch.zeros(LENGTH + 1, LENGTH + 1))
        self.qk, self.fc = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.places
        h = self.qk(x)
        return self.fc(((h @ h.transpose(1, 2) + self.scores).softmax(-1) @ x)[:, 0])


class LearnedWaves(nn.Module):
    """Positions that begin as sines and are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.fc = nn.Parameter(waves(LENGTH, WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(x + self.places))


class LearnedInput(nn.Module):
    """A learned scale and shift of the input, one number for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.randn(WIDTH))
        self.fc = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * self.scale + self.shift)


class SmallParts(nn.Module):
    """PReLU with one slope, layer scale, learned pooling weights, a loss weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(WIDTH, 8), nn.PReLU(), nn.Linear(8, 2)
        self.gamma, self.weights = nn.Parameter(1e-4 * torch.ones(8)), nn.Parameter(torch.ones(LENGTH) / LENGTH)
        self.log_variance = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc(x)) * self.gamma
        return self.out((h * self.weights[:, None]).sum(1)) * torch.exp(-self.log_variance)


# -- buffers that look like weights


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


VECTOR, SEQUENCE, IMAGE, SOUND, TABLE = (WIDTH,), (LENGTH, WIDTH), (3, 12, 12), (64,), (40,)

PARAMETERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "contrastive_head": (ContrastiveHead, VECTOR),
    "rezero": (ReZero, VECTOR),
    "swish": (Swish, VECTOR),
    "gem": (GeM, IMAGE),
    "learned_state": (LearnedState, SEQUENCE),
    "global_bias": (GlobalBias, VECTOR),
    "eye_linear": (EyeLinear, VECTOR),
    "dirac_conv": (DiracConv, IMAGE),
    "temperature": (Temperature, SEQUENCE),
    "zero_tables": (ZeroTables, SEQUENCE),
    "learned_waves": (LearnedWaves, SEQUENCE),
    "learned_input": (LearnedInput, VECTOR),
    "small_parts": (SmallParts, SEQUENCE),
}
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
