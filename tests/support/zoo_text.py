"""Small torch modules of the kinds people train on sequences: written here, so that they are nobody's download.

Each spells its matter as real code does: fused or split projections, masks as buffers or computed, tied heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 16, 2, 16


def heads_of(x: Tensor, heads: int) -> Tensor:
    """[batch, length, width] -> [batch, heads, length, width / heads]."""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """The way back from `heads_of`."""
    return x.transpose(1, 2).flatten(2)


class Conv1D(nn.Module):
    """GPT-2's linear layer: its weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.weight.shape[1])


class GPT2Block(nn.Module):
    causal: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = Conv1D(WIDTH, 3 * WIDTH), Conv1D(WIDTH, WIDTH)
        self.c_fc, self.mlp_proj = Conv1D(WIDTH, 4 * WIDTH), Conv1D(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("causal", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(part, HEADS) for part in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        length = x.shape[1]
        scores = scores.masked_fill(~self.causal[:, :, :length, :length], torch.finfo(scores.dtype).min)
        x = x + self.drop(self.c_proj(joined(self.drop(scores.softmax(-1)) @ v)))
        return x + self.drop(self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")))


class GPT2(nn.Module):
    """Pre-norm decoder: learned positions, fused qkv, a mask buffer, tanh-GELU, the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(GPT2Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class BERTLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm_after, self.drop = nn.LayerNorm(WIDTH, eps=1e-12), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (heads_of(project(x), HEADS) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm(x + self.drop(self.output(joined(mixed))))
        return self.norm_after(x + self.drop(self.down(F.gelu(self.up(x)))))


class BERT(nn.Module):
    """Post-norm encoder with a padding mask, token types, a pooler; two outputs."""

    position_ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), nn.Embedding(2, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("position_ids", torch.arange(LENGTH)[None])
        self.norm, self.drop = nn.LayerNorm(WIDTH, eps=1e-12), nn.Dropout(0.1)
        self.layer = nn.ModuleList(BERTLayer() for _ in range(2))
        self.pooler, self.classifier = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.tagger = nn.Linear(WIDTH, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(input_ids) + self.types(token_type_ids)
        x = self.drop(self.norm(x + self.positions(self.position_ids[:, : input_ids.shape[1]])))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layer:
            x = layer(x, mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0]))), self.tagger(x)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class LlamaBlock(nn.Module):
    def __init__(self, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.input_norm, self.post_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.mlp = mlp or GatedMLP()

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor) -> Tensor:
        h = self.input_norm(x)
        q = rotated(heads_of(self.q_proj(h), 4), cosine, sine)
        k = rotated(heads_of(self.k_proj(h), 2), cosine, sine)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, heads_of(self.v_proj(h), 2)))
        scores = (q @ k.transpose(2, 3)) * (q.shape[-1] ** -0.5) + mask
        mixed = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
        x = x + self.o_proj(joined(mixed))
        return x + self.mlp(self.post_norm(x))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    """Decoder with grouped-query attention, rotary positions, RMSNorm; `mlp` makes each block's feed-forward part."""

    inv_freq: Tensor

    def __init__(self, mlp: type[nn.Module] = GatedMLP) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(LlamaBlock(mlp()) for _ in range(2))
        self.norm = RMSNorm(WIDTH)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, length = self.embed(input_ids), input_ids.shape[1]
        angles = torch.arange(length, device=x.device).float()[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)[None, None]
        mask = torch.full((length, length), float("-inf"), device=x.device).triu(1)[None, None]
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), mask)
        return self.lm_head(self.norm(x))


class DenseExperts(nn.Module):
    """Every expert on every token, weighted by the normalised top two of the router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(GatedMLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        values, chosen = torch.topk(self.router(x).softmax(-1), 2, dim=-1)
        share = torch.zeros(*x.shape[:-1], 4, device=x.device).scatter(
            -1, chosen, values / values.sum(-1, keepdim=True)
        )
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * share[..., None, :]).sum(-1)


class GatheredExperts(nn.Module):
    """Each token gathers the matrices of its two experts; the results are scattered back by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 24) / 4)
        self.down = nn.Parameter(torch.randn(4, 24, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        values, chosen = torch.topk(self.router(flat), 2, dim=-1)
        share, which = values.softmax(-1).reshape(-1, 1), chosen.reshape(-1)
        token = torch.arange(flat.shape[0], device=x.device)[:, None].expand(-1, 2).reshape(-1)
        hidden = F.relu(torch.bmm(flat[token][:, None], self.up[which]))
        mixed = torch.bmm(hidden, self.down[which])[:, 0] * share
        return torch.zeros_like(flat).index_add(0, token, mixed).reshape(x.shape)


def relative_bucket(length: int, *, both_ways: bool) -> Tensor:
    """T5's logarithmic distance buckets, 8 of them: [length, length]."""
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]
    offset = (distance > 0).long() * 4 if both_ways else torch.zeros_like(distance)
    distance = distance.abs() if both_ways else (-distance).clamp(min=0)
    exact = 2 if both_ways else 4
    far = exact + (torch.log(distance.clamp(min=1) / exact) / math.log(8) * exact).long()
    return offset + torch.where(distance < exact, distance, far.clamp(max=2 * exact - 1))


class T5Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor, bias: Tensor) -> Tensor:
        q, k, v = heads_of(self.q(x), HEADS), heads_of(self.k(context), HEADS), heads_of(self.v(context), HEADS)
        return self.o(joined((q @ k.transpose(3, 2) + bias).softmax(-1) @ v))


class T5Stack(nn.Module):
    def __init__(self, *, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.bias = nn.Embedding(8, HEADS)
        self.attention, self.norm = T5Attention(), RMSNorm(WIDTH)
        self.cross, self.cross_norm = (T5Attention(), RMSNorm(WIDTH)) if decoder else (None, None)
        self.wi, self.wo = nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, WIDTH, bias=False)
        self.mlp_norm, self.final = RMSNorm(WIDTH), RMSNorm(WIDTH)

    def forward(self, x: Tensor, context: Tensor | None, mask: Tensor) -> Tensor:
        length = x.shape[1]
        table = self.bias(relative_bucket(LENGTH, both_ways=not self.decoder).to(x.device)[:length, :length])
        bias = table.permute(2, 0, 1)[None]
        if self.decoder:
            bias = bias + torch.full((length, length), -1e9, device=x.device).triu(1)
        h = self.norm(x)
        x = x + self.attention(h, h, bias if self.decoder else bias + mask)
        if self.cross is not None and self.cross_norm is not None and context is not None:
            x = x + self.cross(self.cross_norm(x), context, mask)
        return self.final(x + self.wo(F.relu(self.wi(self.mlp_norm(x)))))


class T5(nn.Module):
    """Encoder and decoder with relative position buckets and cross attention; one embedding feeds both and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = T5Stack(decoder=False), T5Stack(decoder=True)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        mask = (1.0 - attention_mask[:, None, None].float()) * -1e9
        context = self.encoder(self.shared(input_ids), None, mask)
        x = self.decoder(self.shared(decoder_input_ids), context, mask)
        return self.lm_head(x * WIDTH**-0.5)


class RecurrentTagger(nn.Module):
    """Two layers of both directions over embeddings; a tag for each token."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = kind(WIDTH, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.drop, self.tag = nn.Dropout(0.1), nn.Linear(12, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.tag(self.drop(self.rnn(self.embed(input_ids))[0]))


class LSTMLanguageModel(nn.Module):
    """One direction, time first, its states come in and go out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, (h, c) = self.rnn(self.embed(input_ids).transpose(0, 1), (h, c))
        return self.head(x).transpose(0, 1), h, c


class SelectiveScan(nn.Module):
    """Mamba's mixer, unrolled over 6 steps: depthwise causal convolution, input-dependent state space, gate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, 8), nn.RMSNorm(8, eps=1e-5)
        self.in_proj, self.out_proj = nn.Linear(8, 32, bias=False), nn.Linear(16, 8, bias=False)
        self.conv1d = nn.Conv1d(16, 16, 4, groups=16, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(16, 2 + 2 * 4, bias=False), nn.Linear(2, 16)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, 5.0).repeat(16, 1)) + 0.1 * torch.randn(16, 4))
        self.D = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        residual = self.embed(input_ids)
        x, gate = self.in_proj(self.norm(residual)).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :6]).transpose(1, 2)
        step, into, out = self.x_proj(x).split([2, 4, 4], dim=-1)
        step = F.softplus(self.dt_proj(step))
        decay = torch.exp(step[..., None] * -torch.exp(self.A_log))
        driven = step[..., None] * into[:, :, None, :] * x[..., None]
        state, outputs = torch.zeros_like(driven[:, 0]), []
        for t in range(6):
            state = decay[:, t] * state + driven[:, t]
            outputs.append((state * out[:, t, None, :]).sum(-1))
        y = (torch.stack(outputs, dim=1) + x * self.D) * F.silu(gate)
        return self.head(residual + self.out_proj(y))


class TransformerClassifier(nn.Module):
    """torch's own nn.TransformerEncoder with a padding mask; the mean over what is not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        share = attention_mask[..., None].to(x.dtype)
        return self.head((x * share).sum(1) / share.sum(1).clamp(min=1))
