"""What the page of a flow run shows of its result: a table of metrics before and after, and the curve of the loss."""

from __future__ import annotations

import contextlib

from prefect import runtime
from prefect.artifacts import create_image_artifact, create_table_artifact

from onward.tasks.shown.loss_curve import as_url, curves_of, picture
from onward.tasks.shown.prefect_server import prefect_answers
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.history import RunHistory
from onward.trainer.run.records import ExportedModel, RunIdentity, TrainResult, read_record


def show_curve(run: RunDir, history: RunHistory) -> None:
    """Show the loss of all attempts as a picture. Outside of a flow run it does nothing."""
    with contextlib.suppress(Exception):  # a missing picture must not fail the run
        curves = curves_of(history)
        if curves and runtime.flow_run.get_id() and prefect_answers():
            svg = picture(curves, f"loss of {read_record(run.identity, RunIdentity).name}")
            create_image_artifact(as_url(svg), key="loss", description="Loss of the training and of its evaluations")


def show_result(run: RunDir, exported: ExportedModel, result: TrainResult) -> None:
    """Show the result as a table. Outside of a flow run it does nothing."""
    with contextlib.suppress(Exception):
        if runtime.flow_run.get_id() and prefect_answers():
            version = f"version {exported.version} of `{exported.registered_as}`: " if exported.version else ""
            decision = f"\n\n{exported.promotion.reason}" if exported.promotion else ""
            page = read_record(run.identity, RunIdentity).mlflow_url
            create_table_artifact(
                result_rows(exported, result, first=read_config(run).promote_metric),
                key="result",
                description=f"{version}`{exported.path}`{decision}" + (f"\n\n[In MLflow]({page})" if page else ""),
            )


def result_rows(exported: ExportedModel, result: TrainResult, *, first: str) -> list[dict[str, str]]:
    """Return the rows of the table: each metric before and after the training, the deciding one first; then facts."""
    facts = {
        "step of the exported checkpoint": exported.step,
        "steps": result.step,
        "attempts": result.attempts,
        "minutes of training": f"{result.elapsed_s / 60:.1f}",
        "changed tensors": exported.changed,
        "difference of onnxruntime": f"{exported.parity:.2g}",
    }
    rows = metric_rows(exported, first)
    return rows + [{"what": name, "before": "", "after": str(value)} for name, value in facts.items()]


def metric_rows(exported: ExportedModel, first: str) -> list[dict[str, str]]:
    """Return a row of each metric before and after the training, that named `first` first; then those of the test."""
    # False sorts before True
    names = sorted(exported.after, key=lambda name: (name != first, name))
    rows = [
        {
            "what": name.removeprefix("evaluation/"),
            "before": _rounded(exported.before.get(name)),
            "after": _rounded(exported.after[name]),
        }
        for name in names
    ]
    return rows + [{"what": name, "before": "", "after": _rounded(value)} for name, value in exported.test.items()]


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
