"""Write the report when a flow of the run ends, however it ends, and send it to MLflow and Prefect.

    flow ends --> python -m onward.flows.run_reports RUN_DIR --> report.html --> artifact of the MLflow run
                  (a process with a time limit)              --> summary     --> artifact of the Prefect flow run

Everything of the run is done and recorded by then. A report that fails is one line of warning, and one that takes long
is given up.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext

from onward.flows.run_state.runs import identity_of
from onward.flows.running.flow_guard import SIGNALLED
from onward.infra.job.temporary_folders import owned_folder
from onward.infra.mlflow.tracking import Tracker
from onward.tasks.checks.subprocesses import run_module
from onward.tasks.shown.prefect_server import prefect_answers
from onward.trainer.errors import StorageUnavailable
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.run_ending import RunEnding, ending_of
from onward.trainer.run.timing.phases import enter_phase

log = logging.getLogger(__name__)

LIMIT_S = 120.0
STOPPED_LIMIT_S = 10.0
"""The same after Ctrl-C, SIGTERM or Cancel: a worker kills the flow 30 s after it has asked it to end."""


@contextlib.contextmanager
def reported(run: RunDir) -> Iterator[None]:
    """Write the report of a run behind the block, in which a flow of it runs and its ending is recorded."""
    try:
        yield
    finally:
        enter_phase(run, "end")
        try:
            ending = ending_of(run)
            # where a disk has ended the run, it takes no report either, and the error of the run says so
            storage = ending and ending.error == StorageUnavailable.__name__
            if not storage and run.config.exists() and read_config(run, "given").monitor.report:
                _report(run, ending)
        except StorageUnavailable as error:
            log.warning("no report of the run; `onward report %s` writes it: %s", run.root.name[:8], error)
        # the run has ended already: neither an error nor a second Ctrl-C may change how
        except (Exception, *SIGNALLED) as error:
            log.warning("no report of the run: %s: %s", type(error).__name__, error)


def _report(run: RunDir, ending: RunEnding | None) -> None:
    run.report.unlink(missing_ok=True)  # of an earlier flow of the run
    limit_s = STOPPED_LIMIT_S if ending and ending.status in ("cancelled", "suspended") else LIMIT_S
    with owned_folder("onward-report-") as folder:
        summary = folder / "summary.md"
        arguments = (str(run.root.absolute()), "--summary", str(summary))
        failed = run_module(
            "onward.flows.run_reports", *arguments, folder=folder, log=folder / "report.log", limit_s=limit_s
        )
        if failed:
            log.warning("no report of the run; `onward report %s` writes it: the process %s", run.root.name[:8], failed)
            return
        _send(run, summary.read_text())


def _send(run: RunDir, summary: str) -> None:
    """Upload the report to MLflow, and show its summary and place in Prefect."""
    identity = identity_of(run)
    place = f"`{run.report}`"
    if identity and identity.mlflow_run_id:
        try:
            Tracker(identity.tracking_uri, identity.mlflow_run_id).log_file(run.report)
        except Exception as error:
            log.warning("the report is at %s, and not in MLflow: %s", run.report, error)
        else:
            place += f", [in MLflow]({identity.mlflow_url}/artifacts/report.html)" if identity.mlflow_url else ""
    # a direct call of the flow's function has no flow run, and so no page
    if FlowRunContext.get() and prefect_answers():
        with contextlib.suppress(Exception):
            create_markdown_artifact(f"{summary}\n\nReport: {place}", key="report", description="The report of the run")
