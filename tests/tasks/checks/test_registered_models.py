"""Models that a configuration names by `models:/` and `runs:/`, on a real MLflow store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from onward.infra.mlflow.registry import Registry
from onward.tasks.checks.registered_models import local_model, with_registered
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.data.reading.fetching import fetch
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.run.remote.local_copies import LocalCopies, with_copies
from tests.infra.mlflow.test_tracking import adder
from tests.support.stores import free_port, new_run, tracking_store


def config_of(model: str, uri: str = "") -> RunConfig:
    raw = {"model": {"path": model}, "data": {"source": "digits"}, "train": {"num_steps": 1}}
    return build_config({**raw, "monitor": {"tracking_uri": uri or tracking_store()}})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def copied(config: RunConfig, known: LocalCopies | None = None) -> LocalCopies:
    """The copies of a configuration, as `onward run` makes them."""
    copies, problems = fetch(config, with_registered(config, known))
    assert problems == []
    return copies


@pytest.mark.slow
def test_an_alias_means_the_version_that_it_names_now_and_for_a_resumed_run_the_one_that_it_named_then(
    tmp_path: Path, home: Path
) -> None:
    tracker, registry = new_run(), Registry(tracking_store())
    files = [adder(tmp_path, by=by) for by in (1.0, 2.0)]
    for file in files:
        tracker.register_model(file, name="pinned")
    registry.set_alias(registry.version("pinned", "1"), "champion")
    config = config_of("models:/pinned@champion")
    assert config_of(str(config.model.path)) == config
    began = copied(config)
    (copy,) = began.copies
    assert (copy.url, copy.key) == ("models:/pinned@champion", f"pinned/1 {files[0].sha256}")
    assert copy.path.read_bytes() == files[0].path.read_bytes()

    registry.set_alias(registry.version("pinned", "2"), "champion")
    assert copied(config, began) == began
    shutil.rmtree(home / "downloads")  # a cache may be emptied
    assert copied(config, began) == began
    assert copy.path.read_bytes() == files[0].path.read_bytes()
    assert copied(config).copies[0].path.read_bytes() == files[1].path.read_bytes()


def test_a_teacher_is_named_like_the_model(tmp_path: Path) -> None:
    file = adder(tmp_path, by=7.0)
    new_run().register_model(file, name="a-teacher")
    config = config_of("model.onnx")
    taught = config.model_copy(update={"teacher": TeacherConfig(path="models:/a-teacher/1")})
    assert Path(with_copies(taught, copied(taught)).teacher.path).read_bytes() == file.path.read_bytes()
    unknown = config.model_copy(update={"teacher": TeacherConfig(path="models:/a-teacher@champion")})
    with pytest.raises(ConfigError, match=r"teacher\.path: models:/a-teacher@champion: a-teacher has no alias"):
        with_registered(unknown)


def test_what_the_registry_lacks_is_refused_with_what_it_has_and_an_outage_is_none_of_the_users_errors(
    tmp_path: Path,
) -> None:
    new_run().register_model(adder(tmp_path, by=1.0), name="alone")
    with pytest.raises(ConfigError, match=r"model\.path: models:/alone@champion: alone has no alias 'champion'"):
        with_registered(config_of("models:/alone@champion"))
    with pytest.raises(ConfigError, match=r"no version 4; its versions are 1"):
        with_registered(config_of("models:/alone/4"))
    with pytest.raises(RuntimeUnavailable, match=r"model\.path: MLflow at http://127\.0\.0\.1"):
        with_registered(config_of("models:/alone/1", f"http://127.0.0.1:{free_port()}"))


def test_damaged_artifacts_are_refused(tmp_path: Path) -> None:
    tracker, file = new_run(), adder(tmp_path, by=3.0)
    tracker.register_model(file, name="damaged-artifacts")
    version = tracker._client.get_model_version("damaged-artifacts", "1")
    (Path(version.source.removeprefix("file://")) / "model.onnx").write_bytes(adder(tmp_path, by=4.0).path.read_bytes())
    with pytest.raises(ConfigError, match="they were changed or damaged"):
        with_registered(config_of("models:/damaged-artifacts/1"))


def test_a_file_of_a_run_is_downloaded_and_only_the_model_may_be_named_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, file = new_run(), adder(tmp_path, by=5.0)
    tracker.log_file(file.path, "files")
    uri = f"runs:/{tracker.run_id}/files/{file.path.name}"
    assert copied(config_of(uri)).copies[0].path.read_bytes() == file.path.read_bytes()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_store())
    assert local_model(Path(uri)).read_bytes() == file.path.read_bytes()
    config = config_of("model.onnx")
    config = config.model_copy(update={"data": config.data.model_copy(update={"source": uri})})
    _, problems = fetch(config, with_registered(config))
    assert "only model.path may" in problems[0]
