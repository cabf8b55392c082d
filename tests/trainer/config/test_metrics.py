"""`metrics`: names, tables, what fits the losses, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.flows.shown.terminal_tables import config_lines
from onward.trainer.config.loading import build_config, load_config
from onward.trainer.config.metric_names import ALIASES, METRICS, is_greatest
from onward.trainer.config.sections.metrics import MetricConfig, evaluation_names
from onward.trainer.diagnostics.config_check import check_local_files
from onward.trainer.errors import ConfigError
from tests.support import graphs

BASE: dict[str, Any] = {"model": {"path": "m.onnx"}, "data": {"source": "d"}, "train": {"num_steps": 9}}
SEVERAL = [{"name": "cross_entropy", "output": "kind", "label": "k"}, {"name": "mse", "output": "size", "label": "s"}]


COSINE = {"name": "cosine", "output": ["a", "b"]}


def names(metrics: Any, **sections: Any) -> list[str]:
    config = build_config(BASE | {"metrics": metrics} | sections)
    return [name.removeprefix("evaluation/") for name in evaluation_names(config.losses, config.metrics)]


def test_entries_are_names_or_tables_and_named_after_their_parameters() -> None:
    entries = ["f1_macro", "top_5", {"name": "f1", "average": "weighted"}, {"name": "recall", "of_class": 3}]
    entries += ["balanced_accuracy", {"name": "f_beta", "beta": 2}, {"name": "auroc", "thresholds": 200}]
    assert names(entries)[1:] == [
        "f1_macro",
        "top_5",
        "f1_weighted",
        "recall_class_3",
        "recall_macro",
        "f_beta_2",
        "auroc",
    ]
    assert names("accuracy") == ["loss", "accuracy"]


def test_without_entries_the_metrics_are_those_of_the_loss() -> None:
    assert names([]) == ["loss", "accuracy"]
    assert names([], model={"path": "m.onnx", "loss": "l1"}) == ["loss", "mae", "mse"]
    assert names([], model={"path": "m.onnx", "loss": "output"}) == ["loss"]


def test_of_several_losses_each_has_the_metrics_that_fit_it() -> None:
    found = names(["f1_macro", "rmse"], loss=SEVERAL)
    assert found == ["loss", "kind/loss", "kind/f1_macro", "size/loss", "size/rmse"]
    of_one_output = [{"name": "l1", "output": "boxes", "label": "b"}, {"name": "giou", "output": "boxes", "label": "b"}]
    found = names([{"name": "box_iou", "output": "boxes"}], loss=of_one_output)
    assert found == ["loss", "boxes/l1/loss", "boxes/giou/loss", "boxes/giou/box_iou"], "of the loss of boxes alone"
    assert names([{"name": "rmse", "output": "size"}], loss=SEVERAL)[1:] == ["kind/loss", "size/loss", "size/rmse"]


def test_a_loss_of_several_can_be_followed_only_if_it_names_its_output() -> None:
    unnamed = [{"name": "cross_entropy", "label": "k"}, SEVERAL[1]]
    assert names([], loss=unnamed) == ["loss", "size/loss", "size/mae", "size/mse"]
    with pytest.raises(ConfigError, match=r"best_metric: no evaluation measures 'evaluation/first/loss'"):
        names([], loss=unnamed, checkpoint={"best_metric": "evaluation/first/loss"})


def test_a_saved_or_printed_configuration_gives_the_same_metrics(tmp_path: Path) -> None:
    config = build_config(BASE | {"metrics": ["f1_macro", "top_5", {"name": "auroc", "thresholds": 50}]})
    assert type(config).model_validate_json(config.model_dump_json()) == config
    (tmp_path / "c.toml").write_text("\n".join(config_lines(config)))
    assert load_config(tmp_path / "c.toml").metrics == config.metrics
    assert load_config(tmp_path / "c.toml", ['metrics=["top_3"]']).metrics == (MetricConfig(name="top_k", k=3),)


def test_the_page_has_every_metric() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "choose-metrics.md").read_text()
    assert [name for name in [*METRICS, *ALIASES] if f"`{name}`" not in page] == []


def test_the_direction_of_every_metric_is_known_under_every_name() -> None:
    for name, metric in METRICS.items():
        assert is_greatest(f"evaluation/{name}") == {"least": False, "greatest": True, "nominal": None}[metric.better]
    assert is_greatest("evaluation/kind/recall_class_3")
    assert is_greatest("evaluation/f_beta_0.5_macro")
    assert is_greatest("evaluation/top_5")
    assert is_greatest("evaluation/boxes/rmse") is False
    assert is_greatest("evaluation/pinball_0.9") is False
    assert is_greatest("evaluation/retrieval_accuracy_top_5")
    assert is_greatest("evaluation/kind/loss") is False
    assert is_greatest("evaluation/quality") is None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"metrics": ["f1makro"]},
            r"metrics: there is no metric 'f1makro'; did you mean f1_macro.*Known: accuracy, top_k",
        ),
        ({"metrics": ["zzz"]}, r"metrics: there is no metric 'zzz'; Known: accuracy"),
        (
            {"metrics": ["rmse"]},
            r"metrics: rmse needs numbers .*, and the loss 'cross_entropy' has",
        ),
        (
            {"metrics": ["accuracy"], "model": {"path": "m", "loss": "mse"}},
            r"accuracy needs .*these fit: mae, mse, rmse",
        ),
        (
            {"metrics": ["word_error_rate"], "loss": {"name": "file", "file": "l.py:f"}},
            r"needs sequences .*'file' with loss.label_type 'float32' has none; these fit: accuracy",
        ),
        (
            {"metrics": ["rmse"], "loss": {"name": "file", "file": "l.py:f", "label_type": "int64"}},
            r"rmse needs numbers .*'file' with loss.label_type 'int64' has none; these fit: accuracy, top_k",
        ),
        ({"metrics": ["mae"], "loss": {"name": "info_nce", "output": ["a", "b"]}}, r"these fit: retrieval_accuracy$"),
        ({"metrics": ["auroc_macro"], "loss": COSINE}, r"auroc_macro: pairs have no classes"),
        (
            {"metrics": [{"name": "coverage", "quantile": 0.7}], "loss": {"name": "quantile", "quantiles": [0.1, 0.9]}},
            r"coverage_0.7: loss.quantiles has no 0.7, but 0.1, 0.9",
        ),
        (
            {
                "metrics": ["coverage"],
                "loss": {"name": "quantile"},
                "checkpoint": {"best_metric": "evaluation/coverage"},
            },
            r"best_metric: of 'evaluation/coverage' neither the least nor the greatest value is the best",
        ),
        ({"metrics": ["accuracy"], "model": {"path": "m", "loss": "output"}}, r"no metric fits it"),
        ({"metrics": ["accuracy", "accuracy"]}, r"metrics: accuracy is named twice"),
        ({"metrics": [{"name": "top_k"}]}, r"metrics: top_k needs k"),
        ({"metrics": [{"name": "f1", "k": 2}]}, r"metrics: f1 does not take k; it takes average, of_class"),
        ({"metrics": [{"name": "f1_macro", "average": "micro"}]}, r"'f1_macro' says average already"),
        ({"metrics": [{"name": "f1", "average": "macro", "of_class": 1}]}, r"exclude each other"),
        ({"metrics": ["auroc_micro"]}, r"auroc_micro: curves of classes have no micro average"),
        ({"metrics": [3]}, r"metrics must be names or tables, not 3"),
        ({"metrics": [{"name": "f1", "averge": "macro"}]}, r"unknown key metrics.averge; did you mean metrics.averag"),
        ({"metrics": [{"name": "rmse", "output": "sise"}], "loss": SEVERAL}, r"output 'sise', which no loss reads"),
        ({"metrics": [{"name": "rmse", "output": "kind"}], "loss": SEVERAL}, r"rmse needs numbers"),
        (
            {"metrics": ["f1_macro"], "checkpoint": {"best_metric": "evaluation/accuracy"}},
            r"checkpoint.best_metric: no evaluation measures 'evaluation/accuracy'.*evaluation/f1_macro",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(BASE | sections)


def test_bits_per_byte_asks_for_the_bytes_of_a_target_unless_targets_are_bytes(tmp_path: Path) -> None:
    onnx.save_model(graphs.tiny_transformer(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", input_ids=np.zeros((20, 12), np.int64), label=np.zeros((20, 12), np.int64))
    base = BASE | {"model": {"path": tmp_path / "m.onnx"}, "data": {"source": str(tmp_path / "d.npz")}}
    with pytest.raises(ConfigError, match="bits_per_byte needs bytes_per_target"):
        build_config(base | {"metrics": ["bits_per_byte"]}, check=check_local_files)
    build_config(base | {"metrics": [{"name": "bits_per_byte", "bytes_per_target": 4.1}]}, check=check_local_files)


def test_a_missing_torchmetrics_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"f1, auroc need torchmetrics: pip install -e '.*\[metrics\]'"):
        build_config(BASE | {"metrics": ["accuracy", "f1", "auroc"]}, check=check_local_files)
