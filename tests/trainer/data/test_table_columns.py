"""[data.table] computes what pandas and scikit-learn compute, fitted on the training rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pandas as pd
import pytest
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, RobustScaler, StandardScaler

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.completed_settings import with_inputs
from onward.trainer.data.data_problems import data_problems
from onward.trainer.data.formats import table_readers as tables
from onward.trainer.data.schema import columns as columns_module
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError, DataError

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
regressor (float[batch, width] features, int64[batch] city) => (float[batch, 1] price)
<float[WIDTH, 1] weight = {ZEROS}, float[4, 2] cities = {0, 0, 0, 0, 0, 0, 0, 0}, float[2, 1] mix = {0, 0}>
{
    part = MatMul (features, weight)
    place = Gather (cities, city)
    worth = MatMul (place, mix)
    price = Add (part, worth)
}
"""
CITIES = ["rome", "oslo", "bonn"]
ROWS = 600
FEATURES = ("height", "income", "year", "constant")


def frame(*, gaps: bool = True) -> pd.DataFrame:
    """Return a table of which the rows that are held out are far from the others, so that a leak is seen."""
    random = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "row": np.arange(ROWS),
            "height": random.normal(1e6, 1e-2, ROWS),  # sums of squares in fp64 lose all of its deviation
            "income": random.lognormal(10, 2, ROWS),
            "year": random.integers(1900, 2030, ROWS),
            "constant": np.full(ROWS, 0.1),
            "city": random.choice(CITIES, ROWS),
            "price": random.normal(0, 1, ROWS),
        }
    )
    if gaps:
        table.loc[random.random(ROWS) < 0.2, "income"] = np.nan
        table["year"] = table["year"].astype("Int64")
        table.loc[random.random(ROWS) < 0.6, "year"] = pd.NA
    return table


def config_of(folder: Path, rows: pd.DataFrame, /, *, form: str = "csv", **data: Any) -> RunConfig:
    features = [*FEATURES, *data.pop("further", [])]
    zeros = ", ".join("0" * len(features))
    model = onnx.parser.parse_model(MODEL.replace("WIDTH", str(len(features))).replace("ZEROS", zeros))
    onnx.save(model, folder / "model.onnx")
    source = folder / f"data.{form}"
    if form == "csv":
        rows.to_csv(source, index=False)
    else:
        rows.to_parquet(source)
    settings = {"source": str(source), "label": "price", "inputs": {"features": features}}
    return build_config(
        {"model": {"path": folder / "model.onnx", "loss": "mse"}, "data": settings | data, "train": {"num_steps": 1}}
    )


def sharded(config: RunConfig, folder: Path) -> tuple[ShardManifest, dict[str, pd.DataFrame]]:
    """Return the manifest and the stored columns by split; `price` says which row it is."""
    directory, manifest, _ = make_training_shards(config, folder / "cache")
    found = {}
    for split in ("train", "evaluation"):
        shards = open_shards(directory, split)  # type: ignore[arg-type]
        rows = shards.read(np.arange(shards.num_rows))
        found[split] = pd.DataFrame({name: np.asarray(values) for name, values in rows.items()})
    return manifest, found


def split_as(table: pd.DataFrame, found: dict[str, pd.DataFrame]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of the source in the order of the shards."""
    place = {np.float32(price): row for row, price in enumerate(table["price"])}
    parts = [[place[np.float32(price)] for price in found[split]["price"]] for split in ("train", "evaluation")]
    return table.iloc[parts[0]], table.iloc[parts[1]]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that statistics are combined over many."""
    monkeypatch.setattr(tables, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(columns_module, "BLOCK_BYTES", 4096)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("scaling", "scaler"), [("standard", StandardScaler), ("min_max", MinMaxScaler), ("robust", RobustScaler)]
)
@pytest.mark.parametrize("missing", ["mean", "median", 7.5])
def test_columns_are_what_scikit_learn_computes_from_the_training_rows(
    tmp_path: Path, form: str, scaling: str, scaler: Any, missing: Any
) -> None:
    table = frame()
    settings = {"standardise": scaling, "missing": missing, "log1p": ["income"], "categories": ["city"]}
    config = config_of(tmp_path, table, form=form, table=settings, evaluation_fraction=0.25)
    assert check_files_and_data(dict(config)) == []
    manifest, found = sharded(config, tmp_path)
    train, evaluation = split_as(table, found)
    assert (len(train), len(evaluation)) == (450, 150)
    strategy = {"strategy": missing} if isinstance(missing, str) else {"strategy": "constant", "fill_value": missing}
    for name in FEATURES:
        log = [FunctionTransformer(np.log1p)] if name == "income" else []
        reference = make_pipeline(SimpleImputer(**strategy), *log, scaler())
        cells = {part: rows[[name]].astype(float).to_numpy() for part, rows in (("t", train), ("e", evaluation))}
        reference.fit(cells["t"])
        for split, part in (("train", "t"), ("evaluation", "e")):
            expected = reference.transform(cells[part])[:, 0]
            np.testing.assert_allclose(found[split][name], expected, rtol=2e-6, atol=2e-6, err_msg=name)
            assert found[split][name].dtype == np.float32
    assert manifest.fitted["income"].log1p
    fills = {"mean": train["height"].mean(), "median": train["height"].median(), 7.5: 7.5}
    assert manifest.fitted["height"].fill == pytest.approx((fills[missing],))
    assert data_problems(config, manifest.table, fitted=manifest.fitted) == []
    first = read_first_rows(config, read_training_signature(config.model), 8)
    assert first.fitted == manifest.fitted


def test_settings_by_pattern_and_indicators(tmp_path: Path) -> None:
    table = frame()
    settings = {
        "standardise": {"*": "standard", "year": "none", "constant": "min_max"},
        "missing": {"income": 0.0, "year": "median"},
        "indicators": ["year"],
        "categories": ["city"],
    }
    config = config_of(tmp_path, table, table=settings, further=["*_missing"])
    config = with_inputs(config)
    assert config.data.inputs["features"] == (*FEATURES, "year_missing")
    assert check_files_and_data(dict(config)) == []
    manifest, found = sharded(config, tmp_path)
    train, _ = split_as(table, found)
    assert found["train"]["year_missing"].tolist() == train["year"].isna().astype(float).tolist()
    years = train["year"].astype(float)
    np.testing.assert_allclose(found["train"]["year"], years.fillna(years.median()))
    assert manifest.fitted["year"].center == ()
    assert manifest.fitted["constant"].scaling == "min_max"
    assert "missing = median: year (" in manifest.preprocessing


def test_categories_are_numbered_by_the_training_rows_and_others_are_unknown(tmp_path: Path) -> None:
    table = frame(gaps=False)
    config = config_of(tmp_path, table, table={"categories": ["city"]})
    _, found = sharded(config, tmp_path)
    train, evaluation = split_as(table, found)
    table.loc[evaluation.index[:3], "city"] = "paris"  # in evaluation rows only
    table.loc[train.index[:2], "city"] = ""
    config = config_of(tmp_path, table, table={"categories": ["city"], "missing": "mean"})
    manifest, found = sharded(config, tmp_path)
    assert manifest.fitted["city"].vocabulary == ("", "bonn", "oslo", "rome")
    order = {"": 0, "bonn": 1, "oslo": 2, "rome": 3, "paris": 0}
    for split, rows in zip(("train", "evaluation"), split_as(table, found), strict=True):
        assert found[split]["city"].tolist() == [order[city] for city in rows["city"]]
    assert check_files_and_data(dict(config)) == []


def test_a_vocabulary_that_is_given_has_its_order_and_refuses_others(tmp_path: Path) -> None:
    table = frame(gaps=False)
    with pytest.raises(ConfigError, match=r"'cit\*' is a pattern, and texts are of one column"):
        config_of(tmp_path, table, table={"categories": {"cit*": ["rome", "oslo"]}})
    settings = {"categories": {"city": ["rome", "oslo"]}}
    config = config_of(tmp_path, table, table=settings)
    with pytest.raises(DataError, match=r"city is 'bonn', which data\.table\.categories does not have"):
        sharded(config, tmp_path)
    skipping = config_of(tmp_path, table, table=settings | {"standardise": "standard"}, bad_rows="skip")
    manifest, found = sharded(skipping, tmp_path)
    train, _ = split_as(table, found)
    assert manifest.skipped == (table["city"] == "bonn").sum()
    # rows that are left out are not fitted to
    assert manifest.fitted["year"].center == pytest.approx((train["year"].mean(),))


def test_more_categories_than_the_embedding_has_rows_are_refused(tmp_path: Path) -> None:
    table = frame(gaps=False)
    table["city"] = [f"city {number % 9}" for number in range(ROWS)]
    config = config_of(tmp_path, table, table={"categories": ["city"]})
    problems = check_files_and_data(dict(config))
    assert "column 'city' has 10 categories, the unknown one included, but the embedding cities has 4" in problems[0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"standardise": {"price": "standard"}}, "names 'price', which is a label"),
        ({"standardise": {"hight": "standard"}}, "data.table.standardise names 'hight', which feeds no input"),
        ({"missing": {"x*": "mean"}}, "data.table.missing names 'x*', which feeds no input"),
        ({"log1p": ["city"], "categories": []}, "but column 'city' holds text"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    config = config_of(tmp_path, frame(gaps=False), table={"categories": ["city"], **settings})
    assert sentence in " ".join(check_files_and_data(dict(config)))


def test_rows_without_a_value_or_a_logarithm_are_bad_rows(tmp_path: Path) -> None:
    table = frame(gaps=False)
    table.loc[3, "income"] = -2.0
    table.loc[5, "height"] = np.nan
    settings = {"log1p": ["income"], "standardise": "standard", "categories": ["city"]}
    with pytest.raises(DataError) as refused:
        sharded(config_of(tmp_path, table, table=settings), tmp_path)
    assert any("line 5: income is -2, but log(1 + x) needs more than -1" in each for each in refused.value.problems)
    assert any("line 7: height is missing" in each for each in refused.value.problems)
    manifest, found = sharded(config_of(tmp_path, table, table=settings, bad_rows="skip"), tmp_path)
    train, _ = split_as(table, found)
    assert manifest.skipped == 2
    assert manifest.fitted["income"].center == pytest.approx((np.log1p(train["income"]).mean(),), rel=1e-12)


def test_a_column_without_any_value_is_refused(tmp_path: Path) -> None:
    table = frame(gaps=False)
    table["constant"] = np.nan
    config = config_of(tmp_path, table, table={"missing": "mean", "categories": ["city"]})
    with pytest.raises((DataError, ConfigError), match="constant"):
        sharded(config, tmp_path)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_rows_without_a_value_are_left_out_and_counted(tmp_path: Path, form: str) -> None:
    table = frame()
    table.loc[np.arange(0, ROWS, 7), "city"] = None
    settings = {"standardise": "standard", "missing": {"income": "skip", "year": "median", "city": "skip"}}
    config = config_of(tmp_path, table, form=form, table={**settings, "categories": ["city"]})  # bad_rows = "fail"
    assert check_files_and_data(dict(config)) == []
    manifest, found = sharded(config, tmp_path)
    stored = sorted(np.concatenate([found["train"]["price"], found["evaluation"]["price"]]).tolist())
    whole = table[table["income"].notna() & table["city"].notna()]
    assert stored == sorted(whole["price"].astype(np.float32).tolist())
    assert (manifest.skipped, manifest.left_out) == (0, ROWS - len(whole))
    assert f"{ROWS - len(whole)} rows without a value left out (data.table.missing = 'skip')" in manifest.preprocessing
    # nothing is fitted to rows that are left out
    train, _ = split_as(table, found)
    assert manifest.fitted["income"].center == pytest.approx((train["income"].mean(),), rel=1e-12)
    assert manifest.fitted["year"].fill == pytest.approx((train["year"].astype(float).median(),))
    assert data_problems(config, manifest.table, fitted=manifest.fitted) == []
    first = read_first_rows(config, read_training_signature(config.model), 8)
    assert (first.fitted["city"], first.num_rows) == (manifest.fitted["city"], 8)


def test_integers_may_be_missing_where_rows_are_left_out_and_bad_cells_stay_bad(tmp_path: Path) -> None:
    table = frame(gaps=False)
    table["city"] = np.arange(ROWS) % 4
    table["city"] = table["city"].astype("Int64")
    table.loc[[1, 2, 3], "city"] = pd.NA
    config = config_of(tmp_path, table, table={"missing": {"city": "skip"}})
    manifest, found = sharded(config, tmp_path)
    train, _ = split_as(table, found)
    assert (manifest.left_out, found["train"]["city"].dtype) == (3, np.int64)
    assert found["train"]["city"].tolist() == train["city"].tolist()
    table["city"] = table["city"].astype(float)
    table.loc[9, "city"] = 1.5
    with pytest.raises(DataError, match=r"line 11: city holds 1.5, which is not of type int64"):
        sharded(config_of(tmp_path, table, table={"missing": {"city": "skip"}}), tmp_path)
    table["city"] = np.nan
    with pytest.raises((DataError, ConfigError)):
        sharded(config_of(tmp_path, table, table={"missing": {"city": "skip"}}), tmp_path)


def test_a_table_whose_first_rows_are_left_out_is_rehearsed_on_those_behind_them(tmp_path: Path) -> None:
    table = frame(gaps=False)
    table.loc[:300, "income"] = np.nan
    config = config_of(tmp_path, table, table={"missing": "skip", "categories": ["city"]})
    assert check_files_and_data(dict(config)) == []
    first = read_first_rows(config, read_training_signature(config.model), 8)
    assert (first.num_rows, sum(first.counts or ())) == (8, ROWS - 301)
