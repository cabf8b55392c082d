"""Small torch modules for tables, sound and graphs: written here, so that they are nobody's download."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.support.zoo_text import HEADS, heads_of, joined


class TabularMLP(nn.Module):
    """Numbers through BatchNorm1d, categories through an embedding for each column, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.columns = nn.ModuleList(nn.Embedding(size, 3) for size in (4, 7, 3))
        self.fc1, self.norm1, self.drop = nn.Linear(14, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.fc2 = nn.Linear(16, 2)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        columns = [column(categories[:, i] % column.num_embeddings) for i, column in enumerate(self.columns)]
        x = torch.cat((self.norm(numbers), *columns), dim=1)
        return self.fc2(self.drop(self.norm1(F.relu(self.fc1(x)))))


class AudioNet(nn.Module):
    """Dilated gated convolutions in one dimension, GroupNorm, weight normalisation; mean and deviation at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 8, 5, stride=2, padding=2)
        self.dilated = nn.ModuleList(nn.Conv1d(8, 16, 3, padding=2**i, dilation=2**i) for i in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(2))
        self.last = parametrizations.weight_norm(nn.Conv1d(8, 8, 1))
        self.head = nn.Linear(16, 3)

    def forward(self, sound: Tensor) -> Tensor:
        x = self.enter(sound[:, None])
        for conv, norm in zip(self.dilated, self.norms, strict=True):
            x = x + F.glu(conv(norm(x)), dim=1)
        x = F.mish(self.last(F.avg_pool1d(x, 2)))
        return self.head(torch.cat((x.mean(-1), torch.sqrt(x.var(-1, unbiased=False) + 1e-5)), -1))


class SpeechEncoder(nn.Module):
    """Whisper's: two convolutions with GELU, sinusoidal positions as a table, pre-norm attention without a key bias."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(6, 16, 3, padding=1), nn.Conv1d(16, 16, 3, stride=2, padding=1)
        angles = torch.arange(8.0)[:, None] * 10000 ** -(torch.arange(8.0)[None] / 7)
        self.register_buffer("places", torch.cat((angles.sin(), angles.cos()), 1))
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.out, self.attn_norm, self.mlp_norm = nn.Linear(16, 16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.final = nn.LayerNorm(16)

    def forward(self, mel: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).permute(0, 2, 1) + self.places
        h, scale = self.attn_norm(x), 8**-0.25
        q, k, v = (heads_of(project(h), HEADS) for project in (self.query, self.key, self.value))
        x = x + self.out(joined(((q * scale) @ (k * scale).transpose(-1, -2)).softmax(-1) @ v))
        return self.final(x + self.mlp(self.mlp_norm(x)))


class GraphNet(nn.Module):
    """Messages along edges, added up at their targets; the mean of the nodes' neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.keep, self.head = nn.Linear(8, 8), nn.Linear(4, 8), nn.Linear(8, 3)
        self.enter = nn.Linear(4, 8)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        x = F.relu(self.enter(nodes))
        messages = self.message(x).index_select(0, source)
        total = torch.zeros_like(x).index_add(0, target, messages)
        count = torch.zeros_like(x[:, :1]).index_add(0, target, torch.ones_like(messages[:, :1]))
        return self.head(F.relu(total / count.clamp(min=1.0) + self.keep(nodes)))


class Recommender(nn.Module):
    """Users and items as embeddings; factorisation-machine interactions by a batched product, and a wide part."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.dense = nn.Embedding(9, 6), nn.Embedding(11, 6), nn.Linear(5, 6)
        self.wide, self.top = nn.Linear(5, 1), nn.Linear(3, 1)

    def forward(self, user: Tensor, items: Tensor, numbers: Tensor) -> Tensor:
        basket = self.item(items).mean(1)
        stack = torch.stack((self.user(user), basket, self.dense(numbers)), 1)
        products = torch.bmm(stack, stack.transpose(1, 2))
        pairs = products[:, [0, 0, 1], [1, 2, 2]]
        return torch.sigmoid(self.top(pairs) + self.wide(numbers)).squeeze(-1)
