"""Parameters, tags and descriptions that MLflow shows: short, and complete."""

from __future__ import annotations

from pathlib import Path

from onward.tasks.shown.mlflow_tags import THAT_MATTER, before_and_after, description, parameters, trained_from
from onward.trainer.config.loading import build_config
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, RunIdentity, write_record
from onward.trainer.run.remote.local_copies import LocalCopies, LocalCopy

SECTIONS = {"model": {"path": "/m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 20}}


def test_parameters_are_those_that_matter_and_those_that_differ_from_their_defaults() -> None:
    plain = build_config({"name": "a", **SECTIONS})
    shown = parameters(plain)
    assert set(shown) == set(THAT_MATTER) - {"train.num_epochs"}, "ten, of the two lengths the one that is set"
    assert shown["train.num_steps"] == "20"
    assert shown["optimizer.learning_rate"] == "0.001"
    changed = {"optimizer": {"weight_decay": 0.01, "no_decay": ["x" * 1000]}, "train": {"num_epochs": 3.0}}
    more = parameters(build_config({"name": "a", **SECTIONS, **changed}))
    assert set(more) - set(shown) == {"train.num_epochs", "optimizer.weight_decay", "optimizer.no_decay"}
    assert len(more["optimizer.no_decay"]) == 500


def test_the_result_is_one_line_with_the_deciding_metric_first() -> None:
    numbers = {"evaluation/accuracy": 0.25, "evaluation/f1_macro": 0.1, "evaluation/loss": 2.0, "evaluation/top_3": 0.5}
    exported = ExportedModel(
        path=Path("m"), sha256="", step=1, parity=0, changed=1, before=numbers, after=numbers | {"evaluation/loss": 0.5}
    )
    assert before_and_after(exported, "evaluation/loss") == "loss 2 -> 0.5, accuracy 0.25 -> 0.25, f1_macro 0.1 -> 0.1"


def test_the_description_links_to_prefect_and_begins_with_the_result(tmp_path: Path) -> None:
    config = build_config({"name": "a", **SECTIONS})
    identity = RunIdentity(run_id="r", name="a", created_at="", model_sha256="", prefect_url="http://prefect/1")
    sections = config.model, config.data, config.parallel
    text = description(RunDir(tmp_path), *sections, identity, "loss 2 -> 1")
    assert text.startswith("**loss 2 -> 1**\n\n`m.onnx` on `digits`, 1 ranks")
    assert text.endswith("[This run in Prefect](http://prefect/1)")
    assert "](http" not in description(RunDir(tmp_path), *sections, identity.model_copy(update={"prefect_url": ""}))


def test_a_version_names_the_version_that_its_run_began_with(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    config = build_config({"name": "a", **SECTIONS, "model": {"path": "models:/digits@champion"}})
    copy = LocalCopy(url="models:/digits@champion", path=tmp_path / "m.onnx", key="digits/3 abc", bytes=1)
    write_record(run.remote, LocalCopies(copies=(copy,)))
    assert trained_from(run, config.model) == "digits/3"


def test_metrics_are_parameters_by_their_names() -> None:
    config = build_config({"name": "a", **SECTIONS, "metrics": ["f1_macro", "top_3"]})
    assert parameters(config)["metrics"] == "['f1_macro', 'top_3']"
