"""Windows over time series: the past, the future, and a split in which evaluation predicts nothing that was seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pandas as pd
import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.completed_settings import with_inputs
from onward.trainer.data.reading import series_windows
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import DataError

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
forecast (float[batch, 5, 2] past) => (float[batch, 2] future)
<float[10, 2] weight = {WEIGHT}, int64[2] flat = {0, -1}>
{
    all = Reshape (past, flat)
    future = MatMul (all, weight)
}
"""
LENGTH, HORIZON = 5, 2


def frame(series: int = 3, rows: int = 60) -> pd.DataFrame:
    """Return rows of several series, mixed with each other, each in the order of time; `load` says series and time."""
    parts = [
        pd.DataFrame(
            {
                "meter": f"m{number}",
                "time": pd.date_range("2026-01-01", periods=rows + 7 * number, freq="h").astype(str),
                "load": 1000.0 * number + np.arange(rows + 7 * number),
                "heat": np.random.default_rng(number).normal(size=rows + 7 * number),
            }
        )
        for number in range(series)
    ]
    return pd.concat(parts).sort_values(["time", "meter"]).reset_index(drop=True)


def config_of(
    folder: Path, rows: pd.DataFrame, /, *, table: dict[str, Any] | None = None, split: str = "random", **window: Any
) -> RunConfig:
    folder.mkdir(exist_ok=True)
    weight = ", ".join(["0.1"] * 20)
    onnx.save(onnx.parser.parse_model(MODEL.replace("WEIGHT", weight)), folder / "model.onnx")
    rows.to_csv(folder / "data.csv", index=False)
    windows = {"length": LENGTH, "horizon": HORIZON, "by": "meter", "time": "time"} | window
    data = {
        "source": str(folder / "data.csv"),
        "evaluation_fraction": 0.25,
        "inputs": {"past": ["load", "h*t"]},
        "label": "load_ahead",
        "split": split,
        "table": {"window": windows} | (table or {}),
    }
    model = {"path": folder / "model.onnx", "loss": "mse"}
    return with_inputs(build_config({"model": model, "data": data, "train": {"num_steps": 1}}))


def windows_of(config: RunConfig, folder: Path) -> dict[str, list[tuple[list[float], list[float]]]]:
    """Return (past, future) of `load` for every window, by split."""
    directory, *_ = make_training_shards(config, folder / "cache")
    found = {}
    for split in ("train", "evaluation"):
        shards = open_shards(directory, split)  # type: ignore[arg-type]
        rows = shards.read(np.arange(shards.num_rows))
        pasts, futures = np.asarray(rows["load"]).tolist(), np.asarray(rows["load_ahead"]).tolist()
        found[split] = list(zip(pasts, futures, strict=True))
    return found


@pytest.mark.parametrize("stride", [1, 3])
def test_windows_are_consecutive_rows_of_one_series_split_by_time_without_a_leak(tmp_path: Path, stride: int) -> None:
    rows = frame()
    config = config_of(tmp_path, rows, stride=stride)
    assert check_files_and_data(dict(config)) == []
    found = windows_of(config, tmp_path)
    for past, future in (window for split in found.values() for window in split):
        whole = [*past, *future]
        assert whole == list(np.arange(whole[0], whole[0] + LENGTH + HORIZON))
    hours = {value: value % 1000 for split in found.values() for past, future in split for value in [*past, *future]}
    seen = max(hours[value] for past, future in found["train"] for value in [*past, *future])
    predicted = [hours[value] for _, future in found["evaluation"] for value in future]
    assert seen < min(predicted)
    # nothing but the windows across the cut is left out
    by_series = [len(rows[rows["meter"] == meter]) for meter in ("m0", "m1", "m2")]
    every = sum(len(range(0, number - LENGTH - HORIZON + 1, stride)) for number in by_series)
    across = -(-(HORIZON - 1) // stride) * 3
    assert every - across <= sum(map(len, found.values())) <= every
    share = len(found["evaluation"]) / every
    assert 0.15 < share < 0.35


def test_whole_series_are_held_out(tmp_path: Path) -> None:
    found = windows_of(config_of(tmp_path, frame(8), split="series"), tmp_path)
    training, held = ({past[0] // 1000 for past, _ in found[split]} for split in ("train", "evaluation"))
    assert len(training) == 6
    assert len(held) == 2
    assert not training & held


def test_series_are_fed_with_their_columns_last_and_scaled_by_one_mean(tmp_path: Path) -> None:
    rows = frame()
    config = config_of(tmp_path, rows, table={"standardise": "standard"})
    signature = read_training_signature(config.model)
    directory, manifest, _ = make_training_shards(config, tmp_path / "cache")
    shards = open_shards(directory, "train")
    batch = one_batch(shards, config, signature, np.arange(4))
    assert batch.inputs[0].shape == (4, LENGTH, 2)
    assert batch.labels[0] is not None
    assert batch.labels[0].shape == (4, HORIZON)
    plain = windows_of(config_of(tmp_path / "plain", rows), tmp_path / "plain")["train"]
    values = np.array([past for past, _ in plain])
    expected = (values[:4] - values.mean()) / values.std()
    np.testing.assert_allclose(batch.inputs[0][:, :, 0].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert manifest.fitted["load"].center == pytest.approx((values.mean(),) * LENGTH)
    assert read_first_rows(config, signature, 4).fitted == manifest.fitted


def test_rows_that_are_not_in_order_are_refused_by_their_line(tmp_path: Path) -> None:
    rows = frame(1)
    swapped = rows.iloc[[*range(20), 21, 20, *range(22, 60)]]
    with pytest.raises(DataError, match=r"line 23: time 2026-01-01 20:00:00 does not come after 2026-01-01 21:00:00"):
        windows_of(config_of(tmp_path, swapped), tmp_path)
    with pytest.raises(DataError, match="remove rows that are there twice"):
        windows_of(config_of(tmp_path, pd.concat([rows, rows.tail(1)])), tmp_path)
    bad = rows.astype({"load": object})
    bad.loc[7, "load"] = "?"
    with pytest.raises(DataError, match=r"line 9: load is '\?', not a number"):
        config_of(tmp_path, bad)
    with pytest.raises(DataError, match="no series has the 107 rows of a window"):
        config_of(tmp_path, rows, length=105)
    with pytest.raises(DataError, match="there is 1 series"):
        windows_of(config_of(tmp_path, rows, split="series"), tmp_path)
    with pytest.raises(DataError, match="names 'hour', which"):
        config_of(tmp_path, rows, time="hour")


def test_small_blocks_give_the_same_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = windows_of(config_of(tmp_path / "a", frame()), tmp_path / "a")
    monkeypatch.setattr(series_windows, "BLOCK_BYTES", 500)
    assert windows_of(config_of(tmp_path / "b", frame()), tmp_path / "b") == whole
