"""Small torch modules whose parameters look like constants: `PARAMETERS`, with the shape of one input sample."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo_buffers import IMAGE, LENGTH, SEQUENCE, VECTOR, WIDTH, waves


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
