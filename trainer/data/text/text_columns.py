"""Match [data.text] with the inputs of the graph: which columns are read, and which are computed from them.

data       text "a good film"    label 1
                   |                 |
tokenizer      input_ids, ...        |          stored under the names of the graph's inputs
                   |                 |
graph          input_ids [B, L]   the loss
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections_text import TextConfig, TextRole
from onward.trainer.data.columns import TEXT, ColumnType
from onward.trainer.data.signature import Signature, TensorInfo

ROLES: tuple[TextRole, ...] = get_args(TextRole)


@dataclass(frozen=True)
class TextColumns:
    """What the tokenizer of a configuration reads and feeds."""

    config: TextConfig
    inputs: Mapping[TextRole, TensorInfo]
    """What is computed -> the graph's input that takes it. The column has the name of the input."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the columns of texts."""
        columns = self.config.columns
        return (columns,) if isinstance(columns, str) else columns

    @property
    def read(self) -> dict[str, ColumnType]:
        """Return the columns of the data that the tokenizer reads, with their types."""
        return dict.fromkeys(self.sources, ColumnType(TEXT))

    @property
    def computed(self) -> frozenset[str]:
        """Return the columns that the tokenizer computes."""
        return frozenset(info.name for info in self.inputs.values())

    @property
    def fixed_length(self) -> int:
        """Return the length that the graph's inputs declare; 0 if it is dynamic."""
        lengths = [info.shape[-1] for info in self.inputs.values() if info.shape]
        return next((length for length in lengths if length), 0)


def text_columns(config: RunConfig, signature: Signature) -> TextColumns | None:
    """Return what the tokenizer feeds; None without [data.text]. Inputs that no role names read columns of the data."""
    text = config.data.text
    if text is None:
        return None
    # an input that data.inputs names reads its column, also one that is called input_ids
    free = {info.name: info for info in signature.fed if info.name not in config.data.inputs}
    names = {role: text.inputs.get(role, role) for role in ROLES}
    return TextColumns(text, {role: free[name] for role, name in names.items() if name in free})


def input_problems(columns: TextColumns, config: RunConfig, signature: Signature) -> Iterator[str]:
    """Yield what is wrong with the inputs that the tokenizer is to feed."""
    known = [info.name for info in signature.fed]
    for role, name in columns.config.inputs.items():
        if name not in known:
            yield (
                f"data.text.inputs.{role} names {name!r}, which is not an input of the model; there is "
                + ", ".join(known)
            )
        elif name in config.data.inputs:
            yield f"data.text.inputs.{role} and data.inputs both feed {name!r}; remove it from one of them"
    if "input_ids" not in columns.inputs:
        yield (
            f"data.text has no input to feed: the model has no input 'input_ids', only {', '.join(known)}; name it: "
            f"data.text.inputs = {{ input_ids = {known[0]!r} }}"
        )
    for role, info in columns.inputs.items():
        shape = info.shape
        if info.dtype not in ("int32", "int64") and role != "attention_mask":
            yield f"input {info.name} takes {info.dtype}, but {role} are integers; is it another input?"
        if shape is not None and len(shape) != 2:
            yield (
                f"input {info.name} has {len(shape)} dimensions, but {role} are [batch, length]; name another input in "
                "data.text.inputs"
            )
    lengths = {info.name: info.shape[-1] for info in columns.inputs.values() if info.shape and info.shape[-1]}
    if len(set(lengths.values())) > 1:
        yield "the inputs that data.text feeds declare several lengths: " + ", ".join(
            f"{name} {length}" for name, length in lengths.items()
        )
    fixed, most = columns.fixed_length, columns.config.max_length
    if fixed and most > fixed:
        yield f"data.text.max_length {most} is above the length {fixed} of the model's inputs; set it to {fixed}"
