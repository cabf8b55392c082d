"""The JSON schema from which Prefect's pages make the form: order, titles, and sections that are closed.

The form itself is looked at in tests/browser.
"""

from __future__ import annotations

from typing import Any

import pytest
from prefect.utilities.schema_tools.validation import is_valid_schema, validate

from onward.flows.form import settings_of, short_form
from onward.flows.train_onnx import train_onnx
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found: dict[str, Any] = train_onnx.parameters.model_dump()
    return found


def settings_in_order(schema: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(section, setting, its schema) of every section that is open, in the order of the form."""

    def by_position(properties: dict[str, Any]) -> list[tuple[str, Any]]:
        return sorted(properties.items(), key=lambda pair: int(pair[1]["position"]))

    found = []
    for section, shown in by_position(schema["properties"]):
        if reference := shown.get("$ref"):
            inner = schema["definitions"][reference.rpartition("/")[2]]
            found += [(section, setting, each) for setting, each in by_position(inner["properties"])]
    return found


def test_the_ten_common_settings_come_first_in_the_sections_that_come_first(schema: dict[str, Any]) -> None:
    found = settings_in_order(schema)
    common = [f"{section}.{setting}" for section, setting, each in found if each.get("common")]
    assert common == [
        *("model.path", "model.loss", "data.source", "data.label"),
        *("train.global_batch_size", "train.num_steps", "train.num_epochs"),
        *("optimizer.name", "optimizer.learning_rate", "parallel.data"),
    ]
    sections = list(dict.fromkeys(section for section, _, _ in found))
    for section in sections:
        marks = [bool(each.get("common")) for name, _, each in found if name == section]
        assert marks == sorted(marks, reverse=True), f"{section}: a common setting stands behind another one"
    assert sorted(schema["properties"], key=lambda name: int(schema["properties"][name]["position"]))[:5] == sections


def test_all_other_sections_are_closed_and_say_what_they_are_for(schema: dict[str, Any]) -> None:
    opened = {section for section, _, _ in settings_in_order(schema)}
    for name, shown in schema["properties"].items():
        if name in opened or name in ("name", "resume"):
            continue
        if shown.get("type") == "array":
            assert shown["default"] == []
            continue
        assert (shown["default"], shown["anyOf"][1]) == (None, {"type": "null"}), name
        assert shown["description"].endswith(" None: its defaults."), name
        assert len(shown["description"]) > 40, name


def test_every_setting_has_a_title_and_a_meaning(schema: dict[str, Any]) -> None:
    for kind, definition in schema["definitions"].items():
        for name, shown in definition["properties"].items():
            assert shown["title"] == name.replace("_", " ").title(), f"{kind}.{name}"
            assert shown.get("description"), f"{kind}.{name}"


def test_a_closed_section_is_that_of_a_configuration_without_it() -> None:
    config = build_config({"model": {"path": "m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 3}})
    absent = {name: None for name in RunConfig.model_fields if name not in ("model", "data", "train")}
    given = {**dict(config), **absent, "metrics": (), "loss": (), "name": config.name}
    assert RunConfig(**settings_of(given)) == config
    with pytest.raises(KeyError):
        settings_of({name: value for name, value in given.items() if name != "lora"})


GIVEN = {
    "model": {"path": "/m.onnx", "loss": "cross_entropy"},
    "data": {"source": "/d.csv", "label": "y", "table": {"missing": "skip"}},
    "train": {"num_steps": 9, "seed": 1},
    "launch": {"device": "cpu"},
    "name": "m",
}


def test_the_form_of_a_deployment_shows_the_common_settings_and_its_own(schema: dict[str, Any]) -> None:
    short = short_form(schema, GIVEN)
    shown = {name: set(definition["properties"]) for name, definition in short["definitions"].items()}
    assert shown["ModelConfig"] == {"path", "loss"}
    assert shown["DataConfig"] == {"source", "label", "table"}
    assert shown["TableConfig"] == {"missing"}
    assert shown["TrainConfig"] == {"global_batch_size", "num_steps", "num_epochs", "seed"}
    assert shown["OptimizerConfig"] == {"name", "learning_rate"}
    assert shown["LaunchConfig"] == {"device"}
    assert short["definitions"]["ExportConfig"] == schema["definitions"]["ExportConfig"], "a closed section has all"
    assert set(short["properties"]) == set(schema["properties"])
    assert "Use JSON input" in short["definitions"]["TrainConfig"]["description"]
    assert "patternProperties" not in schema["definitions"]["TrainConfig"], "the schema of the flow stays as it is"


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("train", "clip_norm", 1.0, ""),
        ("train", "clip_norm", -1, "-1 is less than"),
        ("train", "clip_norms", 1.0, "does not match any of the regexes"),
        ("data", "evaluation_source", 3, "3 is not of type 'string'"),
        ("launch", "retries", 2, ""),
        ("launch", "retries", "two", "is not valid under any"),
    ],
)
def test_prefect_checks_a_setting_that_the_short_form_does_not_show(
    schema: dict[str, Any], section: str, key: str, value: object, message: str
) -> None:
    short = short_form(schema, GIVEN)
    is_valid_schema(short)
    assert validate(GIVEN, short) == []
    given: dict[str, Any] = {**GIVEN, section: {**GIVEN[section], key: value}}  # type: ignore[dict-item]
    found = [error.message for error in validate(given, short)]
    assert bool(found) == bool(message), found
    assert not message or message in found[0]
    assert bool(validate(given, schema)) == bool(message), "as without it"
