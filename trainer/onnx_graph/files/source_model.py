"""The ONNX file of a run as one process has read it: parsed once, and passed on to whoever needs the graph.

read ── source ──┬── training_signature (works on a copy)      inputs and outputs of what is trained
                 └── open_trainable (changes it in place)      the module, and the graph that is written back
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

from onward.trainer.onnx_graph.beyond_onnx import repeated_initializers
from onward.trainer.onnx_graph.files.index import locations
from onward.trainer.onnx_graph.files.mapped_model import read_mapped
from onward.trainer.onnx_graph.files.model_files import model_problems, read_model


@dataclass(frozen=True)
class SourceModel:
    """A parsed ONNX file. Its external data is not loaded."""

    path: Path
    proto: onnx.ModelProto
    """As the file has it, until `checked_model` takes it over: a second copy would double the memory of its weights."""
    is_mapped: bool
    """Whether large weights of the file itself stay there, as external data (mapped_model.py)."""

    @classmethod
    def read(cls, path: Path, *, by_parts: bool = False) -> SourceModel:
        """Read a file. by_parts: leave its large weights there if its kind allows. Raises as `read_model`."""
        light = read_mapped(path) if by_parts else None
        # what is wrong in a file is said by the reading of it as a whole
        if light is not None and not model_problems(light) and not repeated_initializers(light):
            return cls(path, light, is_mapped=True)
        return cls(path, read_model(path), is_mapped=False)

    @property
    def files(self) -> list[Path]:
        """Return the file and its external data files."""
        beside = (self.path.parent / name for name in locations(self.proto))
        # once each: where weights are mapped, the file is among those that hold weights
        return list(dict.fromkeys([self.path, *filter(Path.is_file, beside)]))
