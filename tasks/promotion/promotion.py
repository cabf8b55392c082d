"""Decide whether an exported file takes the place of the served one: which version `export.alias` names.

    version 4 (new)  --compare with--> version 3, which the alias names    process `compare`, comparison.json
                                              |
                 better by export.promote_if? |  no -> version 4 gets the alias `candidate`
                                              v  yes
    under a lock: does the alias still name version 3?   no, another run promoted version 5 -> compare with version 5
                                              |  yes
                                              v
                                 the alias names version 4

The lock is held for that last question and answer alone. It is a file below ONWARD_HOME for the runs of one machine,
and a limit of one on the Prefect server for the runs of several.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import shutil
from collections.abc import Iterator

from prefect import runtime
from prefect.artifacts import create_markdown_artifact

from onward.infra.mlflow.mlflow_store import TrackingError, database_of
from onward.infra.mlflow.registry import RegisteredVersion, Registry
from onward.tasks.checks.subprocesses import run_module
from onward.tasks.shown.mlflow_tags import about_version
from onward.tasks.shown.prefect_events import emit
from onward.tasks.shown.prefect_server import prefect_answers
from onward.tasks.shown.task_logger import IN_RESULT
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.export_folder import comparison_in
from onward.trainer.run.records import Comparison, ExportedModel, Promotion, RunIdentity, read_record, write_record

log = logging.getLogger(__name__)

CANDIDATE = "candidate"
"""The alias of the newest version that was not promoted."""
LEASE_S = 60.0
"""Seconds after which the Prefect server frees the lock of a process that was killed."""


def promote(run: RunDir, exported: ExportedModel, *, approved: bool | None = None) -> ExportedModel:
    """Decide on the registered file of a run, move the alias if it is good enough, and record why.

    approved: the answer that `export.promote_if.approval_hours` waits for; None = nobody was asked yet. A decision is
    made once: a repeated call returns the record. Raises RuntimeUnavailable when MLflow cannot be reached.
    """
    config = read_config(run)
    identity = read_record(run.identity, RunIdentity)
    known = exported.promotion
    is_decided = known and known.status != "waiting"
    # it is decided that somebody has to agree, and nobody has answered yet
    is_unanswered = known and approved is None
    if not config.export.alias or is_decided or is_unanswered:
        return exported
    registry = Registry(identity.tracking_uri)
    try:
        version = registry.version(exported.registered_as, exported.version)
        decision = _decide(run, exported, version, registry, approved=approved)
        _show(run, registry, version, decision)
    except TrackingError as error:
        raise RuntimeUnavailable(
            f"{error}. The file is registered as version {exported.version} of {exported.registered_as}, and whether "
            f"{config.export.alias} moves to it is not decided: `onward resume` does that when MLflow is back"
        ) from error
    exported = exported.model_copy(update={"promotion": decision})
    write_record(run.exported, exported)
    log.info("version %s of %s: %s", version.version, version.name, decision.reason, extra=IN_RESULT)
    what = {"model": version.name, "version": version.version, "alias": decision.alias, "reason": decision.reason}
    emit("promotion", run, what | {"status": decision.status}, about=decision.status)
    return exported


def promote_by_hand(tracking_uri: str, name: str, version: str, alias: str) -> str:
    """Let an alias name a version, whatever it named before; return the version that it named, or "".

    Raises ConfigError for a version that does not exist, RuntimeUnavailable when MLflow cannot be reached.
    """
    registry = Registry(tracking_uri)
    try:
        # "latest" is resolved before the lock, so that the version that was asked for does not change while it waits
        new = registry.resolve(f"models:/{name}/{version}")
        assert new is not None
        with lock(name):
            former = registry.served(name, alias)
            registry.set_alias(new, alias)
        registry.remove_alias(new, CANDIDATE)
        return former.version if former else ""
    except TrackingError as error:
        raise (ConfigError if type(error) is TrackingError else RuntimeUnavailable)(str(error)) from error


def _decide(
    run: RunDir, exported: ExportedModel, new: RegisteredVersion, registry: Registry, *, approved: bool | None
) -> Promotion:
    config = read_config(run)
    asked = config.export.promote_if
    alias = config.export.alias
    answer = Promotion(alias=alias, status="candidate", reason="")
    comparison: Comparison | None = None
    # each turn judges against the version that is served now, until nobody has moved the alias between judging and
    # moving
    while True:
        served = registry.served(new.name, alias)
        if served and served.version == new.version:
            return answer.model_copy(update={"status": "served", "reason": f"it is the {alias} already"})
        # evaluating the served file takes a process and minutes, so it is repeated only for another version
        compared = comparison.version if comparison else None
        if asked.when == "better" and served and compared != served.version:
            comparison = _compare(run, served, registry)
        good, reason = judge(
            config.export,
            config.promote_metric,
            config.promote_is_greatest,
            comparison if served else None,
            served,
            exported,
        )
        answer = answer.model_copy(update={"reason": reason, "comparison": comparison if served else None})
        if not good:
            return answer
        # a first version takes nothing away from anybody, so nobody is asked
        if asked.approval_hours and served and approved is None:
            return answer.model_copy(update={"status": "waiting"})
        if approved is False:
            return answer.model_copy(update={"reason": f"{reason}; it was not approved"})
        with lock(new.name, one_machine=database_of(registry.tracking_uri) is not None):
            # with the lock held: what was judged is still what is served
            if registry.served(new.name, alias) == served:
                registry.set_alias(new, alias)
                return answer.model_copy(update={"status": "served"})
        log.info("another run has promoted a version of %s meanwhile: comparing with that one", new.name)


def judge(
    export: ExportConfig,
    metric: str,
    greatest_is_best: bool,
    comparison: Comparison | None,
    served: RegisteredVersion | None,
    exported: ExportedModel,
) -> tuple[bool, str]:
    """Return whether the new file may take the place of the served one, and the reason in one sentence.

    metric: the one that decides; greatest_is_best: whether a greater value of it is better.
    """
    asked = export.promote_if
    alias = export.alias
    # the cheap reasons first; a comparison exists only where the setting asks for one
    if asked.when == "never":
        return False, "export.promote_if is 'never'"
    if served is None:
        return _above_the_floor(export, metric, greatest_is_best, exported)
    before = f"{alias} version {served.version}"
    if comparison is None:
        return True, f"export.promote_if is 'always': it takes the place of {before}"
    by_hand = "`onward promote` moves the alias by hand"
    if comparison.differences:
        return False, f"its signature differs from that of {before}: {'; '.join(comparison.differences)}; {by_hand}"
    if comparison.refused:
        return False, f"{before} cannot be evaluated on these rows ({comparison.refused}); {by_hand}"
    name = comparison.metric
    gain = comparison.gain
    values = f"{name} {comparison.served[name]:.6g} -> {comparison.new[name]:.6g} beside {before}"
    if comparison.interval:
        low, high = comparison.interval
        # the lower end of the interval must pass, so that a gain by chance does not
        values += f", better by {gain:.3g} ({asked.confidence:.0%} interval {low:.3g} to {high:.3g})"
        gain = low
    # written with `not`, because every comparison with NaN is false
    if not gain > asked.margin:
        return False, f"{values}: not better" + (f" by more than {asked.margin:g}" if asked.margin else "")
    return True, values


def _above_the_floor(
    export: ExportConfig, name: str, greatest_is_best: bool, exported: ExportedModel
) -> tuple[bool, str]:
    """Return whether the first file of a name predicts better than what needs no model, and the reason.

    name: of the metric that decides.
    """
    first = f"it is the first {export.alias} of its name"
    if export.promote_if.when == "always" or export.promote_if.floor == "none":
        return True, first
    new = (exported.test if name.startswith("test/") else exported.after).get(name, math.nan)
    # with the sign a greater value is better for each metric
    sign = 1.0 if greatest_is_best else -1.0
    known = {what: metrics[name] for what, metrics in exported.baselines.items() if name in metrics}
    numbers = {what: value for what, value in known.items() if not math.isnan(value)}
    # written with `not`, because every comparison with NaN is false
    better = {what: value for what, value in numbers.items() if not sign * new > sign * value}
    if not better:
        beaten = ", ".join(f"{value:.6g} of {what}" for what, value in known.items())
        return True, f"{first}" + (f": {name} {new:.6g} is better than {beaten}" if beaten else "")
    # the best of them is the one to beat, and the message names that alone
    what, value = max(better.items(), key=lambda item: sign * item[1])
    return False, (
        f"it would be the first {export.alias} of its name, but {name} is {new:.6g}, and {what} alone has "
        f"{value:.6g}: it has learned nothing that is worth serving. Train longer or look at the data; to serve it all "
        "the same, set export.promote_if.floor = 'none', or `onward promote` moves the alias by hand"
    )


def _compare(run: RunDir, served: RegisteredVersion, registry: Registry) -> Comparison:
    """Evaluate the served file on the rows of this run, in a process of its own: onnxruntime may crash."""
    folder = run.export / "served"
    record = comparison_in(run.export)
    # the record of an earlier comparison would be taken for that of this one
    record.unlink(missing_ok=True)
    try:
        file = registry.download(served, folder)
        arguments = ("compare", str(run.root.absolute()), str(file), "--folder", str(run.export.absolute()))
        ending = run_module("onward.trainer", *arguments, folder=run.export, log=run.export / "compare.log")
        if ending or not record.exists():
            metric = read_config(run).promote_metric
            found = Comparison(metric=metric, refused=f"the comparing process {ending or 'left no record'}")
        else:
            found = read_record(record, Comparison)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = found.model_copy(update={"version": served.version})
    write_record(record, found)
    return found


@contextlib.contextmanager
def lock(name: str, *, one_machine: bool = False) -> Iterator[None]:
    """Keep all others from promoting a version of this model: see the top of the file.

    one_machine: whether the registry is a file, so that the lock of this machine is enough while the Prefect server
    does not answer. Raises RuntimeUnavailable where it is not.
    """
    # the name becomes a file name and a name in Prefect, which refuse some characters
    safe = "".join(letter if letter.isalnum() else "-" for letter in name)
    place = onward_home() / "promotions" / f"{safe}.lock"
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("w") as file, contextlib.ExitStack() as stack:
        # first the lock of this machine, then that of all machines: two runs here must not wait for each other in turn
        fcntl.flock(file, fcntl.LOCK_EX)
        known = bool(runtime.flow_run.get_id())  # else no server is known
        answers = known and prefect_answers()
        if known and not answers and not one_machine:
            raise RuntimeUnavailable(
                f"the Prefect server does not answer, without which another machine may promote a version of {name} at "
                "the same moment. The file is registered, and whether the alias moves to it is not decided: `onward "
                "resume` does that when the server is back"
            )
        if answers:
            from prefect.client.orchestration import get_client
            from prefect.concurrency.sync import concurrency

            limit = f"onward-promote-{safe}"
            with get_client(sync_client=True) as client:
                client.upsert_global_concurrency_limit_by_name(limit, 1)
            stack.enter_context(concurrency(limit, lease_duration=LEASE_S, strict=True))
        yield


# -- showing it


def _show(run: RunDir, registry: Registry, version: RegisteredVersion, decision: Promotion) -> None:
    """Write the decision and the comparison to the registry and to Prefect; set or remove the alias `candidate`."""
    text = f"{markdown(version, decision)}\n{about_version(run)}"
    tags = {"onward.promotion": decision.status, "onward.promotion_reason": decision.reason[:5000]}
    registry.describe(version, tags, text)
    if decision.status == "served":
        registry.remove_alias(version, CANDIDATE)
    # a setting may name this alias itself, and then only a decision moves it
    elif decision.alias != CANDIDATE:
        registry.set_alias(version, CANDIDATE)
    if runtime.flow_run.get_id() and prefect_answers():
        with contextlib.suppress(Exception):  # a missing artifact must not fail the run
            create_markdown_artifact(text, key="promotion", description=f"version {version.version} of {version.name}")


def markdown(version: RegisteredVersion, decision: Promotion) -> str:
    """Return the decision, and the metrics of both files in a table."""
    heading = {
        "served": f"took the alias {decision.alias}",
        "candidate": "stays a candidate",
        "waiting": "waits for approval",
    }
    lines = [f"**Version {version.version} of {version.name} {heading[decision.status]}**: {decision.reason}", ""]
    if found := decision.comparison:
        lines += [f"| | {decision.alias} (version {found.version}) | version {version.version} |", "|---|---|---|"]
        for name in sorted({*found.served, *found.new}):
            values = [each.get(name, math.nan) for each in (found.served, found.new)]
            shown = " | ".join("" if math.isnan(value) else f"{value:.6g}" for value in values)
            lines.append(f"| {'**' + name + '**' if name == found.metric else name} | {shown} |")
        lines += ["", *(f"- {difference}" for difference in found.differences)]
    return "\n".join(lines).rstrip() + "\n"
