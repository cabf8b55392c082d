"""Match [data.text] with the inputs of the graph: which columns are read, and which are computed from them.

data       text "a good film"    label 1
                   |                 |
tokenizer      input_ids, ...        |          stored under the names of the graph's inputs
                   |                 |
graph          input_ids [B, L]   the loss
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.section import as_tuple
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.text import PACKED, TextConfig, TextRole
from onward.trainer.data.schema.columns import TEXT, WORDS, ColumnType
from onward.trainer.data.schema.signature import Signature, TensorInfo

ROLES: tuple[TextRole, ...] = get_args(TextRole)
MAKES_LABELS = ("tokens", *PACKED)
"""The tasks whose labels have one entry for each token."""


@dataclass(frozen=True)
class TextColumns:
    """What the tokenizer of a configuration reads and feeds."""

    config: TextConfig
    inputs: Mapping[TextRole, TensorInfo]
    """What is computed -> the graph's input that takes it. The column has the name of the input."""
    label: str = ""
    """The column of the labels that are made from the text; empty if they are a column of the data."""
    ignore_index: int = -100
    """The label of tokens that are not predicted."""
    label_source: str = ""
    """Task `tokens`: the column of the data with the labels of words."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the columns of texts."""
        return as_tuple(self.config.columns)

    @property
    def read(self) -> dict[str, ColumnType]:
        """Return the columns of the data that the tokenizer reads, with their types."""
        if self.config.task == "tokens":
            return dict.fromkeys((*self.sources, self.label_source), ColumnType(WORDS))
        return dict.fromkeys(self.sources, ColumnType(TEXT))

    @property
    def computed(self) -> frozenset[str]:
        """Return the columns that the tokenizer computes."""
        return frozenset(info.name for info in self.inputs.values()) | frozenset({self.label} - {""})

    @property
    def packing(self) -> str:
        """Return how texts are packed: `none`, `joined` or `separate`."""
        task = self.config.task
        packing = self.config.packing
        if task not in PACKED:
            return "none"
        return packing if packing != "auto" else "joined" if task == "causal" else "none"

    @property
    def is_packed(self) -> bool:
        """Return whether samples are windows over several texts."""
        return self.packing != "none"

    @property
    def block_mask(self) -> TensorInfo | None:
        """Return the input [batch, ..., length, length] that keeps the texts of a window apart, or None."""
        return self.inputs.get("attention_mask") if self.packing == "separate" else None

    @property
    def fixed_length(self) -> int:
        """Return the length that the graph's inputs declare; 0 if it is dynamic."""
        lengths = [info.shape[-1] for info in self.inputs.values() if info.shape]
        return next((length for length in lengths if length), 0)


def text_columns(
    data: DataConfig, losses: Sequence[LossConfig], model: ModelConfig, signature: Signature
) -> TextColumns | None:
    """Return what the tokenizer feeds; None without [data.text]. Inputs that no role names read columns of the data."""
    text = data.text
    if text is None:
        return None
    # an input that data.inputs names reads its column, also one that is called input_ids
    free = {info.name: info for info in signature.fed if info.name not in data.inputs}
    names = {role: text.inputs.get(role, role) for role in ROLES}
    # an input "labels" is fed only for a graph that computes its own loss
    if text.task not in MAKES_LABELS or all(loss.takes_labels for loss in losses):
        del names["labels"]
    inputs = {role: free[name] for role, name in names.items() if name in free}
    loss = _labelled_loss(data, losses) if text.task in MAKES_LABELS else None
    label = str(loss.label) if loss else ""
    ignore_index = loss.ignored if loss else model.ignore_index
    label_source = str(data.label) if text.task == "tokens" else ""
    return TextColumns(text, inputs, label=label, ignore_index=ignore_index, label_source=label_source)


def _labelled_loss(data: DataConfig, losses: Sequence[LossConfig]) -> LossConfig | None:
    """Return the loss whose labels are made from the text: the cross-entropy with `data.label`."""
    if not isinstance(data.label, str):
        return None
    of_classes = [loss for loss in losses if loss.has_classes]
    return next((loss for loss in of_classes if loss.label == data.label), None)


def input_problems(
    columns: TextColumns, data: DataConfig, losses: Sequence[LossConfig], signature: Signature
) -> Iterator[str]:
    """Yield what is wrong with the inputs that the tokenizer is to feed."""
    known = [info.name for info in signature.fed]
    for role, name in columns.config.inputs.items():
        if name not in known:
            yield (
                f"data.text.inputs.{role} names {name!r}, which is not an input of the model; there is "
                + ", ".join(known)
            )
        elif name in data.inputs:
            yield f"data.text.inputs.{role} and data.inputs both feed {name!r}; remove it from one of them"
    if columns.config.task in MAKES_LABELS and not columns.label and "labels" not in columns.inputs:
        names = ", ".join(loss.name for loss in losses)
        yield (
            f"data.text.task {columns.config.task!r} makes labels, but nothing takes them: no loss of {names} is a "
            f"cross_entropy with the label {data.label!r}, and the model has no input 'labels', only "
            + ", ".join(known)
        )
    if "input_ids" not in columns.inputs:
        yield (
            f"data.text has no input to feed: the model has no input 'input_ids', only {', '.join(known)}; name it: "
            f"data.text.inputs = {{ input_ids = {known[0]!r} }}"
        )
    if columns.is_packed and (others := set(known) - {info.name for info in columns.inputs.values()}):
        yield (
            f"data.text.packing {columns.packing!r} makes samples of several texts, but input "
            f"{', '.join(sorted(others))} takes a column with one value for each text; set packing = 'none', or name "
            "the input in data.text.inputs"
        )
    for role, info in columns.inputs.items():
        shape = info.shape
        if info.dtype not in ("int32", "int64") and role != "attention_mask":
            yield f"input {info.name} takes {info.dtype}, but {role} are integers; is it another input?"
        # masks of windows have three or four axes, which `_mask_problems` checks
        if role == "attention_mask" and columns.packing == "separate":
            continue
        if shape is not None and len(shape) != 2:
            yield (
                f"input {info.name} has {len(shape)} dimensions, but {role} are [batch, length]; name another input in "
                "data.text.inputs"
            )
    if columns.packing == "separate":
        yield from _mask_problems(columns)
    last_dims = {info.name: info.shape[-1] for info in columns.inputs.values() if info.shape}
    lengths = {name: length for name, length in last_dims.items() if length}
    if len(set(lengths.values())) > 1:
        yield "the inputs that data.text feeds declare several lengths: " + ", ".join(
            f"{name} {length}" for name, length in lengths.items()
        )
    fixed = columns.fixed_length
    most = columns.config.max_length
    if fixed and most > fixed:
        yield f"data.text.max_length {most} is above the length {fixed} of the model's inputs; set it to {fixed}"


def _mask_problems(columns: TextColumns) -> Iterator[str]:
    """Yield why the texts of a window cannot be kept apart."""
    info = columns.block_mask
    others = "use packing = 'joined', where they do, or 'none'"
    if info is None:
        yield f"data.text.packing 'separate' needs an input of masks: without one, texts attend to each other; {others}"
    elif info.shape is None or len(info.shape) not in (3, 4):
        dims = "unknown" if info.shape is None else f"{len(info.shape)}"
        yield (
            "data.text.packing 'separate' needs masks [batch, length, length] or [batch, 1, length, length], but input "
            f"{info.name} has {dims} dimensions, which cannot say that the texts of a window do not attend to each "
            f"other; {others}"
        )
    elif info.dtype not in ("bool", "int32", "int64"):
        yield (
            f"data.text.packing 'separate': input {info.name} takes {info.dtype}, which may be 1 and 0, or 0 and a "
            f"large negative number that is added; masks of bool or of integers (1 = attended) are fed; {others}"
        )
