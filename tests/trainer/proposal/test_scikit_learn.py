"""Classifiers and regressors as skl2onnx writes them: the scores that a loss reads, and the file's own class names."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from sklearn.datasets import load_digits

import onward
from onward.trainer.config.loading import load_config
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.proposal.initialise import Proposed
from tests.support.foreign_files import FOLDER

NAMES = ["nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PIXELS, DIGITS = (each[:300] for each in load_digits(return_X_y=True))


def initialised(folder: Path, file: str, labels: Any) -> Proposed:
    """Run `onward init` on a table of the pixels, a column each, with labels."""
    shutil.copy(FOLDER / f"{file}.onnx", folder / "model.onnx")
    with (folder / "digits.csv").open("w", newline="") as table:
        rows = [[*map(int, row), label] for row, label in zip(PIXELS, labels, strict=True)]
        csv.writer(table).writerows([[*(f"p{at}" for at in range(64)), "digit"], *rows])
    return onward.init(folder / "model.onnx", folder / "digits.csv", output=folder / "config.toml", steps=8)


@pytest.mark.parametrize(
    ("file", "labels", "output", "loss"),
    [
        ("skl2onnx-mlp", DIGITS, "add_result2", "cross_entropy"),
        ("skl2onnx-logistic", DIGITS, "probability_tensor/log_probabilities", "cross_entropy"),
        ("sklearn-imputed", DIGITS, "probability_tensor/log_probabilities", "cross_entropy"),
        ("sklearn-strings", [NAMES[digit] for digit in DIGITS], "add_result1", "cross_entropy"),
        ("skl2onnx-mlp-regressor", DIGITS, "", "mse"),
    ],
)
def test_a_converted_model_trains_as_proposed(file: str, labels: Any, output: str, loss: str, tmp_path: Path) -> None:
    found = initialised(tmp_path, file, labels)
    assert not found.questions
    assert found.proof is not None, found.refused
    assert found.proof.loss_after < found.proof.loss_before
    config = load_config(tmp_path / "config.toml")
    assert (config.model.output, config.losses[0].name, config.data.label) == (output, loss, "digit")
    if output:
        reasons = {guess.setting: guess.reason for guess in found.guesses}
        assert "for the loss cross_entropy" in reasons["model.output"]


def test_labels_that_are_texts_have_the_order_of_the_file(tmp_path: Path) -> None:
    found = initialised(tmp_path, "sklearn-strings", [NAMES[digit] for digit in DIGITS])
    assert load_config(tmp_path / "config.toml").data.classes == tuple(sorted(NAMES))
    reasons = {guess.setting: guess.reason for guess in found.guesses}
    assert reasons["data.classes"] == "the file's own order of classes"


def test_an_output_behind_labels_is_named_though_it_holds_scores(tmp_path: Path) -> None:
    g = GraphWriter("labels_first")
    scores = g.op("MatMul", g.input("x", ("batch", 4)), g.weight("w", g.normal(0.5, 4, 3)), outputs="scores")
    g.op("ArgMax", scores, outputs="best", axis=1, keepdims=0)
    g.output("best", ("batch",), onnx.TensorProto.INT64)
    g.output("scores", ("batch", 3))
    onnx.save(g.model(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(60, 4)), label=np.arange(60) % 3)
    found = onward.init(tmp_path / "model.onnx", tmp_path / "data.npz", output=tmp_path / "config.toml", steps=2)
    assert found.proof is not None, found.refused
    assert load_config(tmp_path / "config.toml").model.output == "scores"


@pytest.mark.parametrize("file", ["skl2onnx-trees", "sklearn-forest"])
def test_trees_are_refused_at_once_with_what_can_be_done(file: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"made of TreeEnsembleClassifier: trees .*what-it-does-not-train\.md"):
        initialised(tmp_path, file, DIGITS)
    assert not (tmp_path / "config.toml").exists()
