"""Write albert-dynamo.onnx, ALBERT by torch's default exporter, and albert-dynamo.npz, the gradients of its module.

    python -m venv env && env/bin/pip install torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 transformers==4.57.6
    env/bin/python tests/support/foreign/make_albert.py

The matrices have more than 1,024 elements, so that the exporter stores them once for each call of the layer.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertForMaskedLM

FOLDER = Path(__file__).resolve().parent


class Logits(nn.Module):
    """The logits of a language model, without the dictionary around them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.model(input_ids=ids).logits
        return result


def main() -> None:
    """Write both files."""
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=40,
        embedding_size=33,
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=16,
    )
    module = Logits(AlbertForMaskedLM(config)).eval()
    for parameter in module.parameters():
        if parameter.ndim == 1:  # of zeros or ones the exporter would merge all
            nn.init.normal_(parameter, 0.5, 0.2)
    ids = torch.randint(0, 40, (3, 7))
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(module, (ids[:2],), dynamo=True, dynamic_shapes=(dims,), verbose=False)
    assert program is not None
    model = program.model_proto
    for node in model.graph.node:  # most of the file
        kept = [entry for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    onnx.save(model, FOLDER / "albert-dynamo.onnx")
    module(ids).square().mean().backward()
    gradients = {
        name: parameter.grad.numpy()
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    np.savez_compressed(FOLDER / "albert-dynamo.npz", ids=ids.numpy(), **gradients)


if __name__ == "__main__":
    main()
