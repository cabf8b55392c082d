"""Open an ONNX model in onnxruntime, on the CPU."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime


def open_session(
    model: Path | onnx.ModelProto, *, optimise: bool = True, save: Path | None = None
) -> onnxruntime.InferenceSession:
    """Open a session of onnxruntime's CPU provider. Its errors, which have no common base class, are raised only.

    save: also write the graph that the session runs there, optimised for any machine.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is raised is not printed as well
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    if save:  # levels above EXTENDED use memory layouts of this machine's processor
        options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(save)
    content = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
