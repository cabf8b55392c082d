"""A row may have several labels: columns of 0 and 1 are read together, lists of names are refused with the way out."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest

import onward
from onward.trainer.config.loading import load_config
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.proposal.initialise import Proposed

KINDS = ["red", "blue", "green", "large", "old"]
X = np.random.default_rng(0).normal(size=(120, 4))
Y = (X @ np.random.default_rng(1).normal(size=(4, 5)) > 0.5).astype(int)
ROWS = [[kind for kind, has in zip(KINDS, row, strict=True) if has] or ["none"] for row in Y]


def scorer(folder: Path, scores: int) -> None:
    g = GraphWriter("scorer")
    x = g.op("MatMul", g.input("x", ("batch", 4)), g.weight("w", g.normal(0.5, 4, scores)))
    g.op("Add", x, g.weight("b", np.zeros(scores, np.float32)), outputs="logits")
    g.output("logits", ("batch", scores))
    onnx.save(g.model(), folder / "model.onnx")


def table(folder: Path, header: list[str], labels: Any) -> Path:
    with (folder / "data.csv").open("w", newline="") as file:
        rows = [[*x, *own] for x, own in zip(X.round(4), labels, strict=True)]
        csv.writer(file).writerows([["f0", "f1", "f2", "f3", *header], *rows])
    return folder / "data.csv"


def initialised(folder: Path, data: Path, *given: str) -> Proposed:
    return onward.init(folder / "model.onnx", data, given, output=folder / "config.toml", steps=10, force=True)


@pytest.mark.parametrize(("scores", "head"), [(5, 0), (9, 5)])
def test_columns_of_0_and_1_are_the_labels_together(scores: int, head: int, tmp_path: Path) -> None:
    scorer(tmp_path, scores)
    found = initialised(tmp_path, table(tmp_path, KINDS, Y))
    assert not found.questions
    assert found.proof is not None, found.refused
    assert found.proof.loss_after < found.proof.loss_before
    config = load_config(tmp_path / "config.toml")
    assert (config.losses[0].name, config.losses[0].columns) == ("bce_with_logits", tuple(KINDS))
    assert config.model.num_classes == head
    reasons = {guess.setting: guess.reason for guess in found.guesses}
    assert "hold 0 and 1 in 120 rows: multi-label, a row has up to" in reasons["data.label"]


def test_columns_of_which_each_row_has_one_are_said_to_be_classes(tmp_path: Path) -> None:
    scorer(tmp_path, 5)
    found = initialised(tmp_path, table(tmp_path, KINDS, np.eye(5, dtype=int)[np.arange(120) % 5]))
    reasons = {guess.setting: guess.reason for guess in found.guesses}
    assert "always one: classes that exclude each other are better one column of names" in reasons["data.label"]


def test_a_column_that_is_named_as_a_label_is_not_overruled_by_flags(tmp_path: Path) -> None:
    scorer(tmp_path, 3)
    data = table(tmp_path, ["label", *KINDS[:3]], [[at % 3, *row[:3]] for at, row in enumerate(Y)])
    initialised(tmp_path, data)
    assert load_config(tmp_path / "config.toml").losses[0].name == "cross_entropy"


@pytest.mark.parametrize("mark", ["|", ";"])
def test_several_names_in_a_cell_are_refused_with_the_line_that_makes_columns(mark: str, tmp_path: Path) -> None:
    scorer(tmp_path, 6)
    data = table(tmp_path, ["kinds"], [[mark.join(row)] for row in ROWS])
    with pytest.raises(ConfigError) as refused:
        initialised(tmp_path, data)
    message = str(refused.value)
    assert "column 'kinds' holds several names in a cell, such as " in message
    assert "(6 names): for a multi-label model write a column of 0 and 1 for each name" in message
    line = f'table.join(table.pop("kinds").str.get_dummies("{mark}"))'
    assert line in message
    mended = eval(line, {"table": pd.read_csv(data, keep_default_na=False)})
    mended.to_csv(data, index=False)
    assert initialised(tmp_path, data).proof is not None
    assert load_config(tmp_path / "config.toml").losses[0].name == "bce_with_logits"


def test_lists_of_names_are_refused_with_the_line_that_makes_columns(tmp_path: Path) -> None:
    scorer(tmp_path, 6)
    rows = [{"x": x.tolist(), "kinds": own} for x, own in zip(X, ROWS, strict=True)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError) as refused:
        initialised(tmp_path, tmp_path / "data.jsonl")
    assert "column 'kinds' holds lists of names, such as [" in str(refused.value)
    assert 'table.join(table.pop("kinds").str.join("|").str.get_dummies("|"))' in str(refused.value)


def test_class_names_with_a_bar_stay_classes(tmp_path: Path) -> None:
    scorer(tmp_path, 2)
    initialised(tmp_path, table(tmp_path, ["kind"], [["a|b"] if at % 2 else ["c|d"] for at in range(120)]))
    assert load_config(tmp_path / "config.toml").losses[0].name == "cross_entropy"


def test_a_list_of_labels_without_a_loss_for_it_names_the_loss(tmp_path: Path) -> None:
    scorer(tmp_path, 5)
    settings = {
        "model": {"path": tmp_path / "model.onnx"},
        "data": {"source": str(table(tmp_path, KINDS, Y)), "inputs": {"x": "f*"}, "label": KINDS},
        "train": {"num_steps": 1},
    }
    with pytest.raises(ConfigError, match=r'stacks 5 columns; model\.loss = "bce_with_logits" compares each column'):
        load_config(settings, check=check_files_and_data)


@pytest.mark.parametrize("target", [np.linspace(0, 1, 120), np.array([[0.5]] * 120)])
def test_numbers_that_no_loss_reads_are_refused_in_a_sentence(target: Any, tmp_path: Path) -> None:
    scorer(tmp_path, 6)
    np.savez(tmp_path / "data.npz", x=X.astype(np.float32), target=target)
    with pytest.raises(ConfigError, match="target"):
        initialised(tmp_path, tmp_path / "data.npz")
