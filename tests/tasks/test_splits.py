"""The rows of a run: several sources on any number of ranks, few rows to evaluate on, a separate test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from scipy.special import log_softmax

from onward.tasks.export import export_file
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.run.directory import RunDir
from tests.support.graphs import tiny_mlp
from tests.support.runs import assert_close, assert_equal_bits, final_tensors, losses, make_run, train_run, train_until

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("forked")]


def rows(count: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    label = random.integers(0, 4, count)
    return {"features": random.normal(size=(count, 8)).astype(np.float32) + label[:, None], "label": label}


def mixed_run(folder: Path, **sections: object) -> RunDir:
    """A run on 50 and 20 rows with weights 1 and 3."""
    folder.mkdir()
    for number, count in enumerate((50, 20)):
        np.savez(folder / f"{number}.npz", **rows(count, number))
    sources = [{"source": str(folder / f"{number}.npz"), "weight": weight} for number, weight in ((0, 1), (1, 3))]
    settings = {"train": {"num_steps": 20, "global_batch_size": 8}, "checkpoint": {"period": 5}, **sections}
    return make_run(
        folder, tiny_mlp(inputs=8, outputs=4), rows(4, 9), data={"source": "", "sources": sources}, **settings
    )


@pytest.mark.slow
def test_a_mixture_is_the_same_on_one_rank_and_on_two_and_after_a_kill(tmp_path: Path) -> None:
    one, two = mixed_run(tmp_path / "one"), mixed_run(tmp_path / "two", parallel={"data": 2})
    killed = mixed_run(tmp_path / "killed", parallel={"data": 2})
    for run in (one, two):
        train_run(run)
    train_until(killed, lambda event: event.step >= 8)
    train_run(killed)
    assert_close(final_tensors(two), final_tensors(one), 1e-5)
    assert_equal_bits(final_tensors(killed), final_tensors(two))
    assert losses(killed) == losses(two)
    assert open_shards(one.shards, "train").sizes == (41, 16)


def test_the_exported_file_is_tested_once_on_rows_that_nothing_else_reads(tmp_path: Path) -> None:
    test = rows(30, 5)
    np.savez(tmp_path / "test.npz", **test)
    run = make_run(
        tmp_path / "run",
        tiny_mlp(inputs=8, outputs=4),
        rows(60, 0),
        data={"test_source": str(tmp_path / "test.npz"), "evaluation_rows": 5},
        train={"num_steps": 10, "global_batch_size": 8},
    )
    train_run(run)
    exported = export_file(run, run.checkpoint(10))
    assert set(exported.test) == {"test/loss", "test/accuracy"}
    assert set(exported.after) == {"evaluation/loss", "evaluation/accuracy"}
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])

    def judged(columns: dict[str, np.ndarray]) -> tuple[float, float]:
        [logits, *_] = session.run(None, {"features": columns["features"].astype(np.float32)})
        loss = -log_softmax(logits, axis=1)[np.arange(len(logits)), columns["label"]].mean()
        return float(loss), float((logits.argmax(1) == columns["label"]).mean())

    assert (exported.test["test/loss"], exported.test["test/accuracy"]) == pytest.approx(judged(test), rel=1e-4)
    few = open_shards(run.shards, "evaluation", most=5).read(np.arange(5))
    expected = judged({name: np.asarray(few[name]) for name in ("features", "label")})
    assert (exported.after["evaluation/loss"], exported.after["evaluation/accuracy"]) == pytest.approx(
        expected, rel=1e-4
    )
