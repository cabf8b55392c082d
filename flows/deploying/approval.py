"""Ask in Prefect whether a new version may take the place of the served one: export.promote_if.approval_hours."""

from __future__ import annotations

import logging

from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from pydantic import Field

from onward.tasks.promotion.promotion import promote
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import ExportedModel

log = logging.getLogger(__name__)

POLL_S = 3
"""Seconds between two looks for an answer."""


class Approval(RunInput):
    """The form of Prefect's Resume button."""

    promote: bool = Field(default=False, description="Let the new version take the place of the served one")


def ask_for_approval(run: RunDir, exported: ExportedModel) -> ExportedModel:
    """Pause the flow run until somebody answers, if the promotion waits for that; promote the file, or do not.

    Without an answer in time the version stays a candidate. Call from the flow: a task cannot pause its flow run.
    """
    decision = exported.promotion
    if decision is None or decision.status != "waiting":
        return exported
    hours = read_config(run).export.promote_if.approval_hours
    log.info(
        "version %s of %s may take the place of the served one: %s. Resume the flow run in Prefect to answer; without "
        "an answer in %g h it stays a candidate",
        *(exported.version, exported.registered_as, decision.reason, hours),
    )
    form = Approval.with_initial_data(description=f"{decision.reason}. Promote it?", promote=False)
    try:
        answer = pause_flow_run(wait_for_input=form, timeout=max(1, round(hours * 3600)), poll_interval=POLL_S)
        approved = answer is not None and answer.promote
    except FlowPauseTimeout:
        log.warning("nobody answered in %g h", hours)
        approved = False
    return promote(run, exported, approved=approved)
