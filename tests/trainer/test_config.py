"""Every law is broken once and says its numbers; everything wrong is said at once; overrides are TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from trainer.config import RunConfig, build_config, load_config
from trainer.errors import ConfigError

GOOD: dict[str, dict[str, Any]] = {"model": {"path": "m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 5}}

BROKEN = {
    "world size": (
        {"parallel": {"data": 4}, "launch": {"num_ranks": 3}},
        ["data 4 x horizontal 1 x pipeline 1", "is 3"],
    ),
    "accumulation": (
        {"train": {"num_steps": 1, "global_batch_size": 30, "gradient_accumulation_steps": 4}, "parallel": {"data": 2}},
        ["30", "2 replicas x 4 micro-batches = 8", "24 and 32"],
    ),
    "no length": ({"train": {}}, ["num_steps is 0", "num_epochs is 0"]),
    "two lengths": ({"train": {"num_steps": 5, "num_epochs": 2}}, ["num_steps is 5", "num_epochs is 2"]),
    "scale without fp16": ({"precision": {"loss_scale": 8}}, ["loss_scale 8", "fp32"]),
    "scale above its cap": ({"precision": {"compute": "fp16", "initial_scale": 9, "max_scale": 4}}, ["9", "4"]),
    "ratios crossed": ({"optimizer": {"ratio_min": 3, "ratio_max": 2}}, ["ratio_min 3", "ratio_max 2"]),
    "nesterov alone": ({"optimizer": {"name": "sgd", "nesterov": True}}, ["momentum"]),
    "momentum for Adam": ({"optimizer": {"momentum": 0.9}}, ["momentum 0.9", "adamw"]),
    "decay mode for LAMB": ({"optimizer": {"name": "lamb", "weight_decay_mode": "huggingface"}}, ["lamb"]),
    "floor of the predecessor": ({"schedule": {"mode": "cosine", "shape": "compatible", "floor": 0.1}}, ["0.1"]),
    "warm-up of nothing": ({"schedule": {"warmup_ratio": 0.1}}, ["warmup_ratio 0.1", "constant"]),
    "time-outs crossed": ({"launch": {"collective_timeout_s": 50, "heartbeat_timeout_s": 40}}, ["50", "40"]),
    "nothing to train": ({"model": {"path": "m", "train": []}}, ["model.train"]),
    "unknown key": ({"train": {"num_steps": 1, "num_step": 5}}, ["train.num_step", "did you mean train.num_steps"]),
    "unknown section": ({"optimiser": {}}, ["optimiser", "did you mean optimizer"]),
    "not a number": ({"optimizer": {"learning_rate": "fast"}}, ["optimizer.learning_rate", "'fast'"]),
    "head": ({"model": {"path": "m", "head": "fc.weight"}}, ["model.head 'fc.weight'", "model.num_classes is 0"]),
    "one class": ({"model": {"path": "m", "num_classes": 1}}, ["model.num_classes 1", "always 0"]),
    "start": ({"model": {"path": "m", "start": ["x", "y", "x"]}}, ["model.start names x more than once"]),
    "no adapters": ({"lora": {"rank": 4}}, ["lora.rank has no effect without lora.weights"]),
    "adapters": ({"model": {"path": "m", "train": ["h*"]}, "lora": {"weights": ["*"]}}, ["['h*']", "lora.also_train"]),
    "dropout": ({"graph": {"dropout": 0.1, "fuse": False}}, ["graph.dropout 0.1", "graph.fuse = true"]),
    "not a table": ({"train": 5}, ["[train]"]),
    "missing": ({"data": {}}, ["data.source is missing"]),
    "infinite": ({"optimizer": {"epsilon": float("inf")}}, ["optimizer.epsilon", "finite"]),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_law_says_what_with_its_numbers(broken: str) -> None:
    change, said = BROKEN[broken]
    with pytest.raises(ConfigError) as raised:
        build_config(GOOD | change)
    (problem,) = raised.value.problems
    for words in said:
        assert words in problem


def test_everything_wrong_is_said_at_once() -> None:
    every: dict[str, Any] = GOOD | {
        "parallel": {"data": 2},
        "launch": {"num_ranks": 3},
        "optimizer": {"learning_rate": -1, "momentom": 2},
        "schedule": {"warmup_ratio": 0.5},
        "oops": {},
    }
    with pytest.raises(ConfigError) as raised:
        build_config(every)
    assert len(raised.value.problems) == 5


def test_a_config_built_from_sections_obeys_the_same_laws() -> None:
    good = build_config(GOOD)
    with pytest.raises(ValidationError, match="needs 1 ranks"):
        RunConfig.model_validate(dict(good) | {"launch": {"num_ranks": 2}})


def test_overrides_are_toml_and_stronger_than_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "configs" / "a.toml"
    file.parent.mkdir()
    file.write_text('[model]\npath = "../m.onnx"\n[data]\nsource = "d.csv"\n[train]\nnum_steps = 5\n')
    monkeypatch.chdir(tmp_path)
    lines = ["optimizer.learning_rate=3e-4", "model.freeze=['a*']", "model.loss=mse", "data.evaluation_source=e.csv"]
    config = load_config(file, lines)
    assert config.name == "a"
    assert config.optimizer.learning_rate == 3e-4
    assert config.model.freeze == ("a*",)
    assert config.model.loss == "mse"
    assert config.model.path.resolve() == tmp_path / "m.onnx", "a path in the file is relative to the file"
    assert config.data.evaluation_source == str(tmp_path / "e.csv"), "one on the command line, to where that was typed"


@pytest.mark.parametrize(("line", "said"), [("train.num_steps", "section.key=value"), ("name.x=1", "not a table")])
def test_an_override_that_is_none_is_refused(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.toml").write_text('name = "n"\n[model]\npath = "m"\n[data]\nsource = "d"\n[train]\nnum_steps = 5\n')
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / "a.toml", [line])


@pytest.mark.parametrize(("content", "said"), [(b"[model\n", "not TOML"), (b"\xff", "cannot read")])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "b.toml")


@pytest.mark.parametrize(
    ("train", "rows", "steps", "samples"),
    [
        ({"num_steps": 7, "global_batch_size": 4}, 10, 7, 28),
        ({"num_epochs": 2, "global_batch_size": 4}, 10, 5, 20),
        ({"num_epochs": 1, "global_batch_size": 4}, 10, 3, 10),
        ({"num_epochs": 0.5, "global_batch_size": 4}, 10, 2, 5),
    ],
)
def test_an_epoch_is_every_sample_once_and_the_last_step_may_be_smaller(
    train: dict[str, Any], rows: int, steps: int, samples: int
) -> None:
    config = build_config(GOOD | {"train": train})
    assert (config.num_steps(rows), config.total_samples(rows)) == (steps, samples)


def test_a_config_survives_the_journey_through_json() -> None:
    config = build_config(GOOD)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
