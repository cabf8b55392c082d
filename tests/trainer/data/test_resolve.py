"""Every process trains, tries and measures with the same numbers in place of the settings that the data decides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from onward.trainer import loop
from onward.trainer.config.losses import LabelUnits
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data import resolve
from onward.trainer.data.resolve import ResolvedSettings, read_resolved, write_resolved
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import RecordError
from onward.trainer.events import Heartbeat
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.variants import quantize_aware
from onward.trainer.model import first_output_units as output_units
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.proposal import proof
from onward.trainer.rehearsal import checks
from onward.trainer.run.adjustments import Adjustments
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.kept_settings import write_settings
from onward.trainer.run.records import read_record, write_record
from tests.support.graphs import tiny_mlp
from tests.support.ranks import ROOT
from tests.support.runs import assert_equal_bits, final_tensors, make_run, train_run, train_until
from tests.support.texts import gpt2_tokenizer, sentences, write_csv
from tests.trainer.data.text.test_tokenized_rows import configured, sharded

NUM_ROWS = 12


def scored_language_model() -> onnx.ModelProto:
    """`input_ids` [batch, length] -> `logits` [batch, length, 400], `score` [batch, 1]."""
    g = GraphWriter("scored", seed=0)
    ids = g.input("input_ids", ("batch", "length"), TensorProto.INT64)
    x = g.op("Gather", g.weight("words.weight", g.normal(0.5, 400, 8)), ids)
    g.op("MatMul", x, g.weight("head.weight", g.normal(0.2, 8, 400)), outputs="logits")
    mean = g.op("ReduceMean", x, g.weight("axis", [1]), keepdims=0)
    g.op("MatMul", mean, g.weight("score.weight", g.normal(0.2, 8, 1)), outputs="score")
    g.output("logits", ("batch", "length", 400))
    g.output("score", ("batch", 1))
    return g.model()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory as shard data finds it, whose data decides every setting that data can decide."""
    gpt2_tokenizer(tmp_path / "tokenizer.json")
    for name, seed in (("data", 0), ("test", 3)):
        texts = sentences(NUM_ROWS, seed=seed)
        write_csv(tmp_path / f"{name}.csv", ["text", "price"], [[each, 900 + len(each)] for each in texts])
    config = configured(
        tmp_path,
        scored_language_model(),
        {
            # evaluated on the same rows, all of which are in each sample, so that all numbers are equal
            "evaluation_source": str(tmp_path / "data.csv"),
            "evaluation_fraction": 0.0,
            "test_source": str(tmp_path / "test.csv"),
            "text": {"task": "causal", "packing": "none", "columns": "text"},
        },
        loss=[
            {"output": "logits", "class_weights": "balanced"},
            {
                "name": "mse",
                "output": "score",
                "label": "price",
                "standardise_label": "standard",
                "output_units": "standardised",
            },
        ],
        metrics=[{"name": "bits_per_byte", "output": "logits"}],
        train={"num_steps": 2, "global_batch_size": NUM_ROWS},
        launch={"device": "cpu"},
        precision={"compute": "fp32"},
    )
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    write_settings(run, config)
    run.shards.symlink_to(sharded(config, tmp_path)[0], target_is_directory=True)
    return run


def decided(config: RunConfig) -> tuple[object, ...]:
    return config.losses, config.metrics


def trained_with(run: RunDir) -> RunConfig:
    """The configuration that the training loop begins with."""
    mpi = MPIContext(rank=0, world_size=1, local_rank=0, local_size=1, host="here", device=torch.device("cpu"))
    reached = InterruptedError("the loop has its configuration")
    with mock.patch.object(loop, "set_arithmetic", side_effect=reached) as begun, pytest.raises(InterruptedError):
        loop.train(run, mpi, attempt=1, heartbeat=Heartbeat(run.heartbeat), stop_requested=lambda: False)
    config: RunConfig = begun.call_args.args[0]
    return config


def test_every_reader_has_the_same_numbers(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_resolved(run)
    expected = read_resolved(run)
    cross_entropy, mse = expected.losses
    assert len(cross_entropy.class_weights) == 400
    assert isinstance(mse.standardise_label, LabelUnits)
    assert expected.metrics[0].bytes_per_target is not None
    assert decided(trained_with(run)) == decided(expected)

    splits: tuple[Literal["evaluation", "test"], ...] = ("evaluation", "test")
    for split in splits:
        of_split = read_resolved(run, split)
        with mock.patch("onward.trainer.export.export_commands.EvaluationMetrics") as measured:
            evaluation_data(run, split).new_metrics(["logits", "score"])
        losses, metrics = measured.call_args.args
        assert [loss.config for loss in losses.each] == list(of_split.losses) == list(expected.losses)
        assert metrics == of_split.metrics
    assert read_resolved(run, "test").metrics != expected.metrics, "other texts have other bytes"

    tried: dict[str, RunConfig] = {}
    for module in (output_units, checks, proof, quantize_aware):

        def kept(*given: Any, name: str = module.__name__) -> RunConfig:
            tried[name] = resolve.resolve(*given)
            return tried[name]

        monkeypatch.setattr(module, "resolve", kept)
    proof.prove(read_config(run), 1)
    quantize_aware._calibration_rows(read_config(run))
    assert len(tried) == 4
    assert {name: decided(config) for name, config in tried.items()} == dict.fromkeys(tried, decided(expected))


def test_the_file_is_read_and_not_made_again(run: RunDir) -> None:
    write_resolved(run)
    made = read_record(run.resolved, ResolvedSettings)
    other = made.model_copy(update={"metrics": made.metrics | {"evaluation": made.metrics["test"]}})
    write_record(run.resolved, other)
    assert read_resolved(run).metrics == made.metrics["test"]


def test_a_file_of_other_settings_or_other_shards_is_not_used(run: RunDir, tmp_path: Path) -> None:
    write_resolved(run)
    made, given = read_record(run.resolved, ResolvedSettings), read_config(run)
    write_record(run.resolved, made.model_copy(update={"metrics": made.metrics | {"evaluation": made.metrics["test"]}}))
    write_record(run.adjusted, Adjustments(micro_batch_divisor=2))
    adjusted = read_resolved(run)
    assert adjusted.train.gradient_accumulation_steps == 2
    assert decided(adjusted) == (made.loss, made.metrics["evaluation"])
    run.adjusted.unlink()

    few = given.model_copy(update={"data": given.data.model_copy(update={"evaluation_rows": 4})})
    write_settings(run, few)
    assert read_resolved(run).metrics not in (made.metrics["evaluation"], made.metrics["test"])
    # other shards of the same settings
    write_settings(run, given)
    write_csv(tmp_path / "data.csv", ["text", "price"], [["a short text", 5], ["and a longer text", 7]])
    run.shards.unlink()
    run.shards.symlink_to(sharded(given, tmp_path)[0], target_is_directory=True)
    units = read_resolved(run).losses[1].label_units
    assert units is not None
    assert units.center == (6.0,)
    write_resolved(run)
    assert read_record(run.resolved, ResolvedSettings).loss[1].label_units == units


def test_a_run_of_an_earlier_version_has_no_file_and_gets_the_same_numbers(run: RunDir) -> None:
    found = read_resolved(run)
    assert not run.resolved.exists(), "ranks read, and do not write"
    write_resolved(run)
    assert decided(read_resolved(run)) == decided(found)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_run_that_began_without_the_file_ends_with_the_bits_of_one_that_has_it(tmp_path: Path) -> None:
    rows = np.random.default_rng(0)
    columns = {"features": rows.normal(size=(60, 4)).astype(np.float32), "label": rows.integers(3, size=60) % 2}
    settings = {
        "loss": {"class_weights": "balanced"},
        "train": {"global_batch_size": 8, "num_steps": 6},
        "checkpoint": {"period": 2},
    }
    undisturbed, old = (make_run(tmp_path / name, tiny_mlp(outputs=3), columns, **settings) for name in ("new", "old"))
    train_run(undisturbed)
    old.resolved.unlink()
    train_until(old, ("scalars", 3), rank=0)
    write_resolved(old)  # by the task shard data, when this version resumes the run
    assert train_run(old).attempt == 2
    assert_equal_bits(final_tensors(old), final_tensors(undisturbed))


def test_settings_that_no_data_decides_need_no_file(run: RunDir) -> None:
    given = read_config(run)
    plain = {"class_weights": (), "standardise_label": "none", "output_units": "auto"}
    losses = tuple(loss.model_copy(update=plain) for loss in given.loss)
    write_settings(run, given.model_copy(update={"loss": losses, "metrics": ()}))
    write_resolved(run)
    assert not run.resolved.exists()
    assert read_resolved(run) == read_config(run)


def test_a_damaged_file_is_named_and_sharding_writes_it_again(run: RunDir) -> None:
    run.resolved.write_text("{")
    with pytest.raises(RecordError, match=r"resolved\.json"):
        read_resolved(run)
    write_resolved(run)
    assert read_resolved(run).metrics[0].bytes_per_target


def test_nothing_else_completes_settings_from_the_data() -> None:
    names = re.compile(r"\b(losses|metrics)_from_data\(")
    callers = {path.name for path in (ROOT / "trainer").rglob("*.py") if names.search(path.read_text())}
    assert callers == {"resolve.py", "losses_from_data.py", "byte_counts.py"}
