"""Where an input wants one thing and the column has another, the setting that solves it is named, also on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.data_problems import data_problems
from onward.trainer.data.input_columns import Feed
from onward.trainer.data.misfits import MISFITS, remedy, remedy_of_absence
from onward.trainer.data.schema.columns import Column, ColumnType
from onward.trainer.data.schema.label_axes import Dims
from onward.trainer.errors import DataError
from tests.support.graphs import tiny_bert, tiny_cities, tiny_mlp
from tests.support.shards import make_shards

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "own-data.md"
TEXT = Column(name="city", dtype="str")
NUMBER = Column(name="load", dtype="float64")


def feed(dtype: str, shape: Dims, *, stacked: bool = False, is_label: bool = False) -> Feed:
    return Feed("data.label" if is_label else "input x", ("city",), stacked, dtype, shape, is_label=is_label)


@pytest.mark.parametrize(
    ("wanted", "column", "advice"),
    [
        (feed("float32", (3, 32, 32)), TEXT, "a table [data.image] makes Onward decode images"),
        (feed("float32", (32, 32, 3)), Column(name="f", dtype="bytes"), "a table [data.image] makes Onward decode"),
        (feed("float32", (16000,)), TEXT, "a table [data.audio] makes Onward decode audio"),
        (feed("float32", (40, 101)), TEXT, "a table [data.audio] makes Onward decode audio"),
        (feed("int64", ()), TEXT, 'data.table.categories = ["city"] makes ids of texts'),
        (feed("int64", (4,), stacked=True), TEXT, 'data.table.categories = ["city"] makes ids of texts'),
        (feed("int64", (None,)), TEXT, '[data.text] tokenizer = "tokenizer.json" makes token ids'),
        (feed("float32", (4,), stacked=True), TEXT, "no setting: write a column of 0 and 1 for each text"),
        (feed("float32", (28,)), NUMBER, "if the rows follow each other in time, [data.table.window] length = 28"),
        (feed("float32", (28, 2)), NUMBER, "[data.table.window] length = 28 makes windows of so many rows"),
        (feed("int64", (), stacked=True, is_label=True), NUMBER, 'model.loss = "bce_with_logits" compares each column'),
        (feed("float32", ()), NUMBER, ""),
        (feed("int64", ()), NUMBER, ""),
    ],
)
def test_the_setting_that_makes_a_column_fit_is_named(wanted: Feed, column: Column, advice: str) -> None:
    found = remedy(wanted, column)
    assert advice in found
    assert bool(found) == bool(advice)


def test_an_input_without_a_column_of_its_name_may_need_a_tokenizer() -> None:
    assert "[data.text] tokenizer" in remedy_of_absence(feed("int64", (None,)), [NUMBER, TEXT])
    assert remedy_of_absence(feed("int64", (None,)), [NUMBER]) == ""


def problems(folder: Path, model: onnx.ModelProto, schema: list[Column], **data: Any) -> str:
    """What the checks before a run say, in one text."""
    onnx.save(model, folder / "model.onnx")
    config = RunConfig.model_construct(
        model=ModelConfig(path=folder / "model.onnx"), data=DataConfig(source="x", **data)
    )
    return "\n".join(data_problems(config, {column.name: column for column in schema}))


def test_a_run_names_the_setting_beside_the_misfit(tmp_path: Path) -> None:
    label, text = Column(name="label", dtype="int64", extremes=(0, 1)), Column(name="review", dtype="str")
    found = problems(tmp_path, tiny_bert(num_classes=2), [text, label])
    assert "set data.inputs.input_ids, or: [data.text] tokenizer = " in found
    assert "(column 'review' holds text)" in found
    places = [Column(name=name, dtype="str") for name in ("home", "work")]
    age = Column(name="age", dtype="float32")
    found = problems(tmp_path, tiny_cities(), [*places, age, label], inputs={"places": ("home", "work")})
    assert "but column 'home' holds text; data.table.categories = [\"home\"] makes ids of texts" in found
    numbers = [Column(name="load", dtype="float64"), label]
    found = problems(tmp_path, tiny_mlp(inputs=28), numbers, inputs={"features": "load"})
    assert (
        "but column 'load' is float64; if the rows follow each other in time, [data.table.window] length = 28" in found
    )


def test_missing_cells_of_inputs_name_the_setting_that_fills_them(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n1,0\n,1\n3,\n4,1\n")
    columns = {"a": ColumnType("float32", ()), "y": ColumnType("float32", ())}
    with pytest.raises(DataError) as refused:
        make_shards(DataConfig(source=str(tmp_path / "t.csv")), columns, tmp_path / "cache", labels=["y"])
    total = refused.value.problems[-1]
    assert total.startswith("2 bad rows: correct them, or set data.bad_rows = 'skip' to leave such rows out; ")
    assert 'data.table.missing = "mean" or "median"' in total
    assert total.endswith("(a)"), "of a label nothing can be filled in"


def test_the_page_on_data_has_each_row_of_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for each in MISFITS:
        setting = each.setting if each.setting.startswith("no setting: ") else f"`{each.setting}`"
        line = f"| {each.wants} | {each.has} | {setting} | {each.why} |"
        assert line in page, line
