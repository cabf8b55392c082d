"""Find out whether onnxruntime opens an ONNX file: what it rejects cannot be verified after training.

A large file is opened as a copy in which its weights are inputs, so that they are neither read nor kept in memory.
"""

from __future__ import annotations

import re
from pathlib import Path

import onnx

from onward.trainer.onnx_graph.files.index import SMALL, without_large_tensors
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.files.stored_protos import load_small_tensors
from onward.trainer.quantities import gib
from onward.trainer.run.records import Record

MAX_BYTES = 256 * 2**20
"""Files up to this size, external data included, are opened as they are."""

LACKS = re.compile(r"NOT_IMPLEMENTED|is not a registered function|IR version|ValidateOpsetForDomain|No opset import")
"""What onnxruntime says about a file that needs more than it has: an operator, a type or a version."""


class RuntimeCheck(Record):
    """Whether onnxruntime opens a file."""

    opens: bool
    valid: bool
    """False if onnxruntime finds an error in the file, and not an operator, a type or a version that it lacks."""
    how: str
    """What was opened."""
    error: str = ""


def check_runtime(model: onnx.ModelProto, path: Path, size_bytes: int) -> RuntimeCheck:
    """Open a file with onnxruntime's CPU provider, without optimisations, and return whether it does.

    model: the file's content, external data not loaded. size_bytes: of the file and its external data.
    """
    how = "the file, without optimisations"
    source: Path | onnx.ModelProto = path
    if size_bytes > MAX_BYTES:
        how = (
            f"a copy without optimisations in which tensors of more than {SMALL:,} elements are inputs, because the "
            f"file has {gib(size_bytes)}"
        )
        source = without_large_tensors(load_small_tensors(model, path.parent))
    try:
        open_session(source, optimise=False)
    except Exception as error:  # onnxruntime's errors have no common base class
        text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
        text = re.sub(r"^Load model from \S+ failed:", "", text)
        return RuntimeCheck(opens=False, valid=bool(LACKS.search(str(error))), how=how, error=" ".join(text.split()))
    return RuntimeCheck(opens=True, valid=True, how=how)
