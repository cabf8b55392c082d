"""Read what a report shows of a run, from its directory alone. What is absent or damaged is left out, and named."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from onward.flows.run_state.run_index import State
from onward.flows.run_state.run_status import ended_state, remarks_of
from onward.flows.run_state.runs import is_running
from onward.tasks.shown.class_tables import ClassTable
from onward.tasks.shown.object_tables import ObjectTable
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.diagnostics.difference import Difference
from onward.trainer.errors import OnwardError
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.export_folder import changes_in, samples_in
from onward.trainer.run.history import RunHistory, Series
from onward.trainer.run.outcomes.attempt_endings import AttemptEnding, endings
from onward.trainer.run.outcomes.refusals import Refusal, refusal_in
from onward.trainer.run.outcomes.run_ending import RunEnding, ending_of
from onward.trainer.run.recorded.sample_records import Samples
from onward.trainer.run.recorded.step_profile import StepProfile, read_profiles
from onward.trainer.run.records import (
    ExportedModel,
    MetricsSummary,
    Rehearsal,
    RunIdentity,
    RuntimeReport,
    TrainResult,
    record_if_written,
)
from onward.trainer.run.timing.time_account import TimeAccount, time_account

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")

NAMES = {
    "loss": ("train/loss",),
    "learning_rate": ("train/learning_rate", "optimizer/learning_rate"),
    "gradient_norm": ("train/gradient_norm", "optimizer/gradient_norm"),
    "samples_per_s": ("perf/samples_per_s", "train/samples_per_s"),
    "tokens_per_s": ("perf/tokens_per_s", "train/tokens_per_s"),
    "tflops": ("perf/tflops", "train/tflops"),
    "mfu": ("perf/mfu", "train/mfu"),
    "data_wait": ("perf/data_wait", "train/data_wait"),
}
"""What is drawn -> the metrics of the event log that it may be called; the first that the log has is taken."""
EVALUATION = "evaluation/"


@dataclass(frozen=True)
class RunFacts:
    """What a report shows of one run."""

    run: RunDir
    state: State
    identity: RunIdentity | None
    config: RunConfig | None
    history: RunHistory
    curves: Mapping[str, Series]
    """Metric of the event log -> its values."""
    attempts: Sequence[AttemptEnding]
    ending: RunEnding | None
    """How its newest flow ended; None while it runs, or if it was killed."""
    account: TimeAccount | None
    trained: TrainResult | None
    metrics: MetricsSummary | None
    exported: ExportedModel | None
    refusal: Refusal | None
    """Why its file was not exported."""
    rehearsal: Rehearsal | None
    runtime: RuntimeReport | None
    manifest: ShardManifest | None
    classes: Sequence[ClassTable]
    objects: Sequence[ObjectTable]
    samples: Samples | None
    changes: Difference | None
    profiles: Sequence[StepProfile]
    """Of the ranks, where the time of `monitor.profile_steps` went."""
    tokens_per_sample: float
    """Mean over the training data; 0 if its samples are no token sequences."""
    remarks: Sequence[str]
    """What was done to its records from outside."""
    left_out: Sequence[str]
    """What could not be read, and why."""

    @property
    def name(self) -> str:
        return self.identity.name if self.identity else self.run.root.name

    @property
    def short_id(self) -> str:
        return self.run.root.name[:8]

    def curve(self, what: str) -> Series | None:
        """Return a curve of `NAMES`; None if the log has none."""
        return next((self.curves[name] for name in NAMES[what] if name in self.curves), None)

    @property
    def evaluations(self) -> dict[str, Series]:
        """Return the metrics of the evaluations of the weights: name -> series."""
        return {name: curve for name, curve in self.curves.items() if name.startswith(EVALUATION)}

    def class_name(self, number: float | None) -> str:
        """Return the name of a class of the first loss; its number if it has none."""
        if number is None or not math.isfinite(number):
            return "nothing"
        rows = self.classes[0].classes if self.classes else ()
        # the names as the data has them; the table of classes has numbers where the data has none
        named = self._fitted_classes or tuple(row.name for row in rows)
        place = int(number)
        return named[place] if 0 <= place < len(named) else str(place)

    @property
    def _fitted_classes(self) -> tuple[str, ...]:
        losses = self.config.losses if self.config else ()
        columns = losses[0].columns if losses else ()
        if self.manifest is None or len(columns) != 1 or columns[0] not in self.manifest.fitted:
            return ()
        return self.manifest.fitted[columns[0]].classes


def read_facts(run: RunDir) -> RunFacts:
    """Return what a report shows of a run."""
    left_out: list[str] = []

    def read(path: Path, kind: type[R]) -> R | None:
        try:
            return record_if_written(path, kind)
        except (OnwardError, OSError) as error:
            left_out.append(str(error))
            return None

    def tables(pattern: str, kind: type[R]) -> list[R]:
        return [found for path in sorted(run.classes.glob(pattern)) if (found := read(path, kind))]

    # a damaged record takes away its part of the report, and nothing else
    def known(what: str, find: Callable[[], T], without: T) -> T:
        try:
            return find()
        # of a log that was damaged
        except (OnwardError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            left_out.append(f"{what}: {error}")
            return without

    config = known("the configuration", lambda: read_config(run, "given"), None)
    ending = ending_of(run)
    # inside of its flow, whose ending is written already, the lock is still held
    running = ending is None and known("the lock", lambda: is_running(run), False)
    state: State = "running" if running else known("the state", lambda: ended_state(run), "damaged")
    now_ms = time.time_ns() // 1_000_000 if running else None
    manifest = read(run.shards / "manifest.json", ShardManifest)
    history = known("the event log", lambda: RunHistory.of(run.events), None)
    curves = {name: history.curve(name) for name in history.values} if history else {}
    account = known("the account of the time", lambda: time_account(run, history, now_ms), None) if history else None
    return RunFacts(
        run=run,
        state=state,
        identity=read(run.identity, RunIdentity),
        config=config,
        history=history or RunHistory(run.events),
        curves=curves,
        attempts=endings(run),
        ending=ending,
        account=account,
        trained=read(run.train, TrainResult),
        metrics=read(run.metrics, MetricsSummary),
        exported=read(run.exported, ExportedModel),
        refusal=read(refusal_in(run.export), Refusal),
        rehearsal=read(run.rehearsal, Rehearsal),
        runtime=read(run.runtime, RuntimeReport),
        manifest=manifest,
        classes=tables("*classes.json", ClassTable),
        objects=tables("*objects.json", ObjectTable),
        samples=read(samples_in(run.export), Samples),
        changes=read(changes_in(run.export), Difference),
        profiles=known("the profile", lambda: read_profiles(run), []),
        tokens_per_sample=_tokens_per_sample(run, manifest, left_out, is_text=bool(config and config.data.text)),
        remarks=known("remarks on its records", lambda: remarks_of(run), ()),
        left_out=left_out,
    )


def _tokens_per_sample(run: RunDir, manifest: ShardManifest | None, left_out: list[str], *, is_text: bool) -> float:
    """Return the mean number of tokens of a training sample; 0 for data that is not tokenized text."""
    if manifest is None or not is_text:
        return 0.0
    # token ids are the integers that come as a sequence; a label is a single one
    integers = [column for column in manifest.columns if column.dtype.startswith("int")]
    sequences = [column for column in integers if len(column.shape) == 1]
    if not sequences:
        return 0.0
    first = sequences[0]
    # padded or packed to one length: each sample has it
    if not first.variable:
        return float(first.shape[0])
    try:
        return float(open_shards(run.shards, "train").lengths([first.name]).mean())
    except (OnwardError, OSError, ValueError) as error:
        left_out.append(f"the number of tokens: {error}")
        return 0.0


# -- settings


def settings_as_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return `section.key` -> value as text, of such a table."""
    return {key: _text(value) for key, value in settings.items()}


def _text(value: Any) -> str:
    if isinstance(value, dict):  # a table in a list, such as that of a metric
        return ", ".join(f"{name} = {_text(each)}" for name, each in value.items() if each not in (None, "", [], {}))
    if isinstance(value, list):
        # entries of a table have commas of their own
        return ("; " if any(isinstance(each, dict) for each in value) else ", ").join(map(_text, value))
    return "not set" if value is None else str(value)
