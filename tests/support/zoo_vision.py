"""Small torch modules of the kinds people train on images: written here, so that they are nobody's download."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo_text import heads_of, joined


class ViT(nn.Module):
    """Patches by convolution, a class token expanded over the batch, learned positions, torch's fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(16, eps=1e-6) for _ in range(3))
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fc1, self.fc2, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        qkv = self.qkv(self.norm1(x)).reshape(x.shape[0], 17, 3, 2, 8).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = x + self.proj(joined(F.scaled_dot_product_attention(q, k, v)))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(self.norm(x)[:, 0])


class SwinBlock(nn.Module):
    relative_position_index: Tensor
    attn_mask: Tensor

    def __init__(self, width: int, size: int, shift: int) -> None:
        super().__init__()
        self.size, self.shift, window = size, shift, 4
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.table = nn.Parameter(0.2 * torch.randn((2 * window - 1) ** 2, 2))
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        distance = places[:, :, None] - places[:, None] + window - 1
        self.register_buffer("relative_position_index", distance[0] * (2 * window - 1) + distance[1])
        region = torch.zeros(1, size, size, 1)
        for i, rows in enumerate((slice(-window), slice(-window, -shift), slice(-shift, None)) if shift else ()):
            for j, columns in enumerate((slice(-window), slice(-window, -shift), slice(-shift, None))):
                region[:, rows, columns] = 3 * i + j
        region = self.windows(region)[..., 0]
        self.register_buffer("attn_mask", (region[:, None] != region[:, :, None]).float() * -100)

    def windows(self, x: Tensor) -> Tensor:
        """[batch, size, size, width] -> [batch * windows, 16, width]."""
        n, width = self.size // 4, x.shape[-1]
        return x.view(-1, n, 4, n, 4, width).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, width)

    def forward(self, x: Tensor) -> Tensor:
        n, width = self.size // 4, x.shape[-1]
        h = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2)) if self.shift else self.norm1(x)
        q, k, v = (heads_of(part, 2) for part in self.qkv(self.windows(h)).chunk(3, dim=-1))
        bias = self.table[self.relative_position_index.view(-1)].view(16, 16, 2).permute(2, 0, 1)
        scores = q * (width // 2) ** -0.5 @ k.transpose(-2, -1) + bias[None]
        if self.shift:
            scores = (scores.view(-1, n * n, 2, 16, 16) + self.attn_mask[:, None][None]).view(-1, 2, 16, 16)
        h = self.proj(joined(scores.softmax(-1) @ v))
        h = h.view(-1, n, n, 4, 4, width).permute(0, 1, 3, 2, 4, 5).reshape(-1, self.size, self.size, width)
        x = x + (torch.roll(h, (self.shift, self.shift), (1, 2)) if self.shift else h)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Swin(nn.Module):
    """Shifted windows with a relative position table and a mask of regions; patches merged between the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.block1, self.block2, self.block3 = SwinBlock(8, 8, 0), SwinBlock(8, 8, 2), SwinBlock(16, 4, 0)
        self.norm, self.reduction = nn.LayerNorm(32), nn.Linear(32, 16, bias=False)
        self.head = nn.Linear(16, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.block2(self.block1(self.patch(image).permute(0, 2, 3, 1)))
        corners = (x[:, i::2, j::2] for j in (0, 1) for i in (0, 1))
        x = self.block3(self.reduction(self.norm(torch.cat(tuple(corners), dim=-1))))
        return self.head(x.mean((1, 2)))


def conv_norm(inputs: int, outputs: int, kernel: int = 3, **options: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv_norm(inputs, outputs, stride=stride), conv_norm(outputs, outputs)
        same = stride == 1 and inputs == outputs
        self.downsample = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.downsample(x))


class ResNet(nn.Module):
    """Stem with a max-pool, residual blocks with and without projection, adaptive pooling, BatchNorm throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 12, 2))
        self.fc = nn.Linear(12, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.blocks(self.stem(image)), 1), 1))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class MobileNet(nn.Module):
    """Inverted residuals: depthwise convolutions, squeeze and excite, hard-swish, ReLU6, dropout before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 8, stride=2), nn.Hardswish())
        self.expand, self.project = nn.Sequential(conv_norm(8, 16, 1), nn.ReLU6()), conv_norm(16, 8, 1)
        self.depthwise = nn.Sequential(conv_norm(16, 16, 5, groups=16), nn.Hardswish(), SqueezeExcite(16))
        self.last = nn.Sequential(conv_norm(8, 24, 1), nn.Hardswish())
        self.classifier = nn.Sequential(nn.Linear(24, 16), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        x = x + self.project(self.depthwise(self.expand(x)))
        return self.classifier(self.last(x).mean([2, 3]))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """7 x 7 depthwise, LayerNorm with channels last, a pointwise pair with GELU, a learned scale of the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 2, 2), LayerNorm2d(8, eps=1e-6))
        self.dwconv, self.norm = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(8, 32), nn.Linear(32, 8)
        self.gamma = nn.Parameter(0.5 * torch.ones(8))
        self.down = nn.Sequential(LayerNorm2d(8, eps=1e-6), nn.Conv2d(8, 16, 2, 2))
        self.final, self.head = nn.LayerNorm(16, eps=1e-6), nn.Linear(16, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        h = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        x = x + (self.gamma * self.pwconv2(F.gelu(self.pwconv1(h)))).permute(0, 3, 1, 2)
        return self.head(self.final(self.down(x).mean([-2, -1])))


class UNet(nn.Module):
    """Down twice, up by a transposed convolution and by bilinear interpolation, skips joined by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down1, self.down2 = conv_norm(3, 6), conv_norm(6, 8), conv_norm(8, 8)
        self.up1, self.join1 = nn.ConvTranspose2d(8, 8, 2, 2), conv_norm(16, 6)
        self.join2, self.shrink = conv_norm(12, 6), nn.Conv2d(6, 3, 3, padding=1)
        self.out, self.coarse = nn.Conv2d(9, 2, 1), nn.Conv2d(6, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        a = F.leaky_relu(self.enter(image), 0.1)
        b = F.relu(self.down1(F.max_pool2d(a, 2)))
        c = F.relu(self.down2(F.avg_pool2d(b, 2)))
        d = F.relu(self.join1(torch.cat((self.up1(c), b), 1)))
        up = F.interpolate(d, scale_factor=2.0, mode="bilinear", align_corners=False)
        e = F.elu(self.join2(torch.cat((up, a), 1)))
        coarse = F.interpolate(self.coarse(d), size=image.shape[2:], mode="nearest")
        return self.out(torch.cat((e, torch.sigmoid(self.shrink(e)) * coarse), 1))


class DenseNet(nn.Module):
    """Each layer reads all before it; norm before convolution; a transition by average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 4 * i) for i in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(8 + 4 * i, 4, 3, padding=1, bias=False) for i in range(3))
        self.transition, self.head = nn.Conv2d(20, 8, 1, bias=False), nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        features = [self.enter(image)]
        for norm, conv in zip(self.norms, self.convs, strict=False):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))))
        x = F.avg_pool2d(self.transition(F.relu(self.norms[3](torch.cat(features, 1)))), 2, 2)
        return self.head(F.relu(x).mean((2, 3)))


class Autoencoder(nn.Module):
    """A bottleneck of 6 numbers between convolutions and transposed ones; pixels by PixelShuffle; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.PReLU(8), nn.Conv2d(8, 8, 3, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(128, 6)
        )
        self.grow = nn.Linear(6, 128)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1),
            nn.InstanceNorm2d(6, affine=True),
            nn.SiLU(),
            nn.Conv2d(6, 12, 3, padding=1, padding_mode="reflect"),
            nn.PixelShuffle(2),
        )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(image)
        return self.decoder(self.grow(code).view(-1, 8, 4, 4)), code


class Detector(nn.Module):
    """A box regression and a classification for each of 16 places; suppression comes after it, in the file."""

    anchors: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_norm(3, 8, stride=2), nn.ReLU(), conv_norm(8, 12, stride=2), nn.ReLU())
        self.boxes, self.scores = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(12, 3, 3, padding=1)
        centre = (torch.arange(4) + 0.5) / 4
        y, x = torch.meshgrid(centre, centre, indexing="ij")
        self.register_buffer("anchors", torch.stack((y, x), -1).reshape(1, 16, 2))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(image)
        offset, extent = self.boxes(x).flatten(2).transpose(1, 2).split(2, dim=-1)
        centre, half = self.anchors + 0.1 * offset.tanh(), 0.2 * extent.sigmoid()
        return torch.cat((centre - half, centre + half), -1), self.scores(x).flatten(2).sigmoid()


class DETR(nn.Module):
    """torch's own nn.Transformer from image features to learned queries; boxes and classes for each query."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 16, 1))
        self.queries, self.places = nn.Parameter(torch.randn(5, 16)), nn.Parameter(torch.randn(1, 16, 16))
        self.transformer = nn.Transformer(16, 2, 1, 1, 24, dropout=0.0, batch_first=True)
        self.classes, self.boxes = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(image).flatten(2).transpose(1, 2) + self.places
        h = self.transformer(x, self.queries[None].repeat(x.shape[0], 1, 1))
        return self.classes(h), self.boxes(h).sigmoid()


class Siamese(nn.Module):
    """One encoder for two images; how alike they are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ELU(), nn.Flatten(), nn.LazyLinear(6))
        self.encoder(torch.zeros(1, 3, 16, 16))
        self.scale = nn.Parameter(torch.tensor([2.0, 1.0]))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = F.normalize(self.encoder(left), dim=-1), F.normalize(self.encoder(right), dim=-1)
        return torch.stack(((a * b).sum(-1), torch.linalg.vector_norm(a - b, dim=-1)), -1) * self.scale


class CRNN(nn.Module):
    """Reads a line of text: convolutions squeeze the height away, an LSTM runs along the width."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_norm(3, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, (8, 3), padding=(0, 1)))
        self.rnn, self.head = nn.LSTM(8, 6, bidirectional=True), nn.Linear(12, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.body(image)).squeeze(2).permute(2, 0, 1)
        return self.head(self.rnn(x)[0]).log_softmax(-1)
