"""The flow `sweep-onnx`: the trials of a sweep, one after the other, each a subflow run of `train-onnx`.

    sweep.json -> trial 1 -> trial 2 -> ... -> trial N -> the best one again, to export, verify and register it
                  (train-onnx, without export)           (train-onnx, which trains nothing)

Every arrow is a record on disk (trainer/run/recorded/sweep_records.py). The flow may be killed anywhere and started
again: it goes on after the last trial that has ended.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, cast

from prefect import State, flow, tags
from prefect.flow_engine import run_flow
from prefect.states import Pending

from onward.flows.configuration import prefect_client
from onward.flows.run_state.flow_log import flow_log
from onward.flows.run_state.lease import renewed
from onward.flows.running.flow_guard import Ending, raise_stop
from onward.flows.running.local_run import CREATOR, mark_orphaned_runs_crashed
from onward.flows.sweeps import report
from onward.flows.sweeps.trials import begin, result_of, train
from onward.flows.train_onnx import end_mlflow_run_as
from onward.infra.job.process_identity import this_process
from onward.infra.mlflow.tracking import Tracker
from onward.infra.servers.service_state import try_lock
from onward.tasks.configure import prefect_url
from onward.trainer.errors import ConfigError, TrainingFailed
from onward.trainer.run.directory import RunDir
from onward.trainer.run.recorded.sweep_records import Sweep, SweepDir, SweepResult, best_of, describe_settings
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record, write_record

log = logging.getLogger(__name__)


@flow(
    name="sweep-onnx",
    flow_run_name="{name}",
    on_completion=[end_mlflow_run_as("FINISHED")],
    on_failure=[end_mlflow_run_as("FAILED")],
    on_crashed=[end_mlflow_run_as("KILLED")],
    on_cancellation=[end_mlflow_run_as("KILLED")],
)
def sweep_onnx(sweep: str, name: str = "sweep") -> SweepResult | State[Any]:
    """Train the trials of a sweep that have not ended yet, then export and register the best one.

    Args:
        sweep: The id of the sweep, whose directory has everything else.
        name: The sweep's name in Prefect.
    """
    folder = SweepDir.of(sweep)
    plan = read_record(folder.sweep, Sweep)
    with locked(folder), Ending(RunDir(folder.root)) as ending:
        identity = identify(folder, plan)
        tracker = Tracker(identity.tracking_uri, identity.mlflow_run_id)
        for number in range(1, plan.num_trials + 1):
            # an ended trial is returned as it is, so a resumed sweep passes over it
            trial = begin(folder, plan, number)
            if trial.status == "running":
                log.info("trial %d of %d: %s", number, plan.num_trials, describe_settings(trial.settings))
                state = train(trial, plan, identity)
                # a pruned trial is cancelled, too, but by the sweep itself
                if state is not None and state.is_cancelled() and not trial.run.pruned.exists():
                    raise_stop(trial.run, f"stopped; to continue: onward sweep --resume {sweep}")
                trial = result_of(trial, plan, state, first=folder.trials()[0])
                write_record(folder.trial(number), trial)
                log.info("trial %d: %s", number, report.ending(trial, plan))
            # also for trials that ended before: the sweep may have been killed before it recorded them
            report.record(tracker, trial, plan)
        trials = folder.trials()
        best = best_of(trials, greatest=plan.greatest)
        report.show(tracker, plan, trials, best)
        if best is None:
            first = trials[0]
            raise TrainingFailed(
                f"none of the {len(trials)} trials is complete; trial 1 ({describe_settings(first.settings)}) "
                f"{first.status}: {first.reason}"
            )
        # a sweep that was resumed behind its export has nothing left to do
        if not folder.result.exists():
            log.info("trial %d is the best; it is exported: %s", best.number, describe_settings(best.settings))
            # the trial was trained to its end, so this flow only exports its checkpoint
            state = train(best, plan, identity, exports=True)
            assert state is not None
            if state.is_cancelled():
                raise_stop(best.run, f"stopped; to continue: onward sweep --resume {sweep}")
            exported: ExportedModel = state.result()
            write_record(
                folder.result,
                SweepResult(
                    best=best.number,
                    model=exported.path,
                    sha256=exported.sha256,
                    registered=f"{exported.registered_as} version {exported.version}" if exported.registered_as else "",
                    promotion=f"{exported.promotion.status}: {exported.promotion.reason}" if exported.promotion else "",
                ),
            )
        return read_record(folder.result, SweepResult)
    return ending.cancelled  # Ctrl-C, SIGTERM, or Stopped


@contextlib.contextmanager
def locked(folder: SweepDir) -> Iterator[None]:
    """Hold the sweep's lock, a flock. Raises ConfigError when another process works on the sweep."""
    with folder.lock.open("ab") as file:
        if not try_lock(file):
            raise ConfigError(
                f"another process works on the sweep {folder.root.name}; wait for its end, or stop it first"
            )
        with renewed(file, folder.lock):
            yield


def identify(folder: SweepDir, plan: Sweep) -> RunIdentity:
    """Create or find the sweep's MLflow run; write `identity.json`. Raises RuntimeUnavailable without MLflow."""
    identity = RunIdentity(
        run_id=plan.sweep_id,
        name=plan.name,
        config_name=plan.config_name,
        created_at=plan.created_at,
        model_sha256="",
        prefect_url=prefect_url(),
        tracking_uri=plan.tracking_uri,
    )
    mlflow_run_id, url = report.start_run(identity, plan)
    identity = identity.model_copy(update={"mlflow_run_id": mlflow_run_id, "mlflow_url": url})
    write_record(folder.identity, identity)
    return identity


def run_sweep(folder: SweepDir) -> None:
    """Run the flow of a sweep in this process. Call from the main thread, which receives the signals.

    Raises Stopped when the sweep or one of its trials was cancelled, else the error that made it fail.
    """
    mark_orphaned_runs_crashed()
    name = read_record(folder.sweep, Sweep).name
    parameters = {"sweep": folder.root.name, "name": name}
    with tags("sweep"), flow_log(RunDir(folder.root)):
        with prefect_client() as client:
            flow_run = client.create_flow_run(
                sweep_onnx,
                name=name,
                parameters=parameters,
                tags=["sweep"],
                context={CREATOR: this_process()},
                state=Pending(),
            )
        final_state = run_flow(sweep_onnx, flow_run=flow_run, parameters=parameters, return_type="state")
    state = cast("State[object]", final_state)
    if state.is_cancelled():
        raise_stop(RunDir(folder.root), state.message or "")
    state.result(_sync=True)  # type: ignore[call-overload]
