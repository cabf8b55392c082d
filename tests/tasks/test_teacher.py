"""A teacher that does not fit is refused by `configure` with names and numbers, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.tasks.configure import configure
from onward.trainer.config.loading import ENTRIES
from onward.trainer.config.run_config import SECTIONS
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.records import Rehearsal, read_record
from tests.support import graphs

pytestmark = pytest.mark.usefixtures("home", "forked")
Configured = Callable[..., Rehearsal]


@pytest.fixture
def configured(tmp_path: Path) -> Configured:
    """The real task `configure` on a student of 4 inputs and 3 classes, without labels if `labels` is false."""

    def begin(teacher: onnx.ModelProto, /, *, labels: bool = True, **sections: dict[str, Any]) -> Rehearsal:
        onnx.save_model(graphs.tiny_mlp(outputs=3), tmp_path / "model.onnx")
        onnx.save_model(teacher, tmp_path / "teacher.onnx")
        rows = np.random.default_rng(0)
        columns = {"features": rows.normal(size=(40, 4)).astype(np.float32), "label": rows.integers(0, 3, 40)}
        np.savez(tmp_path / "data.npz", **(columns if labels else {"features": columns["features"]}))
        given: dict[str, dict[str, Any]] = {
            "model": {"path": tmp_path / "model.onnx"},
            "data": {"source": str(tmp_path / "data.npz")},
            "train": {"global_batch_size": 8, "num_steps": 4},
            "launch": {"device": "cpu"},
            "teacher": {"path": str(tmp_path / "teacher.onnx")},
        }
        settings = {
            name: SECTIONS[name].model_validate(given.get(name, {}) | sections.get(name, {}))
            for name in given.keys() | sections.keys()
        }
        run = RunDir(onward_home() / "runs" / "run")
        configure.fn(run, {"name": "rehearsed", **settings, **dict.fromkeys(ENTRIES, ())})
        return read_record(run.rehearsal, Rehearsal)

    return begin


LARGER = graphs.tiny_mlp(outputs=3, hidden=32, seed=4)


@pytest.mark.parametrize("labels", [True, False])
def test_a_run_with_a_teacher_is_rehearsed_also_without_labels(configured: Configured, labels: bool) -> None:
    sections: dict[str, Any] = {} if labels else {"model": {"path": None}, "teacher": {"loss": "kl"}}
    if not labels:
        sections = {"model": {"loss": "teacher"}, "teacher": {"loss": "kl"}, "export": {"promote_if": "always"}}
    found = configured(LARGER, labels=labels, **sections)
    assert (found.trained, found.without_gradient) == (4, ())
    assert found.parity < 1e-5
    assert not [warning for warning in found.warnings if warning.key == "same_teacher"]


def test_a_teacher_that_is_the_trained_file_is_said(configured: Configured) -> None:
    found = configured(graphs.tiny_mlp(outputs=3))
    assert [warning.key for warning in found.warnings] == ["same_teacher"]


REFUSED: dict[str, tuple[onnx.ModelProto, dict[str, Any], str]] = {
    "other classes": (graphs.tiny_mlp(outputs=1000), {}, r"'prediction' is \[\?, 3\], but .* \[\?, 1000\]"),
    "other inputs": (graphs.tiny_mlp(inputs=7, outputs=3), {}, r"'features' is \[\?, 7\], but .* \[\?, 4\]"),
    "an unknown output": (LARGER, {"output": "logits"}, "the teacher has no tensor 'logits'"),
    "an unknown input": (LARGER, {"inputs": {"x": "features"}}, "teacher.inputs names 'x'"),
    "an input that is missing": (graphs.residual_mlps(8, width=4, num_classes=3), {}, "the model has no input 'x'"),
    "an unknown tensor": (
        LARGER,
        {"match": {"hidden": "Relu_0"}},
        r"teacher.match: the model has no tensor 'hidden'",
    ),
    "a setting without effect": (LARGER, {"path": "", "temperature": 4.0}, "teacher.temperature has no effect"),
    "no file": (LARGER, {"path": "/nowhere.onnx"}, "teacher.path: there is no file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_teacher_that_does_not_fit_is_refused_before_anything_is_written(
    configured: Configured, home: Path, case: str
) -> None:
    model, settings, expected = REFUSED[case]
    with pytest.raises(ConfigError, match=expected) as refusal:
        configured(model, teacher=settings)
    assert refusal.value.exit_code == 2
    assert not home.exists(), "something was written"


def test_outputs_whose_length_follows_the_rows_are_not_stored(
    configured: Configured, home: Path, tmp_path: Path
) -> None:
    onnx.save_model(graphs.tiny_bert(of_tokens=True), tmp_path / "tokens.onnx")
    rows = [{"input_ids": [1] * n, "attention_mask": [1] * n, "label": [0] * n} for n in (3, 5, 4, 7, 2) * 4]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"teacher\.cache 'float16': the rows of input_ids, .* padded"):
        configured(
            graphs.tiny_bert(of_tokens=True),
            model={"path": tmp_path / "tokens.onnx"},
            data={"source": str(tmp_path / "rows.jsonl")},
            teacher={"cache": "float16"},
        )
    assert not home.exists()


def test_what_changes_in_each_epoch_is_not_computed_once(configured: Configured) -> None:
    with pytest.raises(ConfigError, match=r"data\.image\.augment changes the images in each epoch"):
        configured(LARGER, teacher={"cache": "float16"}, data={"image": {"augment": {"flip": 0.5}}})


def test_a_teacher_that_changes_after_the_run_began_is_refused(configured: Configured) -> None:
    configured(LARGER)
    with pytest.raises(ConfigError, match=r"teacher\.onnx changed since the run began"):
        configured(graphs.tiny_mlp(outputs=3, hidden=32, seed=5))
