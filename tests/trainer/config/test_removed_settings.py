"""A setting that is gone is refused by name, with what takes its place; runs that did not set it go on as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onward.trainer.config.loading import build_config, load_config
from onward.trainer.config.removed_settings import REMOVED
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.section import Section, table_type
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.kept_settings import edited_settings, refuse_edited, write_settings

GOOD: dict[str, Any] = {
    "model": {"path": "/m.onnx"},
    "data": {
        "source": "digits",
        "image": {},
        "audio": {},
        "text": {"tokenizer": "/t.json"},
        "table": {"window": {"length": 3}},
    },
    "train": {"num_steps": 5},
    "optimizer": {"weights": [{"pattern": "head.*"}]},
}
"""With all tables that a configuration may leave out."""


def with_setting(settings: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Settings with one more; in each table of a list."""
    name, _, rest = key.partition(".")
    inner = settings.get(name, {})
    if not rest:
        return settings | {name: value}
    if isinstance(inner, list):
        return settings | {name: [with_setting(each, rest, value) for each in inner]}
    return settings | {name: with_setting(inner, rest, value)}


def saved(**sections: Any) -> dict[str, Any]:
    """config.json of a run."""
    found: dict[str, Any] = json.loads(build_config(GOOD | sections).model_dump_json())
    return found


def run_with(folder: Path, settings: dict[str, Any]) -> RunDir:
    run = RunDir(folder)
    folder.mkdir(exist_ok=True)
    run.config.write_text(json.dumps(settings))
    return run


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_in_a_configuration_is_answered_with_what_takes_its_place(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_config(with_setting(GOOD, key, REMOVED[key].same[0]))
    said = key.replace("optimizer.weights.", "optimizer.weights.0.")
    assert refused.value.problems == (f"{said} is no setting any more: {REMOVED[key].instead}",)


def test_overrides_are_answered_too() -> None:
    with pytest.raises(ConfigError, match=r'recompute.stash is no setting any more: set recompute.mode = "compressed_'):
        load_config(GOOD, ["recompute.stash=fp8"])


@pytest.mark.parametrize("key", REMOVED)
def test_no_removed_setting_is_a_setting(key: str) -> None:
    section: type[Section] = RunConfig
    *tables, name = key.split(".")
    for table in tables:
        inner = section.model_fields[table].annotation
        section = table_type(inner) or inner.__args__[0]  # type: ignore[union-attr,assignment]
    assert name not in section.model_fields


def test_an_older_run_that_did_not_set_them_is_read_and_goes_on_as_a_run_of_now(tmp_path: Path) -> None:
    older = saved()
    for key, removed in REMOVED.items():
        older = with_setting(older, key, removed.same[0])
    run = run_with(tmp_path / "run", older)
    assert read_config(run, "given") == build_config(GOOD)
    # its record of the settings that it may go on with is older, too
    write_settings(run, build_config(GOOD))
    kept = json.loads(run.accepted.read_text())
    run.accepted.write_text(json.dumps(kept | {"settings": older}))
    run.config.write_text(json.dumps(older))
    assert edited_settings(run) == []


OTHERS: dict[str, Any] = {
    "average.warmup": True,
    "graph.compile_mode": "reduce-overhead",
    "launch.collective_timeout_s": 250.0,
    "optimizer.adafactor": {"decay_exponent": 0.5, "epsilon_scale": 1e-3, "clip": 1.0},
    "optimizer.weights.ratio_max": 5.0,
    "data.text.end_token": "</s>",
    "quantize.reduce_range": False,
}


@pytest.mark.parametrize("key", OTHERS)
def test_an_older_run_that_set_one_is_refused_with_the_value_and_what_to_do(tmp_path: Path, key: str) -> None:
    older = with_setting(saved(), key, OTHERS[key])
    run = run_with(tmp_path / "run", older)
    write_settings(run, build_config(GOOD))
    kept = json.loads(run.accepted.read_text())
    run.accepted.write_text(json.dumps(kept | {"settings": older}))
    run.config.write_text(json.dumps(older))
    with pytest.raises(ConfigError) as refused:
        read_config(run)
    with pytest.raises(ConfigError) as when_resumed:
        refuse_edited(run)
    assert str(when_resumed.value) == str(refused.value)
    said = key.replace("optimizer.weights.", "optimizer.weights.0.")
    assert f"{said} was {OTHERS[key]!r} in this run of an earlier version" in str(refused.value)
    assert f"{REMOVED[key].instead}; go on with the version that began the run" in str(refused.value)


def test_settings_that_have_changed_their_form_are_said_to_have() -> None:
    match = [{"student": "a", "teacher": "b", "weight": 0.5}]
    with pytest.raises(ConfigError, match=r"teacher\.match: is one table, \{student's tensor = teacher's tensor\}"):
        build_config(GOOD | {"teacher": {"path": "/t.onnx", "match": match}})
    assert RunConfig.model_validate(saved() | {"teacher": {"match": []}}).teacher.match == {}


@pytest.mark.parametrize(
    ("launch", "compiles", "limits"),
    [
        ({}, False, (100.0, 0.0)),
        ({}, True, (1800.0, 1800.0)),
        ({"heartbeat_timeout_s": 60}, False, (50.0, 0.0)),
        ({"start_timeout_s": 3600}, True, (3600.0, 3600.0)),
    ],
)
def test_the_limits_of_time_that_are_left_decide_the_others(
    launch: dict[str, Any], compiles: bool, limits: tuple[float, float]
) -> None:
    config = build_config(GOOD | {"launch": launch, "graph": {"compile": compiles}})
    assert (config.collective_timeout_s, config.compile_timeout_s) == limits
