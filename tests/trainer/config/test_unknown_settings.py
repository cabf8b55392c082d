"""Unknown settings name the one that was probably meant, and names of choices are read in any case."""

from __future__ import annotations

import time
from typing import Any

import pytest

from onward.trainer.config.loading import build_config, load_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.section import Section, choices_of, table_type
from onward.trainer.config.unknown_settings import OF_CHOICES, SYNONYMS
from onward.trainer.errors import ConfigError

GOOD: dict[str, dict[str, Any]] = {"model": {"path": "m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 5}}


def settings(section: type[Section] = RunConfig, name: str = "") -> list[str]:
    found = []
    for key, field in section.model_fields.items():
        inner = table_type(field.annotation)
        found += settings(inner, f"{name}{key}.") if inner else [f"{name}{key}"]
    return found


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.lr=3e-4", "unknown key optimizer.lr; did you mean optimizer.learning_rate?"),
        ("train.lr=3e-4", "unknown key train.lr; did you mean optimizer.learning_rate?"),
        ("lr=3e-4", "unknown section lr; did you mean optimizer.learning_rate?"),
        ("optimizer.wd=0.1", "unknown key optimizer.wd; did you mean optimizer.weight_decay?"),
        ("optimizer.betas=[0.9,0.99]", "unknown key optimizer.betas; did you mean optimizer.alpha and optimizer.beta?"),
        ("train.bs=8", "unknown key train.bs; did you mean train.global_batch_size?"),
        ("train.batch_size=8", "unknown key train.batch_size; did you mean train.global_batch_size?"),
        ("data.batch-size=8", "unknown key data.batch-size; did you mean train.global_batch_size?"),
        ("train.epochs=8", "unknown key train.epochs; did you mean train.num_epochs?"),
        ("train.steps=8", "unknown key train.steps; did you mean train.num_steps?"),
        ("train.amp=true", "unknown key train.amp; did you mean precision.compute?"),
        ("seed=1", "unknown section seed; did you mean train.seed?"),
        ("train.Seed=1", "unknown key train.Seed; did you mean train.seed?"),
        ("data.workers=2", "unknown key data.workers; did you mean data.image.workers or launch.num_ranks?"),
        ("train.learning_rate=1", "unknown key train.learning_rate; did you mean optimizer.learning_rate?"),
        ("optimizer.lerning_rate=1", "unknown key optimizer.lerning_rate; did you mean optimizer.learning_rate?"),
        ("export.tensorboard=true", "unknown key export.tensorboard; did you mean monitor.report_to?"),
        ("optimizer.qqq=1", "unknown key optimizer.qqq; known: optimizer.name, optimizer.learning_rate, "),
    ],
)
def test_an_unknown_setting_names_the_one_that_is_meant(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(GOOD, [override])
    (problem,) = refusal.value.problems
    assert problem.startswith(sentence)


def test_each_synonym_means_an_existing_setting_and_is_no_setting_of_the_same_table() -> None:
    known = set(settings())
    for names in SYNONYMS:
        assert known.issuperset(names.split(" and ")), names
    every = [(name, word) for name, words in SYNONYMS.items() for word in words]
    assert len(every) == len(set(every)), "each synonym once"
    others = {name: f"{name.rpartition('.')[0]}.{word}" for name, word in every}
    assert not [other for name, other in others.items() if other in known and other != name]


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optimizer.name=AdamW", "optimizer", "name", "adamw"),
        ("optimizer.name=MUON", "optimizer", "momentum", 0.95),
        ("model.loss=Cross-Entropy", "model", "loss", "cross_entropy"),
        ("precision.compute=BF16", "precision", "compute", "bf16"),
        ("launch.device=CPU", "launch", "device", "cpu"),
        ("schedule.mode=Cosine", "schedule", "mode", "cosine"),
        ("export.variants=['FP16']", "export", "variants", ("fp16",)),
        ("export.promote_if=Always", "export", "promote_if", None),
    ],
)
def test_case_does_not_matter_for_choices(override: str, section: str, key: str, value: Any) -> None:
    found = getattr(load_config(GOOD, [override]), section)
    if value is None:
        assert found.promote_if.when == "always"
    else:
        assert getattr(found, key) == value


def test_case_does_not_matter_for_metrics_losses_and_automatic_layouts() -> None:
    config = build_config(
        {**GOOD, "metrics": ["MAE"], "loss": {"name": "MSE"}, "parallel": "Auto", "launch": {"num_ranks": 2}}
    )
    assert (config.losses[0].name, config.metrics[0].name, config.parallel.sizes) == ("mse", "mae", "auto")


def test_a_free_text_keeps_its_case() -> None:
    config = build_config({**GOOD, "data": {"source": "digits", "label": "Auto", "inputs": {"X": "MSE"}}})
    assert (config.data.label, config.data.inputs) == ("Auto", {"X": "MSE"})


@pytest.mark.parametrize(
    ("override", "meant"),
    [("model.loss=mae", "'l1'"), ("optimizer.name=adan", "'adam'"), ("precision.compute=float16", "'fp16'")],
)
def test_an_unknown_choice_names_the_one_that_is_meant(override: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"Input should be .*; did you mean {meant}\?"):
        load_config(GOOD, [override])


def test_each_word_for_a_choice_is_no_choice_itself() -> None:
    losses = choices_of(type(build_config(GOOD).model).model_fields["loss"].annotation)
    assert not set(OF_CHOICES) & set(losses)


@pytest.mark.parametrize("place", ["train.", "", "a.b"])
def test_of_many_unknown_keys_the_first_are_named_and_the_others_counted(place: str) -> None:
    """20,000 keys took 20 s when each was compared with all others."""
    keys = [f"k{number}" for number in range(30_000)]
    table: dict[str, Any] = dict.fromkeys(keys, 1)
    given = {"train.": {"train": {"num_steps": 5, **table}}, "": table, "a.b": {key: {"b": 1} for key in keys}}[place]
    began = time.process_time()
    with pytest.raises(ConfigError) as refused:
        load_config([GOOD, given])
    assert time.process_time() - began < 15
    assert len(refused.value.problems) == 21
    what = "unknown keys of train" if place == "train." else "unknown sections"
    assert refused.value.problems[-1] == f"... and 29,980 more {what}"


def test_a_thousand_losses_are_the_most() -> None:
    with pytest.raises(
        ConfigError, match="20,000 losses, or metrics, of a configuration, more than the limit of 1,000"
    ):
        load_config({**GOOD, "loss": [{"k": 1}] * 20_000})


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.image.masks=3", "data.image.masks: Input should be a valid string, or a list, not 3"),
        ('data.image.masks=["a", 3]', "data.image.masks.1: Input should be a valid string, not 3"),
        ("data.table.categories={a=3}", "data.table.categories.a: Input should be 'sorted', or a list, not 3"),
        ("data.image.size=[3]", "data.image.size.1 is missing; set it"),
        (
            "loss.standardise_label=3",
            "loss.standardise_label: Input should be 'none', 'standard', 'robust' or 'log', or",
        ),
        ("train.shuffle=lenght", ", or 'length', 'blocks' or 'files', not 'lenght'; did you mean 'length'?"),
        ("data.inputs={a=3, b=4}", "data.inputs.a: Input should be a valid string, or a list, not 3"),
    ],
)
def test_a_wrong_value_of_a_setting_of_several_types_is_one_problem(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(GOOD, [override])
    key = override.partition("=")[0]
    problems = [problem for problem in refusal.value.problems if problem.startswith(key)]
    assert sentence in problems[0]
    assert len(problems) == (2 if key == "data.inputs" else 1)
