"""Write optimum-*.onnx: transformers' models, small and with random weights, exported by optimum.

    python -m venv env && env/bin/pip install torch==2.13.0 transformers==4.57.6 optimum-onnx==0.1.0 onnx==1.23.2
    env/bin/python tests/support/foreign/make_optimum.py

optimum merges equal tensors and ties embeddings and heads again.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from optimum.exporters.onnx import onnx_export_from_model
from record import Changed, Written, write_files

VOCABULARY, LENGTH = 64, 10
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LAYERS = {**SMALL, "intermediate_size": 32, "max_position_embeddings": 16, "num_labels": 4}
TOKENS = {"shape": [LENGTH], "below": VOCABULARY}
MASK = {"shape": [LENGTH], "below": 2}
BERT_INPUTS: dict[str, Any] = {"input_ids": TOKENS, "attention_mask": MASK, "token_type_ids": MASK}

MODELS: dict[str, tuple[str, str, dict[str, Any], type, Any]] = {
    "bert": (
        "BERT",
        "text-classification",
        BERT_INPUTS,
        transformers.BertForSequenceClassification,
        transformers.BertConfig(**LAYERS),
    ),
    "albert": (
        "ALBERT",
        "text-classification",
        BERT_INPUTS,
        transformers.AlbertForSequenceClassification,
        transformers.AlbertConfig(**LAYERS, embedding_size=8),
    ),
    "distilbert": (
        "DistilBERT, words tagged",
        "token-classification",
        {"input_ids": TOKENS, "attention_mask": MASK},
        transformers.DistilBertForTokenClassification,
        transformers.DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=32,
            max_position_embeddings=16,
            num_labels=4,
        ),
    ),
    "vit": (
        "ViT",
        "image-classification",
        {"pixel_values": {"shape": [1, 8, 8]}},
        transformers.ViTForImageClassification,
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_labels=10,
        ),
    ),
}
"""Name -> (architecture, task, inputs, class, configuration)."""


def export(name: str, path: Path, changed: Changed) -> None:
    """Write one of the models."""
    _, task, _, kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.05 * torch.rand_like(tensor)
        for tensor in {"": [], "trainable": model.parameters(), "others": model.buffers()}[changed]:
            if tensor.is_floating_point():
                tensor += 0.1 * torch.rand_like(tensor)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        onnx_export_from_model(model, Path(folder), task=task, opset=17, do_validation=False)
        shutil.copyfile(Path(folder) / "model.onnx", path)


if __name__ == "__main__":
    files = [
        Written(name, architecture, inputs, functools.partial(export, name))
        for name, (architecture, _, inputs, _, _) in MODELS.items()
    ]
    write_files("optimum", ("optimum-onnx", "transformers", "torch", "onnx"), files)
