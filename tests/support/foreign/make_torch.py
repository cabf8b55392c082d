"""Write torch-legacy-*.onnx, torch-dynamo-*.onnx and torch-dynamo-folded-*.onnx: torch's two exporters.

    python -m venv env && env/bin/pip install torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2
    env/bin/python tests/support/foreign/make_torch.py

torch-dynamo is the export for training (optimize=False); torch-dynamo-folded and torch-legacy are the defaults, which
fold BatchNorm into convolutions and transpose weights.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import torch
import torch_models
from record import Changed, Written, write_files

PACKAGES = ("torch", "onnx", "onnxscript")


def legacy(name: str, path: Path, changed: Changed) -> None:
    """Write one of the modules with the TorchScript-based exporter."""
    module, inputs = torch_models.built(name, changed)
    names = list(torch_models.MODELS[name][1])
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            module,
            inputs,
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=names,
            output_names=["logits"],
            dynamic_axes={key: {0: "batch"} for key in (*names, "logits")},
        )


def dynamo(name: str, path: Path, changed: Changed, *, optimize: bool) -> None:
    """Write one of the modules with the exporter that is based on torch.export."""
    module, inputs = torch_models.built(name, changed)
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            optimize=optimize,
            input_names=list(torch_models.MODELS[name][1]),
            output_names=["logits"],
            dynamic_shapes=tuple({0: torch.export.Dim("batch")} for _ in inputs),
            verbose=False,
        )
    assert program is not None
    program.save(str(path), external_data=False)


if __name__ == "__main__":
    writers = {
        "torch-legacy": legacy,
        "torch-dynamo": functools.partial(dynamo, optimize=False),
        "torch-dynamo-folded": functools.partial(dynamo, optimize=True),
    }
    for exporter, writer in writers.items():
        files = [
            Written(name, architecture, inputs, functools.partial(writer, name))
            for name, (architecture, inputs, _) in torch_models.MODELS.items()
        ]
        write_files(exporter, PACKAGES, files)
