"""What a sweep is to try: how it is read, what is refused before anything starts, and which trials follow from it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onward
from onward.flows.sweeps.choice import choose_settings
from onward.flows.sweeps.making import make_sweep
from onward.flows.sweeps.outcome import find_sweep, outcome_of, table_of
from onward.flows.sweeps.settings import cannot_vary, read_space, split
from onward.flows.sweeps.trials import trial_config
from onward.infra.mlflow.registry import Registry
from onward.trainer.config.loading import load_config
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.run.directory import RunDir
from onward.trainer.run.recorded.sweep_records import Membership, Range, Sweep, SweepDir, Trial, best_of
from onward.trainer.run.records import RunIdentity, read_record, write_record
from tests.infra.mlflow.test_tracking import adder
from tests.support.graphs import tiny_conv_net
from tests.support.stores import new_run, tracking_store

CONFIG = """
[model]
path = "model.onnx"
[data]
source = "data.npz"
[train]
num_steps = 20
global_batch_size = 8
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    onnx.save_model(tiny_conv_net(num_classes=4), tmp_path / "model.onnx")
    labels = np.arange(40) % 4
    np.savez(tmp_path / "data.npz", image=np.zeros((40, 3, 8, 8), np.float32), label=labels)
    (tmp_path / "digits.toml").write_text(CONFIG)
    return tmp_path


def made(folder: Path, *words: str, **options: Any) -> tuple[SweepDir, Sweep]:
    sweep = make_sweep(folder / "digits.toml", (), read_space(words), **options)
    return sweep, read_record(sweep.sweep, Sweep)


def problems_of(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read_space(words)
    return list(refused.value.problems)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4, 1e-3", ["1e-4", "3e-4", "1e-3"]),
        ('["a", "b"],[]', ['["a", "b"]', "[]"]),
        ("\"a,b\",'c'", ['"a,b"', "'c'"]),
        ('"a\\",b",c', ['"a\\",b"', "c"]),
        ('"a\\\\",b', ['"a\\\\"', "b"]),
        ('{a = [1, 2], b = "}"},{}', ['{a = [1, 2], b = "}"}', "{}"]),
        ("log(1, 2)", ["log(1, 2)"]),
        ("1,", ["1", ""]),
    ],
)
def test_commas_separate_values_except_inside_brackets_and_quotes(text: str, values: list[str]) -> None:
    assert split("key", text) == values


def test_several_values_are_choices_a_range_is_a_range_and_one_value_is_an_override() -> None:
    space = read_space(
        [
            "optimizer.learning_rate=1e-4,3e-4",
            "optimizer.name=adamw,lamb",
            'model.freeze=["a", "b"],[]',
            "optimizer.weight_decay=log(1e-5, 1e-2)",
            "train.num_steps=100",
        ]
    )
    assert space.choices == {
        "optimizer.learning_rate": (1e-4, 3e-4),
        "optimizer.name": ("adamw", "lamb"),
        "model.freeze": (["a", "b"], []),
    }
    assert space.ranges == {"optimizer.weight_decay": Range(kind="log", low=1e-5, high=1e-2)}
    assert space.fixed == ["train.num_steps=100"]
    same = read_space({"optimizer.learning_rate": [1e-4, 3e-4], "optimizer.weight_decay": "log(1e-5, 1e-2)"})
    assert same.choices == {"optimizer.learning_rate": (1e-4, 3e-4)}
    assert same.ranges == space.ranges


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to try: give at least one setting several values"),
        (["train.num_steps=100"], "nothing to try"),
        (["optimizer.learning_rate"], "is not section.key=VALUES, such as optimizer.learning_rate=1e-4,3e-4"),
        (["a.b=1,2", "a.b=3,4"], "a.b is given twice; give all of its values in one place, a.b=A,B"),
        (["a.b=1,,2"], "a value between two commas is empty"),
        (["a.b=1,2,1.0"], "a.b: the value 1.0 is given twice, and its trial would be repeated"),
        (["a.b=[1,2"], "a.b=[1,2: the closing ] is missing"),
        (["a.b='1,2"], "the closing ' is missing"),
        (["a.b=loguniform(1, 2)"], "there is no range loguniform; there are log(a, b), uniform(a, b) and int(a, b)"),
        (["a.b=log(1)"], "log needs two numbers, the least and the greatest value"),
        (["a.b=log(1, x)"], "log needs two numbers"),
        (["a.b=uniform(2, 1)"], "the bounds must be finite, and the first one less than the second"),
        (["a.b=uniform(0, inf)"], "the bounds must be finite"),
        (["a.b=log(0, 1)"], "a logarithmic range lies above 0; for values around 0 use uniform(0, 1)"),
        (["a.b=int(1, 2.5)"], "the bounds of whole numbers are whole numbers"),
        (["a.b=log(1, 2),3"], "give one range, or several values, but not both"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_what_to_give_instead(words: list[str], said: str) -> None:
    (problem,) = problems_of(*words)
    assert said in problem


def test_python_values_are_lists_and_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        read_space({"a.b": 1, "a.c": "adamw", "a.d": [1], "a.e": [1, 1]})
    first, second, third, fourth = refused.value.problems
    assert first.startswith("a.b: 1 is one value; give a list of values to try, or a range such as 'log(1e-5, 1e-2)'")
    assert second.startswith("a.c: 'adamw' is one value")
    assert third == "a.d has 1 values to try; give two or more, or give it as an override"
    assert "given twice" in fourth


def test_a_grid_tries_every_combination_and_the_last_setting_changes_fastest(folder: Path) -> None:
    _, sweep = made(folder, "optimizer.learning_rate=1e-4,1e-3", "optimizer.name=adamw,lamb,sgd", "train.num_steps=7")
    settings = [choose_settings(sweep, number, (), lambda trial: {}) for number in range(1, sweep.num_trials + 1)]
    assert [tuple(each.values()) for each in settings] == [
        (rate, name) for rate in (1e-4, 1e-3) for name in ("adamw", "lamb", "sgd")
    ]
    config = trial_config(sweep, Trial(number=4, run_id="r", settings=settings[3]))
    alone = load_config(
        folder / "digits.toml", ["optimizer.learning_rate=1e-3", "optimizer.name=adamw", "train.num_steps=7"]
    )
    assert (config.name, config.export.register_as) == ("digits-1-4", "digits"), "all trials register under one name"
    same = {"name": config.name, "export": config.export, "monitor": config.monitor}
    assert config == alone.model_copy(update=same)


def test_paths_to_try_are_relative_to_the_working_directory_of_the_start(folder: Path) -> None:
    onnx.save_model(tiny_conv_net(num_classes=4), folder / "other.onnx")
    _, sweep = made(folder, "model.path=model.onnx,other.onnx")
    assert sweep.choices["model.path"] == (str(folder / "model.onnx"), str(folder / "other.onnx"))


def refused(folder: Path, *words: str, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as found:
        made(folder, *words, **options)
    assert not (folder / "home" / "sweeps").exists(), "nothing is written"
    return found.value.problems


def test_everything_wrong_in_any_combination_is_refused_with_the_values_that_cause_it(folder: Path) -> None:
    found = refused(folder, "optimizer.learning_rate=1e-3,-1", "optimizer.moments=bf16,fp8", "train.num_stepz=3")
    assert found == (
        "unknown key train.num_stepz; did you mean train.num_steps?",
        "with optimizer.moments=fp8: optimizer.moments: Input should be 'fp32' or 'bf16', not 'fp8'",
        "with optimizer.learning_rate=-1: optimizer.learning_rate: Input should be greater than 0, not -1",
    )
    bounds = refused(folder, "optimizer.weight_decay=uniform(-1, 1)", "optimizer.alpha=uniform(0, 2)", trials=3)
    assert [each.partition(": ")[0] for each in bounds] == [
        "with optimizer.weight_decay=-1",
        "with optimizer.alpha=2",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch.retries=1,2"], "launch.retries must be the same for all trials: [launch] says where and how ranks"),
        (["export.alias=a,b"], "export.alias must be the same for all trials: only the best trial is exported"),
        (["monitor.experiment=a,b"], "monitor.experiment must be the same for all trials"),
        (["name=a,b"], "name must be the same for all trials: the trials are named after the sweep"),
        (["checkpoint.best_metric=evaluation/loss,evaluation/accuracy"], "the metric by which trials are compared"),
        (["data.evaluation_fraction=0.1,0.2"], "trials are compared on the same rows"),
        (["data.source=data.npz,other.npz"], "can only differ between trials with data.evaluation_source"),
        (["loss.label_smoothing=0.0,0.1"], "loss.label_smoothing changes what evaluation/loss means"),
    ],
)
def test_settings_by_which_trials_could_not_be_compared_are_refused(folder: Path, words: list[str], said: str) -> None:
    np.savez(folder / "other.npz", **np.load(folder / "data.npz"))
    (problem,) = refused(folder, *words)
    assert said in problem


def test_a_teacher_may_differ_unless_the_metric_is_measured_against_it() -> None:
    plain: dict[str, Any] = {"model": {"path": "m.onnx"}}
    assert cannot_vary(plain, ["teacher.temperature"]) == []
    (problem,) = cannot_vary({"model": {"loss": "teacher"}}, ["teacher.temperature"])
    assert "teacher.temperature changes what evaluation/loss means" in problem
    assert cannot_vary({"checkpoint": {"best_metric": "evaluation/distillation"}}, ["teacher.weight"])


def test_a_registered_model_is_the_version_that_its_alias_names_when_the_sweep_starts(folder: Path) -> None:
    tracker, registry = new_run(), Registry(tracking_store())
    tracker.register_model(adder(folder, by=1.0), name="swept")
    registry.set_alias(registry.version("swept", "1"), "champion")
    words = ["model.path=models:/swept@champion", "optimizer.learning_rate=1e-3,1e-2"]
    space = read_space([*words, f"monitor.tracking_uri={tracking_store()}"])
    sweep = read_record(make_sweep(folder / "digits.toml", (), space).sweep, Sweep)
    assert sweep.settings["model"]["path"] == "models:/swept/1"


def test_a_loss_may_differ_where_another_metric_decides(folder: Path) -> None:
    _, sweep = made(folder, "loss.label_smoothing=0.0,0.1", "checkpoint.best_metric=evaluation/accuracy")
    assert (sweep.metric, sweep.greatest, sweep.num_trials) == ("evaluation/accuracy", True, 2)


def test_trials_are_counted_where_a_range_is_and_only_there(folder: Path) -> None:
    rates = "optimizer.learning_rate=log(1e-5, 1e-2)"
    assert "a range has no last value; say how many trials to make, such as --trials 20" in refused(folder, rates)[0]
    two = "optimizer.learning_rate=1e-3,1e-2"
    assert "these settings have 2 combinations, and all of them are tried" in refused(folder, two, trials=3)[0]
    assert "2000 trials are more than 1000" in refused(folder, rates, trials=2000)[0]
    never = "train.evaluation_period=0"
    assert "train.evaluation_period is 0; set it" in refused(folder, two, never, prune=True)[0]


def test_without_optuna_a_grid_works_and_a_range_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    _, sweep = made(folder, "optimizer.learning_rate=1e-3,1e-2")
    assert choose_settings(sweep, 2, (), lambda trial: {}) == {"optimizer.learning_rate": 1e-2}
    with pytest.raises(RuntimeUnavailable, match=r"a range of values needs optuna.*pip install -e .*\[sweep\]"):
        made(folder, "optimizer.learning_rate=log(1e-3, 1e-2)", trials=2)


def ended(sweep: Sweep, number: int, settings: dict[str, Any], status: Any = "complete") -> Trial:
    value = (math.log10(settings["optimizer.learning_rate"]) + 3) ** 2 if status == "complete" else None
    return Trial(number=number, run_id=f"r{number}", settings=settings, status=status, value=value)


def search(sweep: Sweep, trials: list[Trial], upto: int) -> list[Trial]:
    """Continue a search with a made-up result for each trial; every fifth one fails, every seventh is pruned."""
    for number in range(len(trials) + 1, upto + 1):
        settings = choose_settings(sweep, number, trials, lambda trial: {10: 9.0})
        status = "failed" if number % 5 == 0 else "pruned" if number % 7 == 0 else "complete"
        trials.append(ended(sweep, number, settings, status))
    return trials


def test_a_search_that_is_continued_tries_what_it_would_have_tried_and_approaches_the_best(folder: Path) -> None:
    words = ["optimizer.learning_rate=log(1e-6, 1)", "optimizer.name=adamw,sgd", "train.num_steps=int(5, 9)"]
    _, sweep = made(folder, *words, trials=30, seed=3)
    whole = search(sweep, [], 30)
    reread = [Trial.model_validate_json(trial.model_dump_json()) for trial in whole[:12]]
    assert search(sweep, reread, 30) == whole
    rates = [trial.settings["optimizer.learning_rate"] for trial in whole]
    assert all(1e-6 <= rate <= 1 for rate in rates)
    assert {trial.settings["train.num_steps"] for trial in whole} <= {5, 6, 7, 8, 9}
    assert {type(trial.settings["train.num_steps"]) for trial in whole} == {int}
    assert {trial.settings["optimizer.name"] for trial in whole} == {"adamw", "sgd"}
    far = [abs(math.log10(rate) + 3) for rate in rates]
    assert np.mean(far[10:]) < np.mean(far[:10]), "the sampler learns from the results"
    _, other = made(folder, *words, trials=30, seed=4)
    assert search(other, [], 3) != whole[:3]


def test_the_best_trial_is_complete_and_the_first_of_equals() -> None:
    trials = tuple(
        Trial(number=number, run_id="r", settings={}, status=status, value=value)  # type: ignore[arg-type]
        for number, (status, value) in enumerate(
            [("failed", None), ("complete", 2.0), ("complete", 1.0), ("complete", 1.0), ("pruned", None)], 1
        )
    )
    assert [each and each.number for each in (best_of(trials, greatest=False), best_of(trials, greatest=True))] == [
        3,
        2,
    ]
    assert best_of(trials[:1], greatest=False) is None


def test_a_damaged_sweep_is_named_and_hides_no_other(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = made(folder, "optimizer.learning_rate=1e-3,1e-2")
    damaged, _ = made(folder, "optimizer.learning_rate=1e-3,1e-2")
    damaged.sweep.write_text("{")
    assert find_sweep("last").root == first.root
    assert str(damaged.sweep) in caplog.text


def test_a_sweep_is_described_by_its_directory_and_found_by_name_id_and_last(folder: Path) -> None:
    first, plan = made(folder, "optimizer.learning_rate=1e-3,1e-2")
    second, _ = made(folder, "optimizer.learning_rate=1e-3,1e-2")
    assert find_sweep("last").root == second.root
    assert find_sweep(first.root.name[:9]).root == first.root
    assert find_sweep("digits").root == second.root
    with pytest.raises(ConfigError, match=r"no sweep has the name or id 'x'; the newest sweeps are digits-2 \("):
        find_sweep("x")
    described = outcome_of(first)
    assert (described.state, described.trials, described.best, described.num_trials) == ("interrupted", (), 0, 2)
    for number, settings in enumerate(({"optimizer.learning_rate": 1e-3}, {"optimizer.learning_rate": 1e-2}), 1):
        write_record(first.trial(number), ended(plan, number, settings, "failed" if number == 1 else "complete"))
    described = outcome_of(first)
    assert (described.state, described.best) == ("interrupted", 2), "its best trial is not exported"
    heads, rows = table_of(described.trials, described.metric, described.best)
    assert heads == ("trial", "optimizer.learning_rate", "evaluation/loss", "steps", "seconds", "status", "run")
    assert [row[:3] + row[5:6] for row in rows] == [
        ("1", "0.001", "", "failed"),
        ("2", "0.01", "1", "complete, the best"),
    ]
    write_record(first.trial(2), ended(plan, 2, {"optimizer.learning_rate": 1e-2}, "failed"))
    assert outcome_of(first).state == "failed"
    assert [each.sweep_id for each in onward.sweeps()] == [second.root.name, first.root.name]


def test_from_start_lets_only_the_trial_begin_again_that_has_not_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_, plan = made(folder, "optimizer.learning_rate=1e-3,1e-2")
    with pytest.raises(ConfigError, match="has no trial that has begun and not ended"):
        onward.resume_sweep(made_.root.name, from_start=True)
    write_record(made_.trial(1), ended(plan, 1, {"optimizer.learning_rate": 1e-3}, "complete"))
    write_record(made_.trial(2), Trial(number=2, run_id="second", settings={"optimizer.learning_rate": 1e-2}))
    runs = [trial.run for trial in made_.trials()]
    for run in runs:
        run.checkpoint(20).mkdir(parents=True)  # without its files
    monkeypatch.setattr("onward.flows.sweeps.sweep_api._run_sweep", lambda sweep: sweep.root.name)
    assert onward.resume_sweep(made_.root.name, from_start=True) == made_.root.name
    assert [[path.name for path in run.checkpoints.iterdir()] for run in runs] == [
        ["step-000000020"],
        ["step-000000020.discarded"],
    ]


def test_a_trial_is_not_resumed_by_itself(folder: Path) -> None:
    run = RunDir(folder / "home" / "runs" / "0123")
    write_record(run.config, load_config(folder / "digits.toml"))
    write_record(run.identity, RunIdentity(run_id="0123", name="n", created_at="2026", model_sha256="0"))
    write_record(run.trial, Membership(sweep_id="abc", number=1, mlflow_run_id=""))
    with pytest.raises(ConfigError, match="0123 is a trial of a sweep, which goes on with: onward sweep --resume abc"):
        onward.resume("0123")
