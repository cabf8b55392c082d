"""The record of the file that `quantize.aware` makes of a float model."""

from __future__ import annotations

from onward.trainer.run.records import Record


class Quantized(Record):
    """A float model into which `quantize.aware` has inserted QuantizeLinear and DequantizeLinear."""

    original_sha256: str
    """SHA-256 of the float file."""
    sha256: str
    """SHA-256 of the file with these nodes, which the run trains."""
    nodes: int
    """Number of QuantizeLinear nodes."""
    kernels: dict[str, int]
    """The operators on integers that onnxruntime runs for it: operator -> number of nodes."""
