"""What the stories share: the record of one job, an export as the pages advise it, and the training loop by hand."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.workshop import Workshop

Array = np.ndarray[Any, np.dtype[Any]]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """What the loop by hand has in common with the run: the number of updates, their rows and the learning rate."""

    steps: int
    batch: int
    learning_rate: float


@dataclass(frozen=True)
class Trained:
    """What a run has left: the folder with the data, and the trained file."""

    workshop: Workshop
    folder: Path
    model: Path

    def predicted(self, data: str, model: Path | None = None) -> pd.DataFrame:
        """Return what `onward predict` writes about data of the folder."""
        out = self.folder / "predicted.csv"
        self.workshop.onward(
            "predict", str(model or self.model), str(self.folder / data), "-o", str(out), "--overwrite"
        )
        return pd.read_csv(out)


@dataclass(frozen=True)
class Story:
    """One job: the files of a new user, the commands, and the same model trained by hand.

    A score is a number for each held-out row, of which more is better: 1 or 0 for a class, an error with a minus.
    """

    write: Callable[[Path], None]
    """Writes model.onnx and the data into a folder."""
    data: str
    """The data, as a path in the folder: what `onward init model.onnx` is given."""
    scores: Callable[[Trained], Array]
    """The score of each held-out row by the trained file."""
    by_hand: Callable[[Path, Recipe], Array]
    """The same of the loop by hand."""
    given: tuple[str, ...] = ()
    """What the user adds to `onward init`, as overrides."""
    variants: tuple[str, ...] = ()
    """Smaller files that the run writes beside the trained one."""
    config: str = ""
    """The configuration, for what init does not propose."""
    at_least: float = -np.inf
    """A mean score that nothing untrained has."""


def export(module: torch.nn.Module, example: tuple[Any, ...], path: Path, **names: Any) -> None:
    """Write a module with any batch size, as docs/how-to/prepare-a-model.md advises."""
    names.setdefault("dynamic_shapes", tuple({0: "batch"} for _ in example))
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            module.train(), example, str(path), dynamo=True, optimize=False, external_data=False, verbose=False, **names
        )


def fit(module: torch.nn.Module, rows: Sequence[torch.Tensor], loss: Loss, recipe: Recipe) -> None:
    """Train by hand: AdamW, the rate falls by a cosine, shuffled batches. The last of `rows` are the labels."""
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads on a busy machine wait for each other most of the time
    optimizer = torch.optim.AdamW(module.parameters(), recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    loader = DataLoader(TensorDataset(*rows), recipe.batch, shuffle=True)
    epochs = itertools.chain.from_iterable(loader for _ in itertools.count())
    module.train()
    for *inputs, labels in itertools.islice(epochs, recipe.steps):
        optimizer.zero_grad()
        loss(module(*inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    torch.set_num_threads(threads)
    module.eval()


def split(rows: int, held_out: int, seed: int = 0) -> dict[str, Array]:
    """Return which rows are trained on ("train") and which are held out ("val")."""
    order = np.random.default_rng(seed).permutation(rows)
    return {"train": order[held_out:], "val": order[:held_out]}
