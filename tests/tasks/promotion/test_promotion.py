"""Which version the alias names after an export: on a real MLflow store, with real comparisons under onnxruntime."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onward.infra.mlflow.registry import RegisteredVersion, Registry
from onward.tasks.export import register
from onward.tasks.promotion import promotion as task
from onward.tasks.promotion.promotion import judge, promote, promote_by_hand
from onward.trainer.config.loading import build_config
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.run.directory import RunDir
from onward.trainer.run.export_folder import comparison_in, example_in
from onward.trainer.run.records import Comparison, ExportedModel, RunIdentity, read_record, write_record
from tests.support.graphs import tiny_mlp
from tests.support.runs import make_run
from tests.support.stores import client, free_port, new_run, tracking_store

SERVED = RegisteredVersion("digits", "3", "")


def config_of(**promote_if: Any) -> Any:
    raw = {"model": {"path": "m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 1}}
    return build_config({**raw, "export": {"promote_if": promote_if}})


def decides(**promote_if: Any) -> tuple[Any, str, bool]:
    """What `judge` reads of a configuration."""
    config = config_of(**promote_if)
    return config.export, config.promote_metric, config.promote_is_greatest


def compared(gain: float, **facts: Any) -> Comparison:
    name = "evaluation/loss"
    return Comparison(version="3", metric=name, served={name: 1.0}, new={name: 1.0 - gain}, gain=gain, **facts)


# -- the rule


@pytest.mark.parametrize(
    ("promote_if", "comparison", "good", "reason"),
    [
        ({}, compared(0.1), True, "evaluation/loss 1 -> 0.9 beside champion version 3"),
        ({}, compared(0.0), False, "not better"),
        ({}, compared(-0.1), False, "not better"),
        ({}, compared(math.nan), False, "not better"),
        ({"margin": 0.05}, compared(0.1), True, "0.9"),
        ({"margin": 0.1}, compared(0.1), False, "not better by more than 0.1"),
        ({"confidence": 0.95}, compared(0.1, interval=(0.02, 0.18)), True, "better by 0.1 (95% interval 0.02 to 0.18)"),
        ({"confidence": 0.95}, compared(0.1, interval=(-0.01, 0.2)), False, "not better"),
        ({"confidence": 0.95, "margin": 0.05}, compared(0.1, interval=(0.04, 0.2)), False, "more than 0.05"),
        ({}, compared(0.1, differences=("input 'a' is new",)), False, "input 'a' is new; `onward promote` moves"),
        ({}, compared(math.nan, refused="no output 'logits'"), False, "cannot be evaluated on these rows (no output"),
        ({"when": "never"}, None, False, "'never'"),
        ({"when": "always"}, None, True, "it takes the place of champion version 3"),
    ],
)
def test_the_alias_moves_only_to_a_better_file(
    promote_if: dict[str, Any], comparison: Comparison | None, good: bool, reason: str
) -> None:
    found = judge(*decides(**promote_if), comparison, SERVED, of_quality(0.9))
    assert found[0] == good
    assert reason in found[1]


def of_quality(loss: float, **baselines: float) -> ExportedModel:
    """The record of a file, and of predictions without a model."""
    known = {what.replace("_", " "): {"evaluation/loss": value} for what, value in baselines.items()}
    after = {"evaluation/loss": loss}
    common = {"sha256": "", "step": 1, "parity": 0.0, "changed": 1, "before": {}}
    return ExportedModel(path=Path("m.onnx"), after=after, baselines=known, **common)


def test_the_first_version_is_served_only_if_it_predicts_better_than_what_needs_no_model() -> None:
    first = "it is the first champion of its name"
    assert judge(*decides(), None, None, of_quality(0.9)) == (True, first)
    assert not judge(*decides(when="never"), None, None, of_quality(0.9))[0]
    better = of_quality(0.9, the_mean=1.0)
    assert judge(*decides(), None, None, better) == (
        True,
        f"{first}: evaluation/loss 0.9 is better than 1 of the mean",
    )

    worse = of_quality(0.9, the_mean=1.0, the_last_known_value=0.5)
    good, why = judge(*decides(), None, None, worse)
    assert not good
    assert "evaluation/loss is 0.9, and the last known value alone has 0.5" in why
    assert judge(*decides(floor="none"), None, None, worse) == (True, first)
    assert judge(*decides(when="always"), None, None, worse) == (True, first)
    assert not judge(*decides(), None, None, of_quality(math.nan, the_mean=1.0))[0], "NaN is better than nothing"


# -- on a store


@dataclass
class Team:
    """Runs that register files of known quality under one name: y = w x + b, fitted to y = x0 but for an error."""

    folder: Path
    name: str

    def run(self, label: str, error: float, **promote_if: Any) -> tuple[RunDir, ExportedModel]:
        """A run whose exported and registered file has a mean squared error of error^2."""
        random = np.random.default_rng(0)
        x = random.normal(size=(200, 4)).astype(np.float32)
        sections = {
            "model": {"loss": "mse"},
            "train": {"num_steps": 1, "global_batch_size": 8},
            "export": {"register_as": self.name, "promote_if": promote_if},
        }
        run = make_run(self.folder / label, linear(0.0), {"x": x, "label": x[:, :1]}, **sections)
        tracker = new_run()
        identity = read_record(run.identity, RunIdentity)
        where = {"mlflow_run_id": tracker.run_id, "tracking_uri": tracker.tracking_uri}
        write_record(run.identity, identity.model_copy(update=where))
        run.export.mkdir()
        path = run.export / "model.onnx"
        path.write_bytes(linear(error).SerializeToString())
        with example_in(run.export).open("wb") as file:
            np.savez(file, x=x[:1])
        exported = ExportedModel(
            path=path,
            sha256=model_digest(path),
            step=1,
            parity=0.0,
            before={"evaluation/loss": 1.0},
            after={"evaluation/loss": error**2},
            changed=1,
        )
        write_record(run.exported, exported)
        return run, register(run, exported, tags={})

    @property
    def registry(self) -> Registry:
        return Registry(tracking_store())

    @property
    def champion(self) -> str:
        served = self.registry.served(self.name, "champion")
        return served.version if served else ""


def linear(error: float) -> onnx.ModelProto:
    """y = x0 + error."""
    x, y = (onnx.helper.make_tensor_value_info(n, 1, ["batch", w]) for n, w in (("x", 4), ("y", 1)))
    weight = numpy_helper.from_array(np.array([[1.0], [0.0], [0.0], [0.0]], np.float32), "w")
    bias = numpy_helper.from_array(np.array([error], np.float32), "b")
    node = onnx.helper.make_node("Gemm", ["x", "w", "b"], ["y"])
    graph = onnx.helper.make_graph([node], "linear", [x], [y], [weight, bias])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def team(tmp_path: Path, request: pytest.FixtureRequest) -> Team:
    return Team(tmp_path, request.node.name)


@pytest.mark.slow
def test_a_better_file_is_promoted_a_worse_one_stays_a_candidate_and_the_comparison_is_in_the_registry(
    team: Team,
) -> None:
    first = promote(*team.run("first", 0.5))
    assert first.promotion is not None
    assert (first.promotion.status, team.champion) == ("served", "1")

    worse_run, worse = team.run("worse", 0.9)
    worse = promote(worse_run, worse)
    assert worse.promotion is not None
    assert worse.promotion.comparison is not None
    assert (worse.promotion.status, team.champion) == ("candidate", "1")
    assert "evaluation/loss 0.25 -> 0.81 beside champion version 1: not better" in worse.promotion.reason
    assert worse.promotion.comparison.served["evaluation/loss"] == pytest.approx(0.25, abs=1e-6)
    assert read_record(comparison_in(worse_run.export), Comparison) == worse.promotion.comparison
    assert not (worse_run.export / "served").exists()
    store = client(new_run())
    assert str(store.get_model_version_by_alias(team.name, "candidate").version) == "2"
    version = store.get_model_version(team.name, "2")
    assert version.tags["onward.promotion"] == "candidate"
    assert "| **evaluation/loss** | 0.25 | 0.81 |" in version.description

    better_run, better = team.run("better", 0.1)
    better = promote(better_run, better)
    assert better.promotion is not None
    assert (better.promotion.status, team.champion) == ("served", "3")
    assert promote(better_run, better) == better  # a decision is made once
    assert read_record(better_run.exported, ExportedModel).promotion == better.promotion


@pytest.mark.slow
def test_without_its_prefect_server_a_run_promotes_only_where_no_other_machine_can(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task.runtime.flow_run, "get_id", lambda: "0123")
    monkeypatch.setattr(task, "prefect_answers", lambda: False)
    run, exported = team.run("first", 0.5)
    monkeypatch.setattr(task, "create_markdown_artifact", lambda *_, **__: None)
    with monkeypatch.context() as shared:
        shared.setattr(task, "database_of", lambda tracking_uri: None)  # as of a server
        with pytest.raises(RuntimeUnavailable, match=r"not decided: `onward resume` does that when the server is back"):
            promote(run, exported)
    assert read_record(run.exported, ExportedModel).promotion is None
    promoted = promote(run, exported)
    assert promoted.promotion is not None
    assert (promoted.promotion.status, team.champion) == ("served", "1")


@pytest.mark.slow
def test_of_two_runs_that_race_the_better_one_is_promoted_whichever_compares_first(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(*team.run("first", 0.5))
    good, best = team.run("good", 0.3), team.run("best", 0.1)
    lock, raced = task.lock, []

    @contextlib.contextmanager
    def after_the_other(name: str, **known: bool) -> Iterator[None]:
        if not raced:  # the run `good` has compared itself with version 1 and is about to take its place
            raced.append(True)
            promote(*best)
        with lock(name, **known):
            yield

    monkeypatch.setattr(task, "lock", after_the_other)
    found = promote(*good)
    assert found.promotion is not None
    assert found.promotion.comparison is not None
    assert (team.champion, found.promotion.status) == ("3", "candidate")
    assert found.promotion.comparison.version == "3"  # it was compared again, with the one that came first


@pytest.mark.slow
def test_an_interval_above_zero_is_needed_where_a_confidence_is_asked_for(team: Team) -> None:
    promote(*team.run("first", 0.5))
    surely = promote(*team.run("surely", 0.2, confidence=0.95))
    assert surely.promotion is not None
    assert surely.promotion.comparison is not None
    assert surely.promotion.comparison.interval is not None
    low, high = surely.promotion.comparison.interval
    # every row has the same error, so that every resample has the same gain
    assert (low, high) == (pytest.approx(0.21, abs=1e-4), pytest.approx(0.21, abs=1e-4))
    assert team.champion == "2"


@pytest.mark.slow
def test_a_file_that_waits_for_approval_is_promoted_by_yes_and_not_by_no(team: Team) -> None:
    promote(*team.run("first", 0.5))
    for answer, champion in ((False, "1"), (True, "3")):
        run, exported = team.run(f"asked-{answer}", 0.1, approval_hours=1.0)
        waiting = promote(run, exported)
        assert waiting.promotion is not None
        assert waiting.promotion.status == "waiting"
        assert team.champion == "1"
        assert promote(run, waiting) == waiting  # nobody has answered yet
        answered = promote(run, waiting, approved=answer)
        assert answered.promotion is not None
        assert answered.promotion.status == ("served" if answer else "candidate")
        assert team.champion == champion


def test_an_alias_is_moved_by_hand_and_what_does_not_exist_is_refused(team: Team) -> None:
    promote(*team.run("first", 0.5))
    promote(*team.run("worse", 0.9))
    assert promote_by_hand(tracking_store(), team.name, "2", "champion") == "1"
    assert team.champion == "2"
    assert promote_by_hand(tracking_store(), team.name, "1", "champion") == "2"
    with pytest.raises(ConfigError, match="no version 7; its versions are 1, 2"):
        promote_by_hand(tracking_store(), team.name, "7", "champion")
    with pytest.raises(RuntimeUnavailable):
        promote_by_hand(f"http://127.0.0.1:{free_port()}", team.name, "1", "champion")


@pytest.mark.slow
def test_a_served_file_of_another_kind_is_not_replaced_without_a_yes(team: Team) -> None:
    tracker = new_run()
    run, exported = team.run("other", 0.5)
    path = run.export / "model.onnx"
    path.write_bytes(tiny_mlp().SerializeToString())
    write_record(run.exported, exported.model_copy(update={"sha256": model_digest(path)}))
    other = register(run, exported.model_copy(update={"sha256": model_digest(path)}), tags={})
    promote_by_hand(tracker.tracking_uri, team.name, other.version, "champion")
    new = promote(*team.run("new", 0.1))
    assert new.promotion is not None
    assert new.promotion.status == "candidate"
    assert "signature differs" in new.promotion.reason
    assert "input 'x' is new" in new.promotion.reason
