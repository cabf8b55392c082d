"""Metrics of real runs do not depend on the layout: replicas with unequal shares, tensor parallelism, a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.trainer.__main__ import evaluation_data
from onward.trainer.checkpoint.load import load
from onward.trainer.checkpoint.verification import verify
from onward.trainer.distributed.weights import weights_in
from onward.trainer.export import export
from onward.trainer.run.directory import RunDir
from tests.equivalence.layouts import Case, trained
from tests.support.runs import events

pytestmark = pytest.mark.mpi
METRICS = ["accuracy", "top_3", "f1_macro", "mean_iou", "auroc", "cohen_kappa", "perplexity"]
COUNTED = {f"evaluation/{name}" for name in ("accuracy", "top_3", "f1_macro", "mean_iou", "cohen_kappa")}
"""Metrics that rounding changes only where it changes a prediction."""


def test_every_layout_has_the_metrics_of_one_rank_and_so_has_the_exported_file(tmp_path: Path) -> None:
    """The evaluation split has 12 rows in batches of 5: with two replicas shares of two batches and of one."""
    sections = {"metrics": METRICS, "train": {"num_steps": 1, "evaluation_batch_size": 5}}
    cases = [Case("GPT-2: fused QKV, tied", layout, sections=sections) for layout in ("1x1x1", "dp2", "tp2", "pp2")]
    runs = dict(zip(("alone", "dp2", "tp2", "pp2"), trained(cases, tmp_path).values(), strict=True))
    expected = evaluations(runs["alone"])
    assert set(expected[0]) == {"evaluation/loss", *(f"evaluation/{name}" for name in METRICS)}
    for name, run in runs.items():
        for mine, theirs in zip(evaluations(run), expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5), name
            assert {key: mine[key] for key in COUNTED} == {key: theirs[key] for key in COUNTED}, name
    run = runs["dp2"]
    weights = weights_in(load(verify(run.checkpoint(1)))[1])
    made = export.export(run, export.Checkpoint(step=1, weights=weights), data=evaluation_data(run), folder=tmp_path)
    assert made.before == pytest.approx(expected[0], rel=1e-5)
    assert made.after == pytest.approx(evaluations(run)[-1], rel=1e-5)


def evaluations(run: RunDir) -> list[dict[str, float]]:
    return [event.fields["values"] for event in events(run, "evaluation")]
