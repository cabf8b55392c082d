"""Of the scheduled runs that wait, the newest stays; the page of a deployment's runs says why the others do not."""

from __future__ import annotations

import datetime
import uuid
from typing import Any

from prefect.client.schemas.objects import FlowRun

from onward.flows.running.cancellation import AUTO, reason, superseded

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def waiting(minutes: int, *, auto: bool = True, **parameters: Any) -> FlowRun:
    at = NOON + datetime.timedelta(minutes=minutes)
    tags = [AUTO] if auto else []
    return FlowRun(flow_id=uuid.uuid4(), expected_start_time=at, tags=tags, parameters=parameters)


def test_the_newest_of_the_runs_that_wait_stays_whatever_their_order() -> None:
    first, second, third = waiting(0), waiting(10), waiting(20)
    assert superseded([second, third, first]) == [(first, third), (second, third)]
    assert superseded([third]) == []
    assert superseded([]) == []


def test_runs_that_somebody_has_started_and_those_with_other_parameters_stay() -> None:
    by_hand, other, mine, newer = waiting(0, auto=False), waiting(1, name="b"), waiting(2), waiting(3)
    assert superseded([by_hand, other, mine, newer]) == [(mine, newer)]


def test_the_reason_names_the_run_that_starts_in_its_place() -> None:
    assert reason(waiting(20)).endswith("the run scheduled for 2026-01-01 12:20:00 UTC takes its place")
