"""The functions behind the command line and `import onward`: each command calls one of them and prints its record.

Importing this module is quick and loads no torch, Prefect, MLflow or pydantic: each function imports what it needs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from onward.flows.configuration import (
    AnyPath,
    Config,
    Given,
    Overrides,
    changes_in,
    checked_config,
    config,
    origins,
    prefect_at_home,
)
from onward.flows.running.stop_signals import acknowledged_interrupt, exit_on_sigterm
from onward.trainer.errors import ConfigError, OnwardError, RuntimeUnavailable, say
from onward.trainer.extras import how_to_install

if TYPE_CHECKING:
    from onward.flows.live_view.view import LiveView
    from onward.flows.machine.machine_findings import MachineReport
    from onward.flows.planning.whole_run import RunPlan
    from onward.flows.run_state.run_status import RunOutcome, RunStatus
    from onward.flows.running.named_run import NamedRun
    from onward.trainer.config.run_config import RunConfig
    from onward.trainer.parallel.planning.cluster import Cluster

__all__ = ["checked_config", "config", "origins"]  # beside what is defined here


# -- runs


def run(
    config: Config,
    overrides: Overrides = (),
    /,
    *,
    profile: str = "",
    run_name: str = "",
    continue_run: bool = False,
    **sections: Any,
) -> RunOutcome:
    """Train a model: check everything, then run the flow in this process; return how it ended.

        onward.run("squeezenet-digits", train={"num_epochs": 2})
        onward.run("config.toml", {"optimizer.learning_rate": 3e-4, "launch.retries": 0})
        onward.run(["config.toml", "gpu.toml"], profile="long")
        onward.run({"model": {"path": "m.onnx"}, "data": {"source": "d.csv"}, "train": {"num_steps": 100}})

    Blocks until the trained file is exported, and prints its progress on stderr. Ctrl-C and SIGTERM stop the training
    after it has saved a checkpoint; only the main thread receives them, so this must be called from there.

    `run_name`: of this run, in place of the configuration's name with a number. `continue_run`: if there is a run of
    that name, here or in `checkpoint.store`, go on with it, and return its outcome if it is finished
    (flows/running/named_run.py). Raises
    ConfigError for settings, data or a model that cannot work, before anything is started; Stopped, TrainingFailed and
    the other errors of `onward.OnwardError` for a run that ended without an exported file.
    """
    require_flow("onward.run")
    given = partial(Given.of, config, overrides, sections, profile=profile)
    if not run_name:
        if continue_run:
            raise ConfigError("--continue needs the run that it means: --name NAME")
        return _begin(given)
    from onward.flows.running.from_store import fetch_named_run
    from onward.flows.running.named_run import limits_to_resume, named_run
    from onward.flows.submitting.slurm_script import requeued

    again = requeued(run_name) if continue_run else contextlib.nullcontext()
    with again, named_run(run_name, may_continue=continue_run) as named:
        found = named.to_resume
        if found is None and continue_run:  # another machine may have begun it
            wanted = given().load()
            found = fetch_named_run(wanted.checkpoint.store, run_name, wanted)
        if found is None:
            return _begin(given, named)
        limits = limits_to_resume(found, run_name, given().load())
        return resume(found.root.name, dict(limits))


def _begin(layers: Callable[[], Given], named: NamedRun | None = None) -> RunOutcome:
    from onward.flows.configuration import check_all_rows
    from onward.flows.live_view.view import live_view

    asked_ms = time.time_ns() // 1_000_000
    with live_view() as view:
        say("checking the configuration, the model and the data")
        try:
            given = layers()
            resolved, where = given.checked_here(), given.layered().origins
            if named and named.name == resolved.name:
                also = f"--name {named.name} is also the configuration's, by which commands find its newest run"
                raise ConfigError(f"{also}; choose another")
            with exit_on_sigterm():  # which says that only the main thread can be interrupted
                check_all_rows(resolved)
        except OnwardError as error:
            if error.exit_code == ConfigError.exit_code:
                error.add_note("no run has begun")  # the command line prints it
            raise
        return _train(resolved, view, named=named, origins=where, asked_ms=asked_ms)


def resume(
    run: str = "last",
    overrides: Overrides = (),
    /,
    *,
    from_start: bool = False,
    accept_config: bool = False,
    allow_code: bool = False,
) -> RunOutcome:
    """Continue a run that was killed, stopped or failed, from its newest complete checkpoint; return how it ended.

        onward.resume("last", {"stop.max_hours": 16})

    `run`: a name, the end of an id, a directory, or "last"; or STORE/RUN, of a run that comes from its store first.
    `overrides`: settings of [stop], with which a run goes on that had ended by them; all others stay what they were. A
    run that is finished is returned as it is, and nothing is started. `from_start`: begin again at step 0, if all of
    its checkpoints are damaged. `accept_config`: go on with a config.json that somebody has edited, which the report
    then says. `allow_code`: execute Python files from the store that are not on this machine. Raises ConfigError when
    there is no such run, it is running, its config.json was edited, or such Python was not permitted,
    CheckpointError when all of its checkpoints are damaged; else as `onward.run`, and from the main thread like it.
    """
    require_flow("onward.resume")
    from onward.flows.live_view.view import live_view
    from onward.flows.running.from_store import fetch_run, is_in_store
    from onward.flows.running.resuming import check_settings, checked_run, outcome_if_finished
    from onward.tasks.checks.file_check import check_files
    from onward.trainer.run.directory import read_config
    from onward.trainer.run.records import record_if_written
    from onward.trainer.run.remote.local_copies import LocalCopies

    asked_ms = time.time_ns() // 1_000_000
    changes = changes_in(overrides)
    if is_in_store(run):
        run = fetch_run(run, lambda _: changes, allow_code=allow_code).root.name
    found = checked_run(run, changes, from_start=from_start)
    if outcome := outcome_if_finished(found, changes):
        return outcome
    if not accept_config:
        check_settings(found, accept=False)
    known = record_if_written(found.remote, LocalCopies)
    given = Given(
        read_config(found, "given"), changes, lambda sections: check_files(sections, known, resumed=True).problems
    )
    with live_view() as view:
        resolved = given.checked_here(resumed=True)
        if accept_config:  # after the rules have passed it
            check_settings(found, accept=True)
        return _train(resolved, view, resume=found.root.name, asked_ms=asked_ms)


def _train(
    config: RunConfig,
    view: LiveView,
    *,
    resume: str = "",
    named: NamedRun | None = None,
    origins: Mapping[str, str] = MappingProxyType({}),
    asked_ms: int,
) -> RunOutcome:
    from onward.flows.run_state.flow_log import flow_log
    from onward.flows.run_state.run_status import outcome_of
    from onward.flows.run_state.runs import has_begun, how_to_continue
    from onward.flows.running.local_run import close_flow_run, create_flow_run, prefect_server, run_to_end
    from onward.infra.job.forks import fork_server
    from onward.infra.mlflow.mlflow_store import made_ahead
    from onward.tasks.checks.registered_models import store_of
    from onward.tasks.checks.rehearsing import begun_ahead
    from onward.trainer.config.flat_settings import flat_settings, origins_of
    from onward.trainer.run.outcomes.ending_kinds import would_end_again
    from onward.trainer.run.outcomes.storage import storage_explained
    from onward.trainer.run.recorded.setting_sources import record_origins

    grace_s = config.launch.stop_grace_s
    # the signal handler first: starting the server takes seconds, in which the process may be stopped
    rehearsal = contextlib.nullcontext() if resume else begun_ahead(config)
    with (
        storage_explained(),
        exit_on_sigterm(),
        acknowledged_interrupt(grace_s, say=view.say),
        _collection_paused() as paused,
        fork_server(),
        rehearsal,
        made_ahead(store_of(config.monitor)) as mlflow_import,
        prefect_server(),
    ):
        mlflow_import.result()  # what follows imports the packages that MLflow imports, too
        say("opening the flow in Prefect")
        run, flow_run = create_flow_run(config, resume=resume, named=named, asked_ms=asked_ms)
        paused.close()
        try:
            say(f"run {flow_run.name} in {run.root}")
            if not resume:
                record_origins(run, origins_of(config, origins), flat_settings(config))
            with flow_log(run):
                view.attach(run, flow_run.name)
                exported = run_to_end(flow_run, {**dict(config), "resume": resume})
        except BaseException as error:
            close_flow_run(flow_run, error)
            if isinstance(error, OnwardError) and error.exit_code == ConfigError.exit_code and not resume:
                error.add_note(f"{flow_run.name} has begun, and stays in {run.root} and in Prefect as failed")
            if has_begun(run) and not would_end_again(type(error).__name__):
                say(how_to_continue(run))
            raise
    return outcome_of(run, exported)


@contextlib.contextmanager
def _collection_paused() -> Iterator[contextlib.ExitStack]:
    """Look for no garbage until what is yielded is closed: what is imported stays, and looking takes a tenth of it."""
    with contextlib.ExitStack() as paused:
        if gc.isenabled():
            gc.disable()
            paused.callback(gc.enable)
        yield paused


def require_flow(what: str) -> None:
    """Raise RuntimeUnavailable when Prefect or MLflow is not installed: a compute node may have the trainer alone."""
    missing = [name for name in ("prefect", "mlflow", "sqlalchemy") if importlib.util.find_spec(name) is None]
    if missing:
        absent = f"{what} needs {', '.join(missing)}, not installed here: {how_to_install('flow')}"
        raise RuntimeUnavailable(f"{absent}. A compute node needs the trainer alone: `python -m onward.trainer`")


def status(run: str = "last") -> RunStatus:
    """Return the status of a run, read from its directory: state, step, last metrics, the error that ended it.

    `run`: a name, the end of an id, a directory, or "last". Of a run that Slurm starts the remarks say what Slurm knows
    of its job. Raises ConfigError when there is no such run.
    """
    from onward.flows.run_state.run_status import describe
    from onward.flows.run_state.runs import find_run
    from onward.flows.submitting.slurm_script import job_of, submitted

    try:
        found = find_run(run)
    except ConfigError:
        if job := submitted(run):
            raise ConfigError(f"{run} has not begun: {job}") from None
        raise
    status = describe(found)
    job = job_of(found, status.name)
    return status.model_copy(update={"remarks": (*status.remarks, str(job))}) if job else status


def runs() -> list[RunStatus]:
    """Return the status of every run under ONWARD_HOME, the newest first; of a damaged one, which file is damaged."""
    from onward.flows.run_state.run_index import listed_runs
    from onward.flows.run_state.run_status import RunStatus

    return [RunStatus.model_validate(status) for _, status in listed_runs()]


def examine(hostfile: AnyPath = "") -> MachineReport:
    """Return what an examination of this machine has found, and with `hostfile` of its hosts: MPI, disks, servers ...

    Starts ranks, and takes some seconds. Call from the main thread. Raises ConfigError when there is no
    such hostfile; what else is wrong is in the record.
    """
    from onward.infra.job.hosts import read_hostfile

    path = os.fspath(hostfile) and Path(hostfile).resolve()
    if path:
        if not path.is_file():
            raise ConfigError(f"there is no hostfile {path}")
        try:
            read_hostfile(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
    with prefect_at_home():
        from onward.flows.machine.examine import examine as examine_machine
    return examine_machine(str(path or ""))


def plan(
    config: Config,
    overrides: Overrides = (),
    /,
    *,
    profile: str = "",
    measure: int = 0,
    cluster: Cluster | None = None,
    progress: TextIO | None = None,
    **sections: Any,
) -> RunPlan:
    """Return how a run would be divided over its ranks, and what it takes: memory, messages, steps, time, disk.

        onward.plan("config.toml", measure=10).time.total_s

    Takes what `run` takes. With `parallel = "auto"` the sizes are chosen. `measure`: first train so many steps on the
    ranks, in a directory that is deleted, without Prefect and MLflow, and keep how long they took, also for later
    plans; the main thread must call it then. `cluster`: plan for these machines, not for this one. `progress`: a stream
    for lines that say how far `auto` is. Raises ConfigError or UnsupportedModel when no such division exists.
    """
    require_flow("onward.plan")
    with prefect_at_home():
        from onward.flows.planning.whole_run import plan_run
        from onward.tasks.checks.registered_models import with_registered
    from onward.trainer.config.flat_settings import origins_of
    from onward.trainer.data.reading.fetching import fetch
    from onward.trainer.parallel.planning.cluster import THIS_MACHINE

    given = Given.of(config, overrides, sections, profile=profile)
    if cluster and cluster.num_ranks:
        # sizes that are given and have another product are refused as they are for any run
        given.changes.extend((f"launch.num_ranks={cluster.num_ranks}", 'launch.hostfile=""'))
    resolved = given.load(given.check)
    copies, _ = fetch(resolved, with_registered(resolved))
    where = origins_of(resolved, given.layered().origins)
    if not measure:
        return plan_run(resolved, copies, origins=where, cluster=cluster or THIS_MACHINE, progress=progress)
    with exit_on_sigterm():
        return plan_run(resolved, copies, measured_steps=measure, origins=where)


def promote(name: str, version: str | int, *, alias: str = "champion", tracking_uri: str = "") -> str:
    """Let an alias name a version of a registered model, whatever it named before; return that one, or "".

    `version`: a number, or "latest". `tracking_uri`: the MLflow store; default as of a run. Raises ConfigError for a
    version that does not exist, RuntimeUnavailable when MLflow cannot be reached.
    """
    require_flow("onward.promote")
    from pydantic import ValidationError

    from onward.tasks.checks.registered_models import store_of
    from onward.tasks.promotion.promotion import promote_by_hand
    from onward.trainer.config.sections.results import MonitorConfig

    try:
        monitor = MonitorConfig(tracking_uri=tracking_uri)
    except ValidationError as error:
        raise ConfigError(finding["msg"].removeprefix("Value error, ") for finding in error.errors()) from None
    return promote_by_hand(store_of(monitor), name, str(version), alias)
