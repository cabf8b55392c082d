"""`onward init` writes configurations that train as written, asks what it cannot decide, refuses what fits nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import onward
from onward.trainer.config.loading import load_config
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError
from onward.trainer.proposal import proof, tried
from tests.support.remote_servers import web_server
from tests.support.unseen import UNSEEN

PROPOSED: dict[str, dict[str, Any]] = {
    "image folder": {"data.image": {}, "model.loss": "cross_entropy"},
    "npz": {"data.label": "quadrant", "model.loss": "cross_entropy"},
    "csv text": {"data.text.columns": "sentence", "data.label": "verdict", "model.loss": "cross_entropy"},
    "causal text": {"data.text.task": "causal"},
    "masks": {"data.image.masks": "../masks", "data.image.mask_values": [0, 255], "data.label": "mask"},
    "parquet regression": {"data.label": "yield", "model.loss": "mse", "data.table.missing": "mean"},
    "two outputs": {"loss.0.label": "mode", "loss.1.label": ["load_left", "load_right"], "loss.1.name": "mse"},
    "labels are an input": {"model.loss": "output"},
    "audio folder": {"data.audio.features": "log_mel", "data.audio.mel_bins": 40, "data.split": "stratified"},
    "categories": {"data.table.categories": ["island"], "data.table.missing": "mean", "data.label": "species"},
    "series": {"data.table.window.length": 24, "data.table.window.horizon": 3, "data.label": "load_ahead"},
}
"""What the configuration of each kind says, among other things."""


def test_trials_and_proof_of_a_slow_model_take_fewer_rows_and_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = UNSEEN["image folder"](tmp_path)
    monkeypatch.setattr(tried, "LIMIT_S", 1e-3)
    monkeypatch.setattr(proof, "PROOF_S", 0.0)
    found = onward.init(tmp_path / "model.onnx", data, output=tmp_path / "config.toml")
    assert found.proof is not None
    assert found.proof.steps == 1


@pytest.mark.parametrize("kind", UNSEEN)
def test_the_configuration_of_a_model_never_seen_trains_as_written(kind: str, tmp_path: Path) -> None:
    data = UNSEEN[kind](tmp_path)
    found = onward.init(tmp_path / "model.onnx", data, output=tmp_path / "config.toml")
    assert not found.questions
    assert not found.refused
    assert found.proof is not None
    assert found.proof.steps == 20
    assert found.proof.loss_after < found.proof.loss_before
    text = (tmp_path / "config.toml").read_text()
    assert len(text.splitlines()) <= 40, text
    assert max(map(len, text.splitlines())) <= 200, text
    config = load_config(tmp_path / "config.toml", check=check_files_and_data)
    settings = {guess.setting: guess for guess in found.guesses}
    for key, value in PROPOSED[kind].items():
        assert setting(config.model_dump(mode="json"), key) == value or (key == "data.image" and config.data.image), (
            text
        )
    assert settings.keys() >= {"optimizer.learning_rate", "train.global_batch_size"}
    assert all(guess.reason for guess in found.guesses)


def test_a_model_and_data_behind_urls_are_proposed_by_their_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    data = UNSEEN["parquet regression"](tmp_path)
    files = {"m/model.onnx": (tmp_path / "model.onnx").read_bytes(), "d/crops.parquet": data.read_bytes()}
    with web_server(files) as web:
        model, source = f"{web.url}/m/model.onnx", f"{web.url}/d/crops.parquet"
        found = onward.init(model, source, output=tmp_path / "config.toml")
        assert found.proof is not None
        config = load_config(tmp_path / "config.toml")
        assert str(config.model.path).endswith("/m/model.onnx")
        assert config.data.source == source
        text = (tmp_path / "config.toml").read_text()
        assert f'path = "{model}"' in text
        with pytest.raises(ConfigError, match=r"absent\.csv"):
            onward.init(model, f"{web.url}/absent.csv", output=tmp_path / "other.toml")
    assert not (tmp_path / "other.toml").exists()


def setting(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[int(part)] if isinstance(config, list) else config[part]
    return config
