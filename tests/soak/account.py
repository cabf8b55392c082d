"""The account of a soak: its records, and what in them is not right."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from onward.trainer.run.records import Record
from tests.soak.kinds import KINDS


class Fault(Record):
    """One injected fault, and what came of it. Seconds count from the moment of the injection."""

    number: int
    kind: str
    target: str
    round: int
    """Which run it hit, from 1."""
    command: int
    """Which command it hit, from 1."""
    at: float
    """Seconds since 1970."""
    attempt: int
    step: int
    ended: Literal["nothing", "attempt", "flow"] = "nothing"
    """What ended by it."""
    said: str = ""
    """The class that the attempt's record names; "" without a record."""
    detected_s: float | None = None
    """Until an ending was recorded, the next attempt began, or the command ended."""
    recovered_s: float | None = None
    """Until the run made a step again that is not repeated work of the attempt before, or was done."""
    lost: int = 0
    """Steps that were made again."""
    orphans: tuple[str, ...] = ()
    """Processes that were left 15 s after the flow had ended."""
    spent: bool = False
    """Whether no retry was left (launch.retries), since no checkpoint was saved after the faults before."""
    too_late: bool = False
    """Whether the attempt was done already when the fault hit it; then it need not have ended anything."""


class Command(Record):
    """One `onward run` or `onward resume`."""

    number: int
    words: tuple[str, ...]
    status: int | None
    """Exit status; negative for a signal."""
    began: float
    ended: float
    tracebacks: int
    """Of Python, in what it printed."""
    expected: tuple[str, ...]
    """The states of which Prefect has to show one."""
    state: str = ""
    """What Prefect shows; "" if the command has created no flow run."""
    log: str


class Result(Record):
    """What a run has left."""

    run_id: str
    weights: str = ""
    """SHA-256 over the weights and the optimizer state of the last checkpoint."""
    model: str = ""
    """SHA-256 of the exported file."""
    step: int = 0
    points: int = 0
    """Points in MLflow."""
    points_lost: int = 0
    """Points of the undisturbed run that are not in MLflow."""
    points_doubled: int = 0
    """Points with the same name and step."""
    steps_made: int = 0
    """Steps over all attempts, repeated ones counted again."""
    elapsed_s: float = 0.0


class Times(Record):
    """Median and 95th percentile of some seconds."""

    number: int
    median: float
    p95: float


class Account(Record):
    """The account of a soak: `account.json` in its home."""

    config: str
    seed: int
    mtbf_s: float
    undisturbed: Result
    rounds: tuple[Result, ...]
    faults: tuple[Fault, ...]
    commands: tuple[Command, ...]
    confusion: dict[str, dict[str, int]]
    """Class that was injected -> class that was said -> faults."""
    detection: Times | None
    recovery: Times | None
    lost: int
    """Steps that were made again, over all faults."""
    orphans: int
    problems: tuple[str, ...]
    """What is not right; () if the soak has passed."""


def make_account(
    *,
    config: str,
    seed: int,
    mtbf_s: float,
    undisturbed: Result,
    rounds: Sequence[Result],
    faults: Sequence[Fault],
    commands: Sequence[Command],
    problems: Iterable[str] = (),
) -> Account:
    """Return the account, with everything that is not right."""
    judged = [fault for fault in faults if KINDS[fault.kind].classes and not fault.too_late]
    confusion: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for fault in judged:
        confusion["/".join(KINDS[fault.kind].classes)][fault.said or "nothing"] += 1
    return Account(
        config=config,
        seed=seed,
        mtbf_s=mtbf_s,
        undisturbed=undisturbed,
        rounds=tuple(rounds),
        faults=tuple(faults),
        commands=tuple(commands),
        confusion={injected: dict(said) for injected, said in sorted(confusion.items())},
        detection=times(fault.detected_s for fault in faults if KINDS[fault.kind].ends != "nothing"),
        recovery=times(fault.recovered_s for fault in faults if KINDS[fault.kind].ends != "nothing"),
        lost=sum(fault.lost for fault in faults),
        orphans=sum(len(fault.orphans) for fault in faults),
        problems=(*problems, *wrong(undisturbed, rounds, faults, commands)),
    )


def times(found: Iterable[float | None]) -> Times | None:
    """Return median and 95th percentile (the least value that 95 % of them do not exceed); None without any."""
    seconds = sorted(value for value in found if value is not None)
    if not seconds:
        return None
    return Times(
        number=len(seconds),
        median=round(statistics.median(seconds), 2),
        p95=round(seconds[math.ceil(0.95 * len(seconds)) - 1], 2),
    )


def wrong(
    undisturbed: Result, rounds: Sequence[Result], faults: Sequence[Fault], commands: Sequence[Command]
) -> list[str]:
    """Return everything that is not right, one sentence each."""
    problems = []
    for number, result in enumerate(rounds, start=1):
        if result.weights != undisturbed.weights:
            problems.append(
                f"run {number}: the weights of step {result.step} are not those of the undisturbed run's step "
                f"{undisturbed.step}"
            )
        if result.model != undisturbed.model:
            problems.append(f"run {number}: the exported file is not that of the undisturbed run")
        if result.points_lost or result.points_doubled:
            problems.append(
                f"run {number}: {result.points_lost} points lost and {result.points_doubled} doubled in MLflow, of "
                f"{undisturbed.points}"
            )
    for fault in faults:
        problems += [f"fault {fault.number} ({fault.kind}): {problem}" for problem in wrong_fault(fault)]
    for command in commands:
        name = f"command {command.number} (onward {' '.join(command.words[:1])}, {command.log})"
        if command.tracebacks:
            problems.append(f"{name}: printed {command.tracebacks} tracebacks")
        if command.state and command.state not in command.expected:
            problems.append(f"{name}: Prefect shows {command.state}, not {' or '.join(command.expected)}")
    return problems


def wrong_fault(fault: Fault) -> list[str]:
    """Return what is not right about one fault."""
    kind, problems = KINDS[fault.kind], []
    if fault.recovered_s is None:
        problems.append("the run made no step after it")
    if kind.ends == "nothing" and fault.ended != "nothing":
        problems.append(f"it ended the {fault.ended}, and nothing should have ended ({fault.said or 'no class said'})")
    if kind.ends == "attempt" and fault.ended == "flow" and not fault.spent:
        problems.append("it ended the command, and another attempt should have followed")
    if kind.ends != "nothing" and fault.ended == "nothing" and not fault.too_late:
        problems.append(f"it ended nothing, and should have ended the {kind.ends}")
    if kind.classes and fault.said not in kind.classes and not fault.too_late:
        problems.append(f"the class said is {fault.said or 'none'}, not {' or '.join(kind.classes)}")
    if fault.orphans:
        problems.append(f"{len(fault.orphans)} processes were left after 15 s: {'; '.join(fault.orphans)}")
    return problems
