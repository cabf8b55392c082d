"""Jobs with words: classes of texts with a tokenizer of one's own, a language model, and adapters on it."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import torch
from safetensors.torch import load_model, save_model
from tokenizers import Tokenizer
from torch import nn
from torch.nn.utils import parametrize

from tests.stories.story import Array, Recipe, Story, Trained, export, fit, split
from tests.support.texts import END, bert_tokenizer, gpt2_tokenizer

LENGTH, WIDTH, HEADS = 64, 64, 4
TOKENS = 600


class Block(nn.Module):
    """Attention and a network, each behind a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.attention(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.network(self.between(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Two blocks on token and position embeddings."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.first, self.second = Block(), Block()
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, outputs)

    def states(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.last(self.second(self.first(x, mask), mask))  # type: ignore[no-any-return]


class Classifier(Transformer):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.states(input_ids, attention_mask[:, None, None, :] > 0)
        weights = attention_mask[:, :, None].to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))  # type: ignore[no-any-return]


class LanguageModel(Transformer):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1])
        return self.head(self.states(input_ids, places[:, None] >= places[None]))  # type: ignore[no-any-return]


# -- texts: from which package of Python's library is a docstring?


PACKAGES = ("asyncio", "email", "importlib", "logging", "unittest")


def _docstrings(package: str) -> Iterator[str]:
    for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = " ".join((ast.get_docstring(node) or "").split())
                if len(text.split()) > 5:
                    yield text[:300]


def _write_docstrings(folder: Path) -> None:
    rows = [(text, package) for package in PACKAGES for text in dict.fromkeys(_docstrings(package))]
    table = pd.DataFrame(rows, columns=["text", "package"])
    (folder / "docstrings").mkdir()
    for part, places in split(len(table), 300).items():
        table.iloc[places].to_csv(folder / "docstrings" / f"{part}.csv", index=False)
    bert_tokenizer(folder / "tokenizer.json", size=TOKENS)
    example = (torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64))
    names: dict[str, Any] = {"input_names": ["input_ids", "attention_mask"], "output_names": ["logits"]}
    dims = {0: "batch", 1: "length"}
    export(Classifier(len(PACKAGES)), example, folder / "model.onnx", dynamic_shapes=(dims, dims), **names)


def _score_docstrings(trained: Trained) -> Array:
    table = pd.read_csv(trained.folder / "docstrings" / "val.csv")
    return np.asarray(trained.predicted("docstrings/val.csv")["class"] == table["package"])


def _docstrings_by_hand(folder: Path, recipe: Recipe) -> Array:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)

    def rows(part: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        table = pd.read_csv(folder / "docstrings" / f"{part}.csv")
        encoded = tokenizer.encode_batch(list(table["text"]))
        ids, masks = ([getattr(each, name) for each in encoded] for name in ("ids", "attention_mask"))
        return torch.tensor(ids), torch.tensor(masks), torch.tensor([PACKAGES.index(name) for name in table["package"]])

    module = Classifier(len(PACKAGES))
    fit(module, rows("train"), nn.functional.cross_entropy, recipe)
    *inputs, labels = rows("val")
    with torch.no_grad():
        return np.asarray(module(*inputs).argmax(1) == labels)


# -- a language model on text files


def _texts(folder: Path, part: str) -> list[str]:
    return [path.read_text() for path in sorted((folder / "help" / part).iterdir())]


def _windows(folder: Path, part: str) -> torch.Tensor:
    """Return the tokens of all files, which an end follows, in windows of the model's length and one more."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    tokens = torch.tensor([at for text in _texts(folder, part) for at in (*tokenizer.encode(text).ids, end)])
    return tokens.unfold(0, LENGTH + 1, LENGTH)


def _write_help(folder: Path) -> None:
    gpt2_tokenizer(folder / "tokenizer.json", size=TOKENS)
    names = sorted(topics)
    for part, chosen in (("train", names[:40]), ("val", names[40:50])):
        (folder / "help" / part).mkdir(parents=True)
        for name in chosen:
            (folder / "help" / part / f"{name}.txt").write_text(topics[name])
    dims = {0: "batch", 1: "length"}
    example = (torch.ones(2, 9, dtype=torch.int64),)
    names_of: dict[str, Any] = {"input_names": ["input_ids"], "output_names": ["logits"]}
    export(LanguageModel(TOKENS), example, folder / "model.onnx", dynamic_shapes=(dims,), **names_of)


def _likelihoods(logits: torch.Tensor, labels: torch.Tensor) -> Array:
    """A window scores the mean logarithm of the probability of its tokens, in nats."""
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return -losses.mean(1).numpy()


def _score_help(trained: Trained) -> Array:
    session = onnxruntime.InferenceSession(str(trained.model), providers=["CPUExecutionProvider"])
    windows = _windows(trained.folder, "val")
    logits = session.run(["logits"], {"input_ids": windows[:, :-1].numpy()})[0]
    return _likelihoods(torch.from_numpy(np.asarray(logits)), windows[:, 1:])


def _next_tokens(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.transpose(1, 2), labels)


def _help_by_hand(folder: Path, recipe: Recipe) -> Array:
    train, held_out = _windows(folder, "train"), _windows(folder, "val")
    module = LanguageModel(TOKENS)
    fit(module, (train[:, :-1], train[:, 1:]), _next_tokens, recipe)
    with torch.no_grad():
        return _likelihoods(module(held_out[:, :-1]), held_out[:, 1:])


# -- adapters: a trained language model learns other texts by low-rank pairs beside its weights


RANK = 8
ADAPTED = ("attention", "out", "network.0", "network.2")


class LowRank(nn.Module):
    """A weight and a product of two matrices, which is 0 at first."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(RANK, columns) / RANK), nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 2 * self.b @ self.a


def _pretrained(folder: Path) -> LanguageModel:
    """Return the model after three epochs of the texts of `help()`."""
    module = LanguageModel(TOKENS)
    windows = _windows(folder / "before", "train")
    fit(module, (windows[:, :-1], windows[:, 1:]), _next_tokens, Recipe(400, 8, 1e-3))
    return module


def _write_other_texts(folder: Path) -> None:
    (folder / "before").mkdir()
    _write_help(folder / "before")
    gpt2_tokenizer(folder / "tokenizer.json", size=TOKENS)
    for package in PACKAGES:
        path = folder / "help" / ("val" if package == "asyncio" else "train") / f"{package}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(_docstrings(package)))
    module = _pretrained(folder)
    save_model(module, str(folder / "before.safetensors"))
    names: dict[str, Any] = {"input_names": ["input_ids"], "output_names": ["logits"]}
    example = (torch.ones(2, 9, dtype=torch.int64),)
    export(module, example, folder / "model.onnx", dynamic_shapes=({0: "batch", 1: "length"},), **names)


def _adapters_by_hand(folder: Path, recipe: Recipe) -> Array:
    module = LanguageModel(TOKENS)
    load_model(module, str(folder / "before.safetensors"))
    module.requires_grad_(False)
    for block in (module.first, module.second):
        for name in ADAPTED:
            layer = block.get_submodule(name)
            parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))  # type: ignore[misc]
    train, held_out = _windows(folder, "train"), _windows(folder, "val")
    fit(module, (train[:, :-1], train[:, 1:]), _next_tokens, recipe)
    with torch.no_grad():
        return _likelihoods(module(held_out[:, :-1]), held_out[:, 1:])


ADAPTERS = (
    'lora.weights=["*.attention.weight", "*.out.weight", "*.network.*.weight"]',
    f"lora.rank={RANK}",
    f"lora.alpha={2 * RANK}",
    "optimizer.learning_rate=2e-3",
    "train.num_epochs=4",
)
WORDS = {
    "texts": Story(
        _write_docstrings,
        "docstrings",
        _score_docstrings,
        _docstrings_by_hand,
        given=("train.num_epochs=10",),
        at_least=0.5,
    ),
    "a language model": Story(
        _write_help, "help", _score_help, _help_by_hand, given=("train.num_epochs=3",), at_least=-5.0
    ),
    "adapters": Story(_write_other_texts, "help", _score_help, _adapters_by_hand, given=ADAPTERS, at_least=-4.93),
}
