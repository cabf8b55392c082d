"""Open a model in onnx.reference, which runs it slowly where onnxruntime does not."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onward.trainer.export.model_file import ModelFile


class TimedEvaluator(ReferenceEvaluator):
    """onnx.reference with a time at which it gives up, as a convolution of large images takes minutes in numpy."""

    ends_at = math.inf

    def _log(self, level: int, pattern: str, *words: Any) -> None:
        # called before each node
        if time.monotonic() > self.ends_at:
            raise TimeoutError("a pass takes too long")


def open_reference(model: ModelFile | onnx.ModelProto) -> TimedEvaluator:
    """Open the model in onnx.reference, with the operators that a file of `model.converters` has defined for it."""

    def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
        for below in kind.__subclasses__():
            yield below
            yield from subclasses(below)

    # abstract classes between OpRun and an operator have no domain
    operators = [kind for kind in subclasses(OpRun) if getattr(kind, "op_domain", "")]
    own = [operator for operator in operators if operator.__module__.split(".")[0] != "onnx"]
    return TimedEvaluator(str(model.path) if isinstance(model, ModelFile) else model, new_ops=own)
