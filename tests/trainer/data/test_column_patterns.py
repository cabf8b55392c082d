"""Patterns of columns become columns, in the order of the file, before anything else reads the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.completed_settings import with_inputs
from onward.trainer.data.tables.column_patterns import expanded, matching
from onward.trainer.errors import ConfigError

COLUMNS = ["id", "f10", "f1", "f2", "age", "a*", "paid"]


def data(features: Any, label: Any = "paid") -> DataConfig:
    return DataConfig(source="data.csv", inputs={"features": features}, label=label)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["f*"], ("f10", "f1", "f2")),
        ("f*", ("f10", "f1", "f2")),
        (["age", "f?"], ("age", "f1", "f2")),
        (["f2", "f*"], ("f2", "f10", "f1")),
        (["*", "!id", "!paid", "!f[12]"], ("f10", "age", "a*")),
        (["!f10", "f*"], ("f1", "f2")),
        (["a*"], ("a*",)),
        (["unknown"], ("unknown",)),
        ("age", "age"),
        (["f*", "paid"], ("f10", "f1", "f2", "paid")),
    ],
)
def test_patterns_match_in_the_order_of_the_file(given: Any, found: Any) -> None:
    assert expanded(data(given), COLUMNS).inputs == {"features": found}


def test_labels_may_be_patterns() -> None:
    assert expanded(data(["age"], "f*"), COLUMNS).label == ("f10", "f1", "f2")


@pytest.mark.parametrize(
    ("given", "label", "sentence"),
    [
        (["f*", "x*"], "paid", r"data\.inputs\.features \['x\*'\] matches no column; there is id, f10"),
        (["*"], "paid", r"data\.inputs\.features \['\*'\] matches paid, the label; leave it out: add '!paid'"),
        (["!id"], "paid", r"data\.inputs\.features \['!id'\] only leaves columns out; begin with '\*'"),
        (["age"], "y*", r"data\.label \['y\*'\] matches no column"),
        (["*", "!id", "!paid", "![af]*"], "paid", "leaves every column out"),
        (["f*", "!z"], "paid", r"\['!z'\] matches no column"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: Any, label: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        expanded(data(given, label), COLUMNS)


def test_a_column_is_matched_once() -> None:
    assert matching(["f1", "f*", "f1"], COLUMNS) == ("f1", "f10", "f2")


def test_the_columns_are_those_of_the_data_and_are_read_only_for_patterns(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("f2,id,f1,label\n1,2,3,0\n")
    settings = {
        "model": {"path": tmp_path / "model.onnx"},
        "data": {"source": str(tmp_path / "data.csv"), "inputs": {"x": ["f*"]}},
        "train": {"num_steps": 1},
    }
    config = with_inputs(build_config(settings))
    assert config.data.inputs == {"x": ("f2", "f1")}
    assert with_inputs(config) is config
