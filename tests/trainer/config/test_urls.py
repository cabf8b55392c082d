"""URLs among the settings: kept as they are, beside anchored paths; credentials in them are refused and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.trainer.config.loading import load_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.urls import redacted, url_of
from onward.trainer.errors import ConfigError

CONFIG = """
[model]
path = "s3://models/resnet/model.onnx"
converters = ["rules.py", "https://example.com/rules.py"]
[data]
source = "gs://data/train/*.parquet"
evaluation_source = "held-out.csv"
[train]
num_steps = 1
[export]
path = "az://out/trained.onnx"
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "config.toml").write_text(CONFIG)
    return load_config(tmp_path / "config.toml")


def test_urls_are_kept_and_paths_are_anchored(config: RunConfig, tmp_path: Path) -> None:
    assert url_of(config.model.path) == "s3://models/resnet/model.onnx"
    assert config.model.path.name == "model.onnx"
    assert [url_of(path) or path for path in config.model.converters] == [
        tmp_path / "rules.py",
        "https://example.com/rules.py",
    ]
    assert (config.data.source, config.export.path) == ("gs://data/train/*.parquet", "az://out/trained.onnx")
    assert config.data.evaluation_source == str(tmp_path / "held-out.csv")


def test_urls_survive_json_and_a_path_that_pathlib_has_shortened(config: RunConfig) -> None:
    saved = config.model_dump_json()
    assert '"path":"s3://models/resnet/model.onnx"' in saved
    assert RunConfig.model_validate_json(saved) == config
    assert load_config(config) == config
    shortened = load_config(config, {"model.path": Path("s3://models/other.onnx")}.items())
    assert url_of(shortened.model.path) == "s3://models/other.onnx"


@pytest.mark.parametrize("path", ["/data/s3:/x", "relative/x.csv", "c:x", "digits", "/a//b", "/a:b/c"])
def test_local_paths_are_no_urls(path: str) -> None:
    assert url_of(path) == ""


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("https://me:hunter2@example.com/train.csv", "a user name or password"),
        ("s3://KEY:hunter2@bucket/train.csv", "a user name or password"),
        ("abfs://container:hunter2@account.dfs.core.windows.net/train.csv", "a user name or password"),
        ("https://bucket.s3.amazonaws.com/train.csv?X-Amz-Signature=hunter2", "the query parameters X-Amz-Signature"),
        ("https://account.blob.core.windows.net/c/train.csv?sig=hunter2&se=1", "the query parameters se, sig"),
        ("https://example.com/train.csv?token=hunter2", "the query parameters token"),
    ],
)
def test_credentials_in_a_url_are_refused_without_showing_them(tmp_path: Path, url: str, what: str) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    for setting in ("data.source", "model.path", "export.path", "model.converters"):
        value = [url] if setting == "model.converters" else url
        with pytest.raises(ConfigError) as refusal:
            load_config(tmp_path / "config.toml", [(setting, value)])
        (problem,) = refusal.value.problems
        assert f"is given with {what}: credentials in a URL would get into records and logs" in problem
        assert "hunter2" not in problem


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("ftp://example.com/train.csv", "ftp://example.com/train.csv has scheme ftp://; known are s3,"),
        ("s3://", "s3:// names no file"),
        ("https://example.com", "https://example.com names no file"),
        ("s3://bucket/a//b.csv", "has an empty part or '..' in its path"),
        ("s3://bucket/../b.csv", "has an empty part or '..' in its path"),
        ("https://example.com/a/%2e%2E/b.csv", "has an empty part or '..' in its path"),
        ("https://example.com/a/..%2fb.csv", "has an empty part or '..' in its path"),
    ],
)
def test_urls_that_cannot_be_read_are_refused(tmp_path: Path, url: str, sentence: str) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    with pytest.raises(ConfigError) as refusal:
        load_config(tmp_path / "config.toml", [("data.source", url)])
    assert sentence in "\n".join(refusal.value.problems)


def test_harmless_query_parameters_are_accepted_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    url = "https://example.com/get.csv?id=5&download=1"
    assert load_config(tmp_path / "config.toml", [("data.source", url)]).data.source == url
    assert redacted(url) == "https://example.com/get.csv"
