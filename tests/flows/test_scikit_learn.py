"""Whole runs of scikit-learn's pipelines: the loss falls, and the labels that the written file predicts get better."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from sklearn.datasets import load_digits

from onward.trainer.diagnostics.diff import compare
from tests.support.foreign_files import FOLDER
from tests.support.workshop import Workshop

pytestmark = [
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(900),
]

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.close()


def trained(workshop: Workshop, file: Path, columns: dict[str, Array], **sections: dict[str, Any]) -> dict[str, Any]:
    """Run `onward run` on columns of an .npz file and return its result."""
    np.savez(workshop.root / "data.npz", **columns)
    sections["model"] = {"path": str(file), **sections["model"]}
    sections["data"] = {"source": "data.npz", "label": "label", **sections.get("data", {})}
    sections["train"] = {"global_batch_size": 64, "num_epochs": 5}
    sections["launch"] = {"device": "cpu", "threads_per_rank": 1}
    lines = [
        f"[{name}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in section.items())
        for name, section in sections.items()
    ]
    (workshop.root / "config.toml").write_text("\n".join(lines))
    return workshop.onward("run", str(workshop.root / "config.toml"))


def predicted(file: Path, feed: dict[str, Array]) -> list[Any]:
    """The first output of a file, its labels, under onnxruntime."""
    return list(onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, feed)[0])


def assert_better(outcome: dict[str, Any], file: Path, feed: dict[str, Array], labels: list[Any]) -> None:
    before, after = (
        np.mean([a == b for a, b in zip(predicted(path, feed), labels, strict=True)])
        for path in (file, Path(outcome["model"]))
    )
    assert outcome["after"]["evaluation/loss"] < outcome["before"]["evaluation/loss"]
    assert outcome["parity"] < 1e-5
    assert after > before


def changed_tensors(outcome: dict[str, Any], file: Path) -> set[str]:
    found = compare(file, Path(outcome["model"]))
    assert (*found.model, *found.interface, *found.nodes) == ()
    return {change.name for change in found.tensors}


WORDS = ["eight", "five", "four", "nine", "nought", "one", "seven", "six", "three", "two"]
"""The classes of sklearn-strings in the order of the file."""
NAMES = ["nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def test_a_scaled_network_with_string_labels_and_maps_of_probabilities(workshop: Workshop) -> None:
    pixels, digits = load_digits(return_X_y=True)
    names = [NAMES[digit] for digit in digits]
    columns = {"X": pixels.astype(np.float32), "label": np.array([WORDS.index(name) for name in names])}
    file = FOLDER / "sklearn-strings.onnx"
    outcome = trained(
        workshop,
        file,
        columns,
        model={"output": "add_result1"},
        optimizer={"learning_rate": 3e-3},
        parallel={"data": 2},
    )
    assert_better(outcome, file, {"X": columns["X"]}, names)
    assert changed_tensors(outcome, file) == {"coefficient", "coefficient1", "intercepts", "intercepts1"}


def test_a_logistic_regression_whose_weights_are_attributes(workshop: Workshop) -> None:
    pixels, digits = load_digits(return_X_y=True)
    columns = {"X": pixels.astype(np.float32), "label": digits}
    file = FOLDER / "sklearn-imputed.onnx"
    output = "probability_tensor/log_probabilities"
    outcome = trained(workshop, file, columns, model={"output": output}, optimizer={"learning_rate": 3e-2})
    assert_better(outcome, file, {"X": columns["X"]}, list(digits))
    assert changed_tensors(outcome, file) == {"label/coefficients", "label/intercepts"}


def test_a_network_of_several_columns_of_several_types(workshop: Workshop) -> None:
    random = np.random.default_rng(1)
    numbers, kinds = random.normal(size=(600, 2)).astype(np.float32), random.integers(0, 4, 600)
    columns = {"width": numbers[:, 0], "height": numbers[:, 1], "kind": kinds}
    labels = (numbers.sum(1) + kinds > 1.5).astype(np.int64)
    file = FOLDER / "sklearn-columns.onnx"
    outcome = trained(
        workshop,
        file,
        {**columns, "label": labels},
        model={"output": "add_result1", "loss": "bce_with_logits"},
        optimizer={"learning_rate": 1e-2},
    )
    assert_better(outcome, file, {name: column[:, None] for name, column in columns.items()}, list(labels))
