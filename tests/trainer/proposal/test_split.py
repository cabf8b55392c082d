"""`init` writes how many rows are held out for evaluation, and holds out the same share of each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

import onward
from onward.trainer.config.loading import load_config
from tests.support import graphs
from tests.trainer.proposal.test_table_proposal import measured, penguins

X = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)


def test_a_classifier_has_a_stratified_split_with_the_number_of_rows(tmp_path: Path) -> None:
    penguins(tmp_path)
    found = onward.init(tmp_path / "model.onnx", measured(tmp_path), output=tmp_path / "config.toml", steps=2)
    assert found.proof is not None, found.refused
    config = load_config(tmp_path / "config.toml")
    assert (config.data.evaluation_fraction, config.data.split) == (0.1, "stratified")
    text = (tmp_path / "config.toml").read_text()
    assert "evaluation_fraction = 0.1  # about 12 of 120 rows: not trained on, but measured" in text
    assert "each of 3 classes has the same share held out" in text


def test_what_is_given_is_kept(tmp_path: Path) -> None:
    penguins(tmp_path)
    given = ["data.evaluation_fraction=0.3", "data.split=random"]
    onward.init(tmp_path / "model.onnx", measured(tmp_path), given, output=tmp_path / "config.toml", steps=0)
    config = load_config(tmp_path / "config.toml")
    assert (config.data.evaluation_fraction, config.data.split) == (0.3, "random")


def test_classes_of_fewer_rows_than_a_share_are_divided_at_random(tmp_path: Path) -> None:
    onnx.save(graphs.tiny_mlp(outputs=3), tmp_path / "model.onnx")
    labels = np.minimum(np.arange(200) // 97, 2)  # 6 rows of the last class
    np.savez(tmp_path / "data.npz", features=X, label=labels)
    onward.init(tmp_path / "model.onnx", tmp_path / "data.npz", output=tmp_path / "config.toml", steps=0)
    assert load_config(tmp_path / "config.toml").data.split == "random"


def test_a_regression_is_divided_at_random(tmp_path: Path) -> None:
    onnx.save(graphs.tiny_mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", features=X, label=X.sum(axis=1))
    onward.init(tmp_path / "model.onnx", tmp_path / "data.npz", output=tmp_path / "config.toml", steps=0)
    assert load_config(tmp_path / "config.toml").data.split == "random"
    assert "# about 20 of 200 rows" in (tmp_path / "config.toml").read_text()
