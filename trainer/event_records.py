"""The events of a run, a record for each kind: the lines of events.jsonl, which events.py writes and reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# RunHistory keeps these numbers in arrays
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]

LAPS = ("setup", "compile", "data_wait", "steps", "evaluation", "checkpoint")
"""What the time of an attempt is spent on, in the order of the event "times" (parallel/observing/step_clock.py)."""


class Event(BaseModel):
    """One line of a log."""

    model_config = ConfigDict(frozen=True)

    at_ms: Int64 = 0
    """Milliseconds since 1970; 0 until `EventWriter.emit` has written the event."""
    attempt: int = 0
    """The attempt that wrote the line, from 1; 0 until `EventWriter.emit` has written the event."""
    step: Int64
    """The last weight update before the event."""
    kind: str

    def sentence(self) -> str:
        """Return what train.log says of the event; "" for the events of every few steps."""
        return ""


class Started(Event):
    """An attempt begins at `step`."""

    kind: Literal["start"] = "start"
    num_steps: int = 0
    """Weight updates of the whole run."""
    num_samples: int = 0
    """Samples of the whole run; 0 if it is not known."""
    num_rows: int = 0
    """Samples of an epoch; 0 if it is not known."""
    num_parameters: int = 0
    compute: str = ""
    """The data type of matrix products, such as `fp32`."""
    flops_per_sample: float | None = None
    """Forward and backward, for a sample of mean length; None if they cannot be counted."""
    peak_flops_per_s: float | None = None
    """Of all ranks together; None if it is not known."""
    compile: str = ""
    """Why `graph.compile` "auto" became what it is, in a sentence; else ""."""
    resumed: str = ""
    """From which checkpoint the attempt goes on, and which steps are made again, in a sentence; "" for a new run."""
    damaged: Sequence[str] = ()
    """Newer checkpoints that were not used."""

    def sentence(self) -> str:
        begins = f"begins at step {self.step} of {self.num_steps}; {self.resumed or 'it is a new run'}"
        return f"{begins}; {self.compile}" if self.compile else begins


class Scalars(Event):
    """Metrics of the training.

    With them is what training has cost since the event before (parallel/observing/throughput.py):
    `train/samples_per_s`, `train/step_s`, `train/data_wait`, the share of the time in which ranks waited for samples,
    the mean over the ranks; and, if they are known, `train/tokens_per_s`, `train/tflops`, `train/mfu`,
    `train/memory_bytes`.
    """

    kind: Literal["scalars"] = "scalars"
    values: dict[str, float]
    """`train/NAME` -> value."""


class Evaluated(Event):
    """Metrics on the evaluation data."""

    kind: Literal["evaluation"] = "evaluation"
    values: dict[str, float]
    """`evaluation/NAME` -> value; of averaged weights `evaluation/average/NAME`."""

    def sentence(self) -> str:
        return f"step {self.step}: " + ", ".join(f"{key} {value:.4g}" for key, value in self.values.items())


class ConfusionMatrix(Event):
    """The confusion matrix of one loss, from the evaluation of the step."""

    kind: Literal["confusion"] = "confusion"
    loss: str
    """The output that the loss reads, if there are several losses; else ""."""
    counts: list[list[int]] | list[list[list[int]]]
    """Targets by [class][predicted class]; of yes-or-no labels by [label][is][predicted]."""


class Precision(BaseModel):
    """How precisely the objects of one class are found: average precisions as COCO measures them."""

    model_config = ConfigDict(frozen=True)

    objects: int
    """Without crowds and difficult objects."""
    map: float | None
    """Over intersections over unions of 0.50 to 0.95; None without objects."""
    map_50: float | None
    map_small: float | None
    """Of objects of less than 32 x 32 pixels; None without such objects."""
    map_medium: float | None
    map_large: float | None
    """Of objects of more than 96 x 96 pixels."""
    curve: Sequence[float]
    """The precision at an intersection over union of 0.50 and recalls of 0, 0.05, ..., 1; 0 beyond the greatest one."""
    found_as: Sequence[int] = ()
    """Objects by the class of what was found there, in the order of the list, and last those that were not found. Of
    detections with a score of 0.25 or more, and an intersection over union of 0.50 or more, whatever their class."""
    without_object: int = 0
    """Such detections of this class where there is no object."""


class ClassPrecision(Precision):
    """The precision of a class that is known by its number."""

    of_class: int


class ObjectPrecision(Event):
    """How precisely one loss finds the objects of each class, from the evaluation of the step."""

    kind: Literal["precision"] = "precision"
    loss: str
    """As in `ConfusionMatrix`."""
    classes: Sequence[ClassPrecision]


class Histogram(Event):
    """The distribution of the elements of a weight or of its gradient."""

    kind: Literal["histogram"] = "histogram"
    name: str
    """`weight/NAME` or `gradient/NAME`."""
    counts: Sequence[int]
    edges: Sequence[float]
    """The borders of the bins, one more than `counts`."""


class NonFiniteLoss(Event):
    """An evaluation loss became NaN or infinite."""

    kind: Literal["bad_values"] = "bad_values"
    text: str = ""
    """Which loss, and where in the model."""


class CheckpointSaved(Event):
    """A checkpoint is complete."""

    kind: Literal["checkpoint"] = "checkpoint"
    path: str = ""
    """The name of its directory."""

    def sentence(self) -> str:
        return f"step {self.step}: saved {self.path}"


class Times(Event):
    """The time that the attempt has taken so far."""

    kind: Literal["times"] = "times"
    seconds: dict[str, float]
    """A name of `LAPS` -> seconds."""


class Ended(Event):
    """An attempt ends by itself, with a checkpoint."""

    kind: Literal["end"] = "end"
    status: str = ""
    """`done` or `stopped`."""
    ended_early: str = ""
    """Why the run is done before its last step ([stop]); else ""."""

    def sentence(self) -> str:
        return f"step {self.step}: {self.status}"


class Usage(Event):
    """The usage of one node, in a file of its own (run/machine/node_usage.py), where `step` counts the lines."""

    kind: Literal["usage"] = "usage"
    node: str = ""
    values: dict[str, float]
    """Name -> value; the unit is in the name."""


_KINDS = (
    *(Started, Scalars, Evaluated, ConfusionMatrix, ObjectPrecision, Histogram, NonFiniteLoss, CheckpointSaved),
    *(Times, Ended, Usage),
)
RECORDS: Mapping[str, type[Event]] = {record.model_fields["kind"].default: record for record in _KINDS}
"""Kind -> record."""
