"""Tables as people have them: categories, missing cells and labels, and series get the setting that solves them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import onward
from onward.trainer.config.loading import load_config
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.proposal.initialise import Proposed

Random = np.random.default_rng
ISLANDS = ("Biscoe", "Dream", "Torgersen")


def penguins(folder: Path, *, sexes: bool = True, classes: int = 3) -> Path:
    """A model of four measures and ids of categories, as torch exports one with nn.Embedding."""
    g = GraphWriter("penguins")
    parts = [g.input("measures", ("batch", 4))]
    for name in ("island", "sex") if sexes else ("island",):
        ids = g.input(name, ("batch",), TensorProto.INT64)
        parts.append(g.op("Gather", g.weight(f"{name}.weight", g.normal(0.5, 4, 2)), ids))
    x = g.op("Concat", *parts, axis=1)
    x = g.op("Relu", g.op("MatMul", x, g.weight("w1", g.normal(0.3, 2 + 2 * len(parts), 16))))
    g.op("MatMul", x, g.weight("w2", g.normal(0.3, 16, classes)), outputs="scores")
    g.output("scores", ("batch", classes))
    onnx.save(g.model(), folder / "model.onnx")
    return folder / "model.onnx"


def write(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def measured(folder: Path, *, without_label: int = 0, of_kind: str = "species") -> Path:
    """A table like palmerpenguins: two texts, four numbers of which some are missing, and a label."""
    random, rows = Random(0), []
    for at in range(120):
        kind = at % 3
        numbers = (random.normal(size=4) + kind).round(3).tolist()
        if at % 20 == 7:
            numbers[at % 4] = ""
        sex = "" if at % 30 == 4 else ("male", "female")[at % 2]
        label: Any = ("Adelie", "Chinstrap", "Gentoo")[kind] if of_kind == "species" else 4000 + 100 * kind
        rows.append([ISLANDS[random.integers(0, 3)], *numbers, sex, "" if at < without_label else label])
    return write(folder / "penguins.csv", ("island", "bill", "depth", "flipper", "tail", "sex", of_kind), rows)


def initialised(folder: Path, data: Path, *given: str, steps: int = 5) -> Proposed:
    return onward.init(folder / "model.onnx", data, given, output=folder / "config.toml", steps=steps)


def test_categories_and_missing_cells_are_proposed_and_train_at_the_first_try(tmp_path: Path) -> None:
    penguins(tmp_path)
    found = initialised(tmp_path, measured(tmp_path))
    assert not found.questions, found.questions
    assert found.proof is not None, found.refused
    config = load_config(tmp_path / "config.toml")
    assert config.data.table.categories == ("island", "sex")
    assert config.data.table.missing == "mean"
    assert config.data.label == "species"
    reasons = {guess.setting: guess.reason for guess in found.guesses}
    assert "texts that feed inputs of integers" in reasons["data.table.categories"]
    assert "10 cells of " in reasons["data.table.missing"]
    assert "texts get the id of unknown ones" in reasons["data.table.missing"]


def test_a_text_column_of_another_name_is_the_category_if_it_is_the_only_one(tmp_path: Path) -> None:
    penguins(tmp_path, sexes=False)
    rows = [(*Random(at).normal(size=4).round(3), ISLANDS[at % 3], at % 3) for at in range(90)]
    write(tmp_path / "data.csv", ("a", "b", "c", "d", "place", "label"), rows)
    found = initialised(tmp_path, tmp_path / "data.csv")
    assert found.proof is not None, found.refused
    config = load_config(tmp_path / "config.toml")
    assert config.data.inputs["island"] == "place"
    assert config.data.table.categories == ("place",)


def test_an_embedding_with_a_row_for_each_text_and_no_more_gets_their_order(tmp_path: Path) -> None:
    model = onnx.load(penguins(tmp_path, sexes=False))
    (places,) = (each for each in model.graph.initializer if each.name == "island.weight")
    places.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(places)[:3].copy(), places.name))
    onnx.save(model, tmp_path / "model.onnx")
    found = initialised(tmp_path, measured(tmp_path))
    assert found.proof is not None, found.refused
    table = load_config(tmp_path / "config.toml", check=check_files_and_data).data.table
    assert table.vocabularies == {"island": ISLANDS}


def test_a_file_that_scales_its_columns_itself_gets_them_as_they_are(tmp_path: Path) -> None:
    random = Random(0)
    kinds = random.integers(0, 3, 120)
    rows = [[*(1000 * (random.normal(size=4) + kind)).round(1), f"kind {kind}"] for kind in kinds]
    data = write(tmp_path / "data.csv", (*(f"m{at}" for at in range(4)), "species"), rows)
    for scaled in (True, False):
        g = GraphWriter("scaled")
        x = g.input("measures", ("batch", 4))
        if scaled:
            x = g.op("Sub", x, g.weight("mean", np.full(4, 1000, np.float32)))
            x = g.op("Div", x, g.weight("deviation", np.full(4, 1200, np.float32)))
        g.op("MatMul", x, g.weight("w", g.normal(0.3, 4, 3)), outputs="scores")
        g.output("scores", ("batch", 3))
        onnx.save(g.model(), tmp_path / "model.onnx")
        found = onward.init(tmp_path / "model.onnx", data, output=tmp_path / "config.toml", steps=0, force=True)
        proposed = {guess.setting for guess in found.guesses}
        assert ("data.table.standardise" in proposed) is not scaled


def test_rows_without_a_label_are_left_out_and_counted(tmp_path: Path) -> None:
    penguins(tmp_path, classes=1)
    found = initialised(tmp_path, measured(tmp_path, without_label=2, of_kind="mass"), "data.label=mass")
    assert found.proof is not None, found.refused
    config = load_config(tmp_path / "config.toml")
    assert config.data.bad_rows == "skip"
    reasons = {guess.setting: guess.reason for guess in found.guesses}
    assert "missing or cannot be read in 120 rows (2 of mass)" in reasons["data.bad_rows"]


def test_no_row_is_left_out_where_every_label_is_there(tmp_path: Path) -> None:
    penguins(tmp_path)
    initialised(tmp_path, measured(tmp_path), steps=0)
    assert load_config(tmp_path / "config.toml").data.bad_rows == "fail"


# -- series


def forecaster(folder: Path, *, past: tuple[int, ...], future: int, output: str = "next") -> Path:
    g = GraphWriter("forecaster")
    x = g.op("Flatten", g.input("past", ("batch", *past)))
    x = g.op("MatMul", x, g.weight("w", g.normal(0.1, int(np.prod(past)), future)))
    g.op("Add", x, g.weight("b", np.zeros(future, np.float32)), outputs=output)
    g.output(output, ("batch", future))
    onnx.save(g.model(), folder / "model.onnx")
    return folder / "model.onnx"


def days(folder: Path, *, meters: int = 1, columns: int = 1, dated: bool = True) -> Path:
    rows, random = [], Random(0)
    for day in range(100):
        for meter in range(meters):
            date = str(np.datetime64("2025-01-01") + day) if dated else str(random.integers(0, 9))
            values = (np.sin(day / 5 + meter) + random.normal(size=columns) / 9).round(3)
            rows.append([date, *([f"m{meter}"] if meters > 1 else []), *values.tolist()])
    header = ("date", *(("meter",) if meters > 1 else ()), *(("load", "heat", "wind")[:columns]))
    return write(folder / "days.csv", header, rows)


def test_windows_are_proposed_for_a_past_and_a_future_where_the_rows_have_times(tmp_path: Path) -> None:
    forecaster(tmp_path, past=(28,), future=7)
    found = initialised(tmp_path, days(tmp_path))
    assert not found.questions
    assert found.proof is not None, found.refused
    config = load_config(tmp_path / "config.toml")
    window = config.data.table.window
    assert window is not None
    assert (window.length, window.horizon, window.time, window.by) == (28, 7, "date", "")
    assert (config.data.inputs["past"], config.data.label) == ("load", "load_ahead")


def test_several_series_have_times_of_their_own_and_several_columns_are_stacked(tmp_path: Path) -> None:
    forecaster(tmp_path, past=(12, 2), future=3)
    found = initialised(tmp_path, days(tmp_path, meters=3, columns=2), "data.label=heat_ahead")
    assert found.proof is not None, found.refused
    config = load_config(tmp_path / "config.toml")
    assert config.data.table.window is not None
    assert config.data.table.window.by == "meter"
    assert config.data.inputs["past"] == ("load", "heat")


def test_an_output_with_the_name_of_a_column_predicts_its_future_and_the_past_of_it_stays_an_input(
    tmp_path: Path,
) -> None:
    forecaster(tmp_path, past=(12, 2), future=3, output="heat")
    found = initialised(tmp_path, days(tmp_path, columns=2))
    assert not found.questions
    config = load_config(tmp_path / "config.toml")
    assert (config.data.inputs["past"], config.data.label) == (("load", "heat"), "heat_ahead")


def test_of_several_columns_the_past_and_the_label_are_asked(tmp_path: Path) -> None:
    forecaster(tmp_path, past=(28,), future=28)
    found = initialised(tmp_path, days(tmp_path, columns=2), steps=0)
    questions = {each.setting: each.what for each in found.questions}
    assert '"load" or "heat"' in questions["data.inputs.past"]
    assert '"load_ahead" (mse) or "heat_ahead" (mse)' in questions["data.label"], "the past is no label"


def test_without_times_the_window_is_named_and_not_guessed(tmp_path: Path) -> None:
    forecaster(tmp_path, past=(28,), future=7)
    with pytest.raises(ConfigError, match=r"if the rows follow each other in time, \[data.table.window\] length = 28"):
        initialised(tmp_path, days(tmp_path, dated=False))
