"""How long a step takes: measured, from the event log of a training, and what decides whether it holds for another run.

    ONWARD_HOME/calibrations/KEY.json     Pace, measured by `onward plan --measure`

KEY is a digest of the model's structure, of the settings that decide the time of a step, and of the machine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.trainer.config.run_config import RunConfig
from onward.trainer.run.directory import onward_home
from onward.trainer.run.history import RunHistory, Series
from onward.trainer.run.records import Record

WITHOUT_TIME: Mapping[str, frozenset[str]] = {
    "model": frozenset({"path", "accept"}),
    "data": frozenset(
        {"source", "sources", "evaluation_source", "test_source", "evaluation_rows", "evaluation_fraction", "bad_rows"}
        | {"split"}
    ),
    "parallel": frozenset({"sizes"}),
    "train": frozenset(
        {"num_steps", "num_epochs", "seed", "clip_norm", "skip_steps", "on_non_finite", "evaluation_period"}
        | {"log_period"}
    ),
    "launch": frozenset(
        {"num_ranks", "launcher", "rehearsal", "retries", "host_wait_s", "on_out_of_memory", "on_host_lost"}
        | {"start_timeout_s", "heartbeat_timeout_s", "stop_grace_s"}
    ),
    "monitor": frozenset({"experiment", "tracking_uri", "report_to", "report"}),
}
"""Section -> its settings that do not change the time of a step. A new setting counts until it is listed here."""
MEASURED = ("train/step_s", "train/data_wait")
"""Metrics of which a pace is made."""
NO_SECTIONS = frozenset({"name", "schedule", "checkpoint", "stop", "export"})
"""Sections of which nothing does."""


class Pace(Record):
    """How long the parts of a training took."""

    step_s: float
    """Seconds of a step: the median over the steps after the first ones."""
    steps: int
    """How many steps were measured."""
    samples_per_s: float
    data_wait: float = 0.0
    """The share of the time in which ranks waited for samples."""
    setup_s: float = 0.0
    """From the first line of the training loop until the first evaluation."""
    compile_s: float = 0.0
    evaluation_s: float = 0.0
    """Of the last evaluation; 0 = none was measured."""
    evaluation_rows: int = 0
    """The rows of that evaluation; 0 = not known."""
    checkpoint_s: float = 0.0
    """How long the training waited for a checkpoint, the mean."""
    measured_at: str = ""
    """ISO 8601, UTC."""
    host: str = ""
    data: str = ""
    """The data source."""
    load: float = 0.0
    """Processes that waited for the cores of this host before the measurement (its load average of a minute)."""
    run: str = ""
    """The name of the run that was measured; "" = `onward plan --measure`."""


def settings_of_pace(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide how long a step takes."""
    found = {}
    for name, section in config.model_dump(mode="json").items():
        if name in NO_SECTIONS:
            continue
        found[name] = section
        if isinstance(section, dict):
            without = WITHOUT_TIME.get(name, frozenset())
            kept = {key: value for key, value in section.items() if key not in without}
            found[name] = kept or section
    # rates, betas and decays are only numbers in the same computation
    for name in ("optimizer", "average"):
        found[name] = {key: each for key, each in found[name].items() if not isinstance(each, float)}
    if config.recompute.mode == "none" or config.recompute.compresses:
        # when units are recomputed, their number depends on the memory
        found["parallel"].pop("memory_gib", None)
    return found


def key_of(structure: str, settings: Mapping[str, Any], machine: str) -> str:
    """Return the key of a calibration.

    structure: the digest of the model's. settings: `settings_of_pace`. machine: `machine_text`.
    """
    content = [structure, settings, machine]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def calibration_file(key: str) -> Path:
    return onward_home() / "calibrations" / f"{key}.json"


def pace_of(history: RunHistory, *, batch: int, first_steps: int = 1) -> Pace | None:
    """Return the pace of the newest attempt of a run; None without a measured step.

    history: with the series of `MEASURED`. batch: samples of a step. first_steps: how many of its first steps are left
    out, as far as others were measured: they allocate memory, compile kernels and fill caches.
    """
    attempt = history.newest
    # step -> value: a step that was logged twice counts once
    measured, waits = (dict(attempt.series.get(name, Series()).points()) for name in MEASURED)
    if not measured:
        return None
    begin = attempt.start.step if attempt.start else 0
    steps = list(measured)
    # a line of the log covers the steps since the line before
    before = dict(zip(steps, [begin, *steps], strict=False))
    later = [step for step in steps if before[step] >= begin + first_steps]
    kept = later or steps[-1:]
    step_s = statistics.median(measured[step] for step in kept)
    evaluated = [lap.seconds["evaluation"] for lap in attempt.laps]
    # laps are sums, so an evaluation is the difference of two neighbours
    evaluations_s = [now - earlier for earlier, now in itertools.pairwise([0.0, *evaluated]) if now != earlier]
    saved = [event for event in history.checkpoints if event.attempt == attempt.number]
    return Pace(
        step_s=step_s,
        steps=kept[-1] - before[kept[0]],
        samples_per_s=batch / step_s,
        data_wait=statistics.median(waits.get(step, 0.0) for step in kept),
        setup_s=attempt.seconds.get("setup", 0.0),
        compile_s=attempt.seconds.get("compile", 0.0),
        evaluation_s=evaluations_s[-1] if evaluations_s else 0.0,
        checkpoint_s=attempt.seconds.get("checkpoint", 0.0) / max(1, len(saved)),
    )
