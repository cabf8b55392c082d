"""What the parameters of a deployment's run may name: files below its directories, and Python that was deployed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from onward.flows.deploying import deployment_limits
from onward.flows.deploying.deployment_limits import check_limits, limits_of, record
from onward.trainer.config.loading import build_config
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.errors import ConfigError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, data and code, a private file elsewhere, and Onward's home above none of them."""
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    for name in ("work/model.onnx", "work/data/a.npz", "work/data/b.npz", "elsewhere/private.npz", "home/login"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "work" / "rules.py").write_text("# reviewed")
    (tmp_path / "work" / "loss.py").write_text("# reviewed")
    return tmp_path


def settings(place: Path, **changes: Any) -> dict[str, Any]:
    work = place / "work"
    sections: dict[str, Any] = {
        "model": {"path": work / "model.onnx", "converters": [work / "rules.py"]},
        "data": {"source": str(work / "data" / "*.npz")},
        "loss": {"file": f"{work}/loss.py:distance"},
        "train": {"num_steps": 1},
    }
    changes |= {"teacher__loss": "mse"} if "teacher__path" in changes else {}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        sections[section] = {**sections.get(section, {}), name: value}
    return dict(build_config(sections))


def refused(place: Path, **changes: Any) -> list[str]:
    """Return why a run with these changed parameters is refused; [] if it is not."""
    record("id", limits_of("nightly", settings(place)))
    try:
        check_limits("id", settings(place, **changes))
    except ConfigError as error:
        return [problem for problem in error.problems if "`onward deploy --allow DIRECTORY`" not in problem]
    return []


def test_a_run_may_use_the_directories_of_its_configuration_and_its_own_home(place: Path) -> None:
    assert refused(place) == []
    assert refused(place, data__source=str(place / "work" / "data" / "b.npz")) == []
    assert refused(place, data__source="digits", export__path=str(place / "work" / "new.onnx")) == []
    assert refused(place, checkpoint__load=str(place / "home" / "runs" / "x" / "checkpoints")) == []
    assert refused(place, model__path="models:/digits@champion") == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model__path", "{place}/elsewhere/model.onnx"),
        ("data__source", "{place}/elsewhere/private.npz"),
        ("data__source", "{place}/elsewhere/p*.npz"),
        ("data__source", "{place}/work/data/*/../../../elsewhere/private.npz"),
        ("data__evaluation_source", "/"),
        ("data__test_source", "{place}/work/../elsewhere"),
        ("data__source", "private.npz"),
        ("data__source", "{place}/home/login"),
        ("checkpoint__load", "{place}/elsewhere"),
        ("launch__hostfile", "{place}/elsewhere/hosts"),
        ("export__path", "{place}/elsewhere/over.onnx"),
        ("export__path", "{place}/workshop/over.onnx"),
        ("export__path", "{place}/home/deployments/id.onnx"),
        ("teacher__path", "{place}/elsewhere/teacher.onnx"),
        ("export__path", "https://evil.example/over.onnx"),
        ("data__source", "s3://bucket/private.npz"),
        ("loss__file", "{place}/elsewhere/loss.onnx"),
        ("data__files_from", "{place}/elsewhere"),
        ("data__files_from", "/"),
        ("data__image", ImageConfig(masks="../../elsewhere")),
        ("data__image", ImageConfig(masks="/")),
    ],
)
def test_a_path_elsewhere_is_refused_with_the_directories(place: Path, key: str, value: str | ImageConfig) -> None:
    (problem,) = refused(place, **{key: value.format(place=place) if isinstance(value, str) else value})
    assert problem.startswith(key.replace("__", "."))
    assert f"may use: {place}/work, {place}/work/data" in problem


def test_directories_of_named_files_and_masks_are_those_of_the_configuration(place: Path) -> None:
    allowed = {"data__files_from": [str(place / "elsewhere")], "data__image": ImageConfig(masks="../masks")}
    (place / "work" / "masks").mkdir()
    record("id", limits_of("nightly", settings(place, **allowed)))
    check_limits("id", settings(place, **allowed))
    check_limits("id", settings(place, data__source=str(place / "elsewhere" / "private.npz")))


@pytest.mark.parametrize("folder", ["/home/somebody/private", "../../../private"])
def test_the_masks_of_a_source_that_is_fetched_are_in_what_is_fetched(place: Path, folder: str) -> None:
    remote = {"data__source": "https://example.com/photos/a"}
    record("id", limits_of("nightly", settings(place, **remote)))
    check_limits("id", settings(place, data__image=ImageConfig(masks="./masks"), **remote))
    with pytest.raises(ConfigError, match=r"data\.image\.masks /.*private.* is not below"):
        check_limits("id", settings(place, data__image=ImageConfig(masks=folder), **remote))


def test_a_link_that_leads_elsewhere_is_refused_with_its_target(place: Path) -> None:
    record("id", limits_of("nightly", settings(place)))
    (place / "work" / "data" / "c.npz").symlink_to(place / "elsewhere" / "private.npz")
    with pytest.raises(ConfigError, match=rf"c\.npz \({place}/elsewhere/private\.npz\) is not below"):
        check_limits("id", settings(place, data__source=str(place / "work" / "data" / "c.npz")))
    with pytest.raises(ConfigError, match="is not below"):
        check_limits("id", settings(place))  # its pattern finds the link
    record("id", limits_of("nightly", settings(place)))  # deployed with it, its author has seen it
    check_limits("id", settings(place))


def test_the_home_is_closed_even_where_a_directory_above_it_is_open(place: Path) -> None:
    record("id", limits_of("wide", settings(place), [str(place)]))
    check_limits("id", settings(place, data__source=str(place / "elsewhere" / "private.npz")))
    with pytest.raises(ConfigError, match="login is not below"):
        check_limits("id", settings(place, data__source=str(place / "home" / "login")))
    with pytest.raises(ConfigError, match="there is no such directory"):
        limits_of("wide", settings(place), [str(place / "missing")])


def test_python_runs_only_as_it_was_when_it_was_deployed(place: Path) -> None:
    other = place / "work" / "other.py"
    other.touch()
    (problem,) = refused(place, model__converters=[other])
    assert f"model.converters {other} executes Python that the deployment's author has not named" in problem
    (problem,) = refused(place, loss__file=f"{other}:distance")
    assert f"loss.file {other} executes Python" in problem
    assert refused(place, loss__file=f"{place}/work/rules.py:anything") == [], "a file that was named"
    record("id", limits_of("nightly", settings(place)))
    (place / "work" / "rules.py").write_text("import os")
    with pytest.raises(ConfigError, match=r"rules\.py is not the file that was deployed: it has changed since"):
        check_limits("id", settings(place))
    with pytest.raises(ConfigError, match="from local files only"):
        limits_of("nightly", settings(place, model__converters=["https://host.example/rules.py"]))


@pytest.mark.parametrize(
    "loss", ["other.py:f.onnx", "other.py:f", "other.py", "other.onnx:f", "other.ONNX", "a:b/other.py:f.onnx"]
)
def test_what_is_not_known_to_be_data_is_code(loss: str, place: Path) -> None:
    """A function that ends like an ONNX file was taken for one, and the file before the colon was executed."""
    location = loss if "/" in loss else loss.partition(":")[0]
    location = location.removesuffix(":f.onnx")
    # not through build_config, which refuses some of them: Prefect's parameters reach the limits section by section
    given = settings(place) | {"loss": (LossConfig(name="file", file=f"{place}/work/{loss}"),)}
    record("id", limits_of("nightly", settings(place)))
    with pytest.raises(ConfigError) as caught:
        check_limits("id", given)
    assert caught.value.problems[0].startswith(
        f"loss.file {place}/work/{location} executes Python that the deployment's"
    )


def test_the_digests_that_were_allowed_are_handed_on(place: Path) -> None:
    record("id", limits_of("nightly", settings(place)))
    digest = hashlib.sha256(b"# reviewed").hexdigest()
    allowed = check_limits("id", settings(place))
    assert allowed == {str(place / "work" / name): digest for name in ("rules.py", "loss.py")}


def test_metrics_go_where_they_went_when_it_was_deployed(place: Path) -> None:
    (problem,) = refused(place, monitor__tracking_uri=f"sqlite:///{place}/elsewhere/new.db")
    assert "monitor.tracking_uri" in problem


def test_without_a_readable_record_nothing_runs(place: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; `onward deploy` on the machine of the worker writes it"):
        check_limits("unknown", settings(place))
    record("id", limits_of("nightly", settings(place)))
    (place / "home" / "deployments" / "id.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        check_limits("id", settings(place))


# -- signed ones; test_other_pools.py has those of a real server


def test_signed_limits_count_and_not_an_older_record_in_this_home(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record("id", limits_of("nightly", settings(place)))
    signed = {"id": limits_of("nightly", settings(place), [str(place / "elsewhere")]).model_dump_json()}
    monkeypatch.setattr(deployment_limits, "published_limits", lambda deployment: signed.get(deployment, ""))
    elsewhere = settings(place, data__source=str(place / "elsewhere" / "private.npz"))
    check_limits("id", elsewhere)
    (place / "home" / "deployments" / "id.json").write_text("{")
    check_limits("id", elsewhere)
    record("id", limits_of("nightly", settings(place)))
    signed.clear()
    with pytest.raises(ConfigError, match="is not below"):
        check_limits("id", elsewhere)
