"""Difference: what distinguishes two ONNX files, as a record that is read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from onward.trainer.run.records import Record


class TensorChange(Record):
    """One initializer, or tensor of a Constant node, that differs between the files."""

    name: str
    change: Literal["added", "removed", "another shape or type", "values"]
    before: str = ""
    """Type and shape, such as float32 [8, 3]."""
    after: str = ""
    changed: int = 0
    """Number of elements that differ."""
    relative: float | None = None
    """L2 norm of the change over the L2 norm before; None if that is 0."""
    greatest: float | None = None
    """The greatest absolute change of one element."""
    cosine: float | None = None
    """Cosine similarity of before and after; None if one of them is 0."""

    @property
    def is_weight(self) -> bool:
        """Whether it holds floating-point numbers; integers, such as shapes, follow from other changes."""
        return "float" in (self.before or self.after)


class NodeChange(Record):
    """One node that differs between the files."""

    node: str
    operator: str
    change: str


class Difference(Record):
    """All differences of file B from file A."""

    a: Path
    b: Path
    same_bytes: bool
    """The .onnx files and their external data are equal byte for byte."""
    model: tuple[str, ...]
    """Opsets, producer, metadata, functions."""
    interface: tuple[str, ...]
    """Inputs and outputs."""
    nodes: tuple[NodeChange, ...]
    """The differences that `stripped` does not explain."""
    tensors: tuple[TensorChange, ...]
    equal_tensors: int
    stripped: Mapping[str, int] = {}
    """Kind of node -> how many that only training needs A has and B lacks, or has in their inference form: what an
    export removes."""

    @property
    def same(self) -> bool:
        """Whether the content is the same, though perhaps serialized to other bytes."""
        has_other_frame = self.model or self.interface
        has_other_content = self.nodes or self.tensors or self.stripped
        return not (has_other_frame or has_other_content)
