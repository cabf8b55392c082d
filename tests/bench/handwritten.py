"""Transformers as one writes them by hand in PyTorch: fused QKV, scaled_dot_product_attention, LayerNorm, GELU.

The benchmarks train them beside what Onward makes of their ONNX file: `exported`, or for GPT-2 the reference model.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn

from onward.trainer.onnx_graph.examples.reference_models import build_gpt2


class Block(nn.Module):
    """A transformer layer: pre-norm or post-norm, causal or with a padding mask."""

    def __init__(self, width: int, heads: int, *, causal: bool, pre: bool, approximate: str) -> None:
        super().__init__()
        self.heads, self.causal, self.pre, self.approximate = heads, causal, pre, approximate
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        def mlp(x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x), approximate=self.approximate))  # type: ignore[no-any-return]

        if self.pre:
            x = x + self.attend(self.norm_1(x), mask)
            return x + mlp(self.norm_2(x))
        x = self.norm_1(x + self.attend(x, mask))
        return self.norm_2(x + mlp(x))  # type: ignore[no-any-return]


class GPT2(nn.Module):
    """GPT-2: input_ids [B, T] -> logits [B, T, vocabulary]; the output layer is the token embedding."""

    def __init__(self, *, vocabulary: int, length: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        block = {"causal": True, "pre": True, "approximate": "tanh"}
        self.blocks = nn.ModuleList(Block(width, heads, **block) for _ in range(layers))  # type: ignore[arg-type]
        self.norm = nn.LayerNorm(width)
        self.tokens.weight.data.mul_(0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class BERT(nn.Module):
    """BERT with a classifier: tokens, attention_mask [B, T] -> [B, classes]; 0 in the mask is padding."""

    def __init__(self, *, vocabulary: int, length: int, layers: int, heads: int, width: int, classes: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        block = {"causal": False, "pre": False, "approximate": "none"}
        self.blocks = nn.ModuleList(Block(width, heads, **block) for _ in range(layers))  # type: ignore[arg-type]
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.norm(x)
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for block in self.blocks:
            x = block(x, mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))  # type: ignore[no-any-return]


REFERENCE_NAMES = {
    "ln_1": "norm_1",
    "attn.c_attn": "qkv",
    "attn.c_proj": "out",
    "ln_2": "norm_2",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}
"""Layer in reference_models.build_gpt2 -> layer in `Block`."""


def gpt2_model(sizes: Mapping[str, int]) -> onnx.ModelProto:
    """Return the reference GPT-2 without dropout; `sizes` are the arguments of `GPT2`."""
    return build_gpt2(
        vocab_size=sizes["vocabulary"],
        sequence_length=sizes["length"],
        num_layers=sizes["layers"],
        num_heads=sizes["heads"],
        width=sizes["width"],
        dropout=0.0,
    )


def gpt2_from(model: onnx.ModelProto, sizes: Mapping[str, int]) -> GPT2:
    """Return the hand-written GPT-2 with the weights of `gpt2_model`."""
    stored = {proto.name: proto for proto in model.graph.initializer}

    def read(name: str) -> Tensor:
        return torch.from_numpy(numpy_helper.to_array(stored[f"transformer.{name}"]).copy())

    weights = {"tokens.weight": read("wte.weight"), "positions.weight": read("wpe.weight")}
    for theirs, ours in [("ln_f", "norm")] + [
        (f"h.{layer}.{theirs}", f"blocks.{layer}.{ours}")
        for layer in range(sizes["layers"])
        for theirs, ours in REFERENCE_NAMES.items()
    ]:
        weight = read(f"{theirs}.weight")
        # the file stores the weight of a linear layer as [in, out]
        weights[f"{ours}.weight"] = weight.T.contiguous() if weight.ndim == 2 else weight
        weights[f"{ours}.bias"] = read(f"{theirs}.bias")
    with torch.device("meta"):  # initial values would take longer than the rest
        module = GPT2(**sizes)
    module.load_state_dict(weights, assign=True)
    return module.requires_grad_()


def exported(
    module: nn.Module, inputs: Mapping[str, Tensor], *, exporter: str = "legacy-14", convolutional: bool = False
) -> onnx.ModelProto:
    """Return the module as torch's exporter writes it, with a free batch dimension; its weights keep their values.

    inputs: two samples. exporter: `legacy` or `dynamo`, and the opset. The older one spells attention and
    normalisation out at opset 14. convolutional: exported for training, or the file has no BatchNormalization left.
    """
    kind, opset = exporter.split("-")
    options: dict[str, Any] = {}
    if kind == "legacy":
        options["dynamic_axes"] = {name: {0: "batch"} for name in inputs}
        if convolutional:
            options |= {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    else:
        batch = torch.export.Dim("batch")
        options = {"dynamic_shapes": tuple({0: batch} for _ in inputs), "optimize": not convolutional}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the exporters warn of is not measured
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            module.train(convolutional),
            tuple(inputs.values()),
            str(path),
            dynamo=kind == "dynamo",
            opset_version=int(opset),
            input_names=list(inputs),
            verbose=False,
            **options,
        )
        return onnx.load(path)
