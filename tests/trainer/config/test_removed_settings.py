"""A setting that is gone is refused by name, with what takes its place; runs that did not set it go on as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from onward.flows.running.named_run import limits_to_resume
from onward.flows.running.replayed_training import scratch_run
from onward.trainer.config.flat_settings import flat_settings, nested_settings
from onward.trainer.config.loading import build_config, load_config
from onward.trainer.config.removed_settings import REMOVED
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.section import Section, table_type
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.kept_settings import (
    KeptSettings,
    accept_edited,
    edited_settings,
    refuse_edited,
    write_settings,
)
from onward.trainer.run.recorded.setting_sources import Origins
from onward.trainer.run.records import write_record

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
    "loss": [{"name": "cross_entropy"}],
    "optimizer": {"weights": [{"pattern": "head.*"}]},
}
"""With all tables that a configuration may leave out."""


def former_default(key: str) -> Any:
    return (*REMOVED[key].same, False)[0]


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
        build_config(with_setting(GOOD, key, former_default(key)))
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
    for key in REMOVED:
        older = with_setting(older, key, former_default(key))
    run = run_with(tmp_path / "run", older)
    assert read_config(run, "given") == build_config(GOOD)
    # its record of the settings that it may go on with is older, too
    write_settings(run, build_config(GOOD))
    kept = json.loads(run.accepted.read_text())
    run.accepted.write_text(json.dumps(kept | {"settings": older}))
    run.config.write_text(json.dumps(older))
    assert edited_settings(run) == []


LIMITS = {"pattern": "head.*", "trust_ratio": [0.0, 5.0]}
SAID: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # what the run had beside, the settings that are gone, and those of now
    ({"average": {"kind": "ema"}}, {"average.warmup": True}, {"average": {"kind": "ema_warmup"}}),
    ({}, {"average.begin_anew": True}, {}),
    ({}, {"checkpoint.best_is": "least"}, {}),
    ({}, {"data.audio.time_first": True}, {"data": {"audio": {"axes": "time_first"}}}),
    (
        {"data": {"audio": {"seconds": 1.0}}},
        {"data.audio.channel_axis": True, "data.audio.time_first": True},
        {"data": {"audio": {"axes": "channel_time_first", "seconds": 1.0}}},
    ),
    ({}, {"data.balance": "length"}, {"train": {"shuffle": "length"}}),
    (
        {"data": {"image": {"interpolation": "bicubic"}}},
        {"data.image.antialias": False},
        {"data": {"image": {"interpolation": "bicubic_aliased"}}},
    ),
    (
        {"data": {"image": {"augment": {"flip": 0.5}}}},
        {"data.image.augment.vertical_flip": 0.25},
        {"data": {"image": {"augment": {"flip": (0.5, 0.25)}}}},
    ),
    ({}, {"export.promote_if.signature": "any"}, {}),
    ({}, {"data.image.mask_folder": "masks"}, {"data": {"image": {"masks": "./masks"}}}),
    (
        {"export": {"variants": ("fp16",)}},
        {"export.training": True},
        {"export": {"variants": ("fp16", "training")}},
    ),
    ({}, {"data.image_channels": 1}, {"data": {"image_size": (1, 32)}}),
    (
        {"data": {"table": {"categories": ("s*",)}}},
        {"data.table.vocabularies": {"city": ["", "Oslo"]}},
        {"data": {"table": {"categories": {"s*": "sorted", "city": ("", "Oslo")}}}},
    ),
    ({}, {"data.table.window.split": "series"}, {"data": {"split": "series"}}),
    (
        {"data": {"text": {"task": "masked"}}},
        {f"data.text.{name}_token": f"<{name}>" for name in ("end", "mask", "pad")},
        {"data": {"text": {"tokens": {name: f"<{name}>" for name in ("end", "mask", "pad")}}}},
    ),
    (
        {"data": {"text": {"task": "masked"}}},
        {"data.text.whole_words": True},
        {"data": {"text": {"task": "masked_words"}}},
    ),
    ({}, {"data.text_files": "*.txt"}, {}),
    ({"graph": {"compile": True}}, {"graph.compile_mode": "default"}, {"graph": {"compile": "default"}}),
    (
        {"graph": {"compile": True}},
        {"graph.compile_mode": "default", "graph.compile_regions": "repeated"},
        {"graph": {"compile": "repeated"}},
    ),
    ({"graph": {"compile": True}}, {"graph.shapes": "dynamic"}, {"graph": {"compile": "dynamic"}}),
    ({"graph": {"compile": True}}, {"graph.shapes": "static"}, {}),
    ({"graph": {"compile": False}}, {"graph.compile_mode": "default"}, {}),
    ({}, {f"launch.{name}_s": 7.0 for name in ("collective_timeout", "rehearsal_timeout", "storage_wait")}, {}),
    (
        {},
        {
            "launch.compile_timeout_s": 1.0,
            "launch.retry_delay_s": 7.0,
            "monitor.cpu_peak": False,
            "monitor.summary_period": 9,
        },
        {},
    ),
    ({}, {"train.desync_check_period": 0}, {}),
    ({}, {"export.parity_batches": 9, "parallel.bucket_mib": 9, "parallel.vocabulary": False}, {}),
    # config.json had the type for losses, too, that do not read it
    (
        {"loss": [{"name": "cross_entropy", "label_type": "float32"}]},
        {"loss.soft_labels": False},
        {"loss": [{"name": "cross_entropy"}]},
    ),
    ({}, {"loss.soft_labels": True}, {"loss": [{"name": "cross_entropy", "label_type": "float32"}]}),
    (
        {"loss": [{"name": "file", "file": "l.py:f", "label_type": "int64"}]},
        {"loss.soft_labels": False},
        {},
    ),
    (
        {"loss": [{"output": "a"}, {"output": "b", "label": "y", "file": "l.py:f", "label_type": "int64"}]},
        {"loss.soft_labels": False},
        {},
    ),
    ({}, {"optimizer.adafactor": {"clip": 2.0}, "optimizer.muon.steps": 7}, {}),
    (
        {"optimizer": {"name": "lamb"}},
        {"optimizer.ratio_min": 0.5, "optimizer.ratio_max": 8.0},
        {"optimizer": {"trust_ratio": (0.5, 8.0)}},
    ),
    (
        {"optimizer": {"name": "lamb"}},
        {"optimizer.ratio_min": 0.5, "optimizer.weights.ratio_max": 5.0},
        {"optimizer": {"trust_ratio": (0.5, 1e30), "weights": [LIMITS | {"trust_ratio": [0.5, 5.0]}]}},
    ),
    ({"optimizer": {"name": "lamb"}}, {"optimizer.weights.ratio_max": 5.0}, {"optimizer": {"weights": [LIMITS]}}),
    (
        {"optimizer": {"name": "lamb"}},
        {"optimizer.weights.ratio_max": 5.0, "optimizer.weights.ratio_min": 0.5},
        {"optimizer": {"weights": [LIMITS | {"trust_ratio": [0.5, 5.0]}]}},
    ),
    ({}, {"optimizer.weights.bias_correction": True}, {}),
    (
        {"parallel": {"data": 4, "reduction": "adasum"}, "train": {"global_batch_size": 4}},
        {"parallel.adasum_ranks": 1},
        {"parallel": {"reduction": "adasum_all"}},
    ),
    (
        {"parallel": {"data": 4, "reduction": "adasum"}, "train": {"global_batch_size": 4}},
        {"parallel.adasum_ranks": 4},
        {},
    ),
    ({}, {"precision.growth_interval": 9, "precision.max_scale": 9.0}, {}),
    ({}, {"precision.initial_scale": 8.0}, {}),
    (
        {"precision": {"compute": "fp16"}},
        {"precision.initial_scale": 8.0},
        {"precision": {"loss_scale": ("dynamic", 8.0)}},
    ),
    ({"precision": {"compute": "fp16", "loss_scale": 4.0}}, {"precision.initial_scale": 8.0}, {}),
    ({}, {"quantize.weights": "uint8"}, {}),
    ({"quantize": {"aware": True}}, {"quantize.reduce_range": False}, {"quantize": {"aware": "u8s8"}}),
    (
        {"quantize": {"aware": True}},
        {"quantize.activations": "int8", "quantize.weights": "uint8", "quantize.calibration_rows": 9},
        {"quantize": {"aware": "s8u7"}},
    ),
    ({"quantize": {"aware": True}}, {"quantize.per_channel": False}, {}),
    ({"recompute": {"mode": "compressed"}}, {"recompute.stash": "fp8"}, {"recompute": {"mode": "compressed_fp8"}}),
    (
        {"schedule": {"mode": "poly"}},
        {"schedule.shape": "compatible"},
        {"schedule": {"mode": "poly_compatible"}},
    ),
    ({"schedule": {"mode": "constant"}}, {"schedule.shape": "compatible"}, {}),
    ({}, {"data.shard_format": "pb"}, {}),
    ({}, {"monitor.tensorboard": False}, {"monitor": {"report_to": ()}}),
    ({}, {"parallel.horizontal": 2}, {"parallel": {"tensor": 2}}),
    ({}, {"stop.metric": "evaluation/loss"}, {}),
    ({}, {"teacher.compute": "fp32"}, {}),
]


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = one | other
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict) and key != "categories":
            both[key] = merged(one[key], other[key])
    return both


@pytest.mark.parametrize(("beside", "gone", "now"), SAID)
def test_what_an_older_run_set_is_said_by_the_settings_of_now(
    beside: dict[str, Any], gone: dict[str, Any], now: dict[str, Any]
) -> None:
    begun = merged(GOOD, beside)
    older = json.loads(build_config(begun).model_dump_json())
    for key, value in gone.items():
        older = with_setting(older, key, value)
    found = RunConfig.model_validate_json(json.dumps(older))
    assert found == build_config(merged(begun, now))
    assert found.left_out == {}


def test_files_of_text_are_named_by_a_glob(tmp_path: Path) -> None:
    older = with_setting(saved(), "data.text_files", "*.md")
    for source, said, is_known in (
        (str(tmp_path), f"{tmp_path}/**/*.md", True),
        ("/data/notes.md", "/data/notes.md", True),
        ("stdlib", "stdlib", False),
    ):
        found = RunConfig.model_validate(with_setting(older, "data.source", source))
        assert (found.data.source, not found.left_out) == (said, is_known)


def test_every_setting_that_is_gone_is_said_or_left_out_here() -> None:
    assert {key for _, gone, _ in SAID for key in gone} | {*LEFT_OUT} == {*REMOVED}


LEFT_OUT: dict[str, tuple[Any, dict[str, Any]]] = {
    "checkpoint.best_is": ("greatest", {}),
    "data.text_files": ("*.rst", {"data.source": "stdlib"}),
    "graph.compile_mode": ("max-autotune-no-cudagraphs", {"graph.compile": True, "graph.shapes": "dynamic"}),
    "optimizer.adafactor": ({"decay_exponent": 0.5}, {"optimizer.name": "adafactor"}),
    "optimizer.muon.convolutions": ("flatten", {"optimizer.name": "muon"}),
    "optimizer.muon.steps": (7, {"optimizer.name": "muon"}),
    "optimizer.weights.bias_correction": (False, {}),
    "parallel.adasum_ranks": (2, {"parallel.data": 4, "train.global_batch_size": 4}),
    "parallel.vocabulary": (False, {"parallel.tensor": 2}),
    "precision.growth_interval": (9, {"precision.compute": "fp16"}),
    "precision.max_scale": (2.0**30, {"precision.compute": "fp16", "precision.initial_scale": 2.0**30}),
    "stop.metric": ("evaluation/accuracy", {}),
    "teacher.compute": ("bf16", {"teacher.path": "/t.onnx"}),
}


@pytest.mark.parametrize("key", LEFT_OUT)
def test_an_older_run_that_only_its_version_computes_is_read_and_does_not_go_on(tmp_path: Path, key: str) -> None:
    value, beside = LEFT_OUT[key]
    older = saved()
    for name, other in {**beside, key: value}.items():
        older = with_setting(older, name, other)
    run = run_with(tmp_path / "run", older)
    assert read_config(run).name == "m"
    write_record(run.accepted, KeptSettings(settings=read_config(run, "given")))
    for goes_on in (refuse_edited, lambda run: accept_edited(run, 0)):
        with pytest.raises(ConfigError) as refused:
            goes_on(run)
        (said,) = refused.value.problems
        key = "graph.shapes" if key == "graph.compile_mode" else key  # the mode is kept
        where = key.replace("optimizer.weights.", "optimizer.weights.0.")
        assert said.startswith(f"{where} was {beside.get(key, value)!r} in this run of an earlier version, and only")
        assert said.endswith(f"{REMOVED[key].instead}; go on with that version, or start a new run")
    with pytest.raises(ConfigError, match="only that version computes it"), scratch_run(run, 0):
        pass


def test_a_run_whose_best_metric_has_no_best_value_is_read_and_does_not_go_on() -> None:
    settings = {"loss": [{"name": "quantile", "quantiles": [0.1, 0.9]}], "metrics": ["coverage"]}
    older = with_setting(saved(**settings), "checkpoint", {"best_metric": "evaluation/coverage", "best_is": "least"})
    assert RunConfig.model_validate(older).left_out == {"checkpoint.best_is": "least"}


def test_the_same_configuration_continues_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    older = saved()
    for key in REMOVED:
        older = with_setting(older, key, former_default(key))
    run = run_with(tmp_path / "run", older)
    flat = flat_settings(build_config(GOOD))
    assert RunConfig.model_validate(nested_settings(flat)) == build_config(GOOD)
    gone = {key: former_default(key) for key in REMOVED if not key.startswith("optimizer.weights.")}
    gone["optimizer.weights"] = older["optimizer"]["weights"]
    write_record(run.origins, Origins(settings={}, given=flat | gone))
    assert limits_to_resume(run, "X", build_config(GOOD)) == []
    with pytest.raises(ConfigError, match=r"X began with checkpoint\.period = 0, and now it is 5"):
        limits_to_resume(run, "X", build_config(GOOD | {"checkpoint": {"period": 5}}))
    write_record(run.origins, Origins(settings={}, given=flat | {"train.num_steps": "many"}))
    with pytest.raises(ConfigError, match=r"origins.json cannot be used: train\.num_steps: .*; delete it"):
        limits_to_resume(run, "X", build_config(GOOD))


def test_a_person_may_take_the_setting_out_of_config_json_and_accept_that(tmp_path: Path) -> None:
    older = with_setting(saved(), "stop.metric", "evaluation/accuracy")
    run = run_with(tmp_path / "run", older)
    run.accepted.write_text(json.dumps({"settings": older}))
    run.config.write_text(json.dumps(with_setting(older, "stop.metric", "")))
    assert edited_settings(run) == []
    run.accepted.write_text(
        json.dumps({"settings": with_setting(saved(optimizer={"name": "muon"}), "optimizer.muon.steps", 7)})
    )
    run.config.write_text(json.dumps(saved(optimizer={"name": "muon"})))
    assert edited_settings(run) == ["optimizer.muon.steps was 7, and is None"]
    accept_edited(run, 0)
    refuse_edited(run)


@pytest.mark.parametrize("first", ["ratio_min", "ratio_max"])
def test_limits_that_patterns_have_given_one_by_one_are_left_out(first: str) -> None:
    second = {"ratio_min": "ratio_max", "ratio_max": "ratio_min"}[first]
    older = saved(optimizer={"name": "lamb", "weights": [{"pattern": "a"}, {"pattern": "b"}]})
    older["optimizer"]["weights"][0] |= {first: 2.0, second: None}
    older["optimizer"]["weights"][1] |= {first: 3.0, second: None}
    assert RunConfig.model_validate(older).left_out == {}
    older["optimizer"]["weights"][1] |= {first: None, second: 3.0}
    assert list(RunConfig.model_validate(older).left_out)


def test_a_damaged_configuration_is_refused_and_no_error_of_the_program() -> None:
    for key in REMOVED:
        for damaged in ({}, 5, None, [3], {"optimizer": 3}):
            with pytest.raises(ValidationError):
                RunConfig.model_validate(with_setting({"optimizer": {"weights": [{}]}}, key, damaged))


def test_settings_that_have_changed_their_form_are_said_to_have_and_are_read() -> None:
    match = [{"student": "a", "teacher": "b", "weight": 0.5}]
    with pytest.raises(ConfigError, match=r"teacher\.match: is one table, \{student's tensor = teacher's tensor\}"):
        build_config(GOOD | {"teacher": {"path": "/t.onnx", "match": match}})
    assert RunConfig.model_validate(saved() | {"teacher": {"match": []}}).teacher.match == {}
    found = RunConfig.model_validate(saved() | {"teacher": {"path": "/t.onnx", "match": match}})
    assert found.teacher.match == {"a": ("b", 0.5)}
    assert RunConfig.model_validate_json(found.model_dump_json()) == found
    found = RunConfig.model_validate(saved() | {"teacher": {"path": "/t.onnx", "match": match * 2}})
    assert list(found.left_out) == ["teacher.match"]


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
