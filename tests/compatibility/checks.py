"""Examine one file: does it import, does it train, does it come back?

imports      at batches 2 and 3 the module computes what onnxruntime computes with the file
trains       every gradient is finite, a gradient step lowers a loss, and the weights are those that the framework
             trains, as far as that is known
comes back   written without a step, the file has the same bytes; after the step only trained tensors differ, and
             onnxruntime computes with it what the module computes
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from onward.trainer.diagnostics.diff import compare
from onward.trainer.errors import OnwardError
from onward.trainer.onnx_graph.surgery.strip_training import strip_training
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.write_back import write_model
from tests.compatibility.entries import Entry, as_tensors
from tests.support.foreign_files import Array

PARITY = 2e-5
"""The largest difference of two outputs, as a part of the largest value or of 0.05 if that is smaller."""
BATCHES = (2, 3)
NOTHING = "no weight to train"
RATES = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)

Outcome = dict[str, Any]


class CheckFailed(Exception):
    """A check did not hold; the message is what the table says."""


def examine(entry: Entry) -> Outcome:
    """Return {check: "" or what is wrong}, and figures; a check after one that makes it impossible is "not reached"."""
    outcome: Outcome = {"imports": "", "trains": "", "back": "", "figures": {}}
    figures = outcome["figures"]
    reached = "imports"
    with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
        try:
            path = entry.path()
            module = to_module(load_model(path))
            figures["parity"] = max(_parity(module, path, entry.feed(batch, 0)) for batch in BATCHES)
            reached = "trains"
            written = Path(folder) / "model.onnx"
            write_model(module, load_model(path), path, written)
            same_bytes = written.read_bytes() == path.read_bytes()
            with _noted(outcome, "trains"):
                figures |= _roles(module, entry.truth(load_model(path)))
                figures |= _train(module, entry)
                _check_roles(figures)
            reached = "back"
            if not same_bytes:
                raise CheckFailed("written without a step, the file has other bytes")
            if outcome["trains"] == NOTHING:
                return outcome
            write_model(module, load_model(path), path, written)
            _check_changes(module, path, written)
            figures["parity_after"] = _parity(module, written, entry.feed(4, 1))
        except (CheckFailed, OnwardError, RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
            outcome[reached] = _said(error)
            for later in list(outcome)[list(outcome).index(reached) + 1 : 3]:
                outcome[later] = outcome[later] or "not reached"
    return outcome


@contextlib.contextmanager
def _noted(outcome: Outcome, check: str) -> Iterator[None]:
    """Note a failure of this check and go on."""
    try:
        yield
    except CheckFailed as error:
        outcome[check] = _said(error)


def _said(error: Exception) -> str:
    if isinstance(error, CheckFailed):
        return str(error)
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= 300 else text[:300] + " ..."


# -- imports


def _parity(module: ImportedGraph, path: Path, inputs: Mapping[str, Array]) -> float:
    """Return the largest relative difference of the module's outputs from those of the file."""
    with torch.no_grad():
        got = [value.numpy() for value in _outputs(module.eval(), as_tensors(inputs))]
    worst = 0.0
    for name, a, b in zip(module.output_names, got, _run_file(path, inputs), strict=True):
        if a.shape != b.shape:
            raise CheckFailed(f"output {name} has shape {list(a.shape)}, under onnxruntime {list(b.shape)}")
        if not np.isfinite(a[np.isfinite(b)]).all():
            raise CheckFailed(f"output {name} is not finite")
        finite = np.isfinite(b)
        difference = np.abs(a.astype(np.float64) - b)[finite].max(initial=0)
        worst = max(worst, float(difference / np.abs(b[finite]).max(initial=0.05)))
    if worst > PARITY:
        raise CheckFailed(f"differs from onnxruntime by {worst:.1e} of the largest output")
    return worst


def _outputs(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    assert isinstance(module, ImportedGraph)
    result = module(*(inputs[name] for name in module.input_names))
    return result if isinstance(result, tuple) else (result,)


def _run_file(path: Path, inputs: Mapping[str, Array]) -> list[Array]:
    """Run the inference form of the file, under onnx.reference where onnxruntime does not take Attention's mask."""
    model = onnx.load(path)
    strip_training(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {value.name: inputs[value.name] for value in session.get_inputs()}
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return list(session.run(None, feed))
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail as error:
        if "inconsistent q_sequence_length" not in str(error):
            raise CheckFailed(f"onnxruntime does not run the file: {' '.join(str(error).split())[:200]}") from None
        return list(ReferenceEvaluator(model).run(None, feed))


# -- trains


def _roles(module: ImportedGraph, truth: Mapping[str, bool]) -> Outcome:
    """Compare the tensors that are trained with the truth."""
    trained = {name for name, role in module.roles.items() if role.kind == "trained"}
    return {
        "weights": len(trained),
        "roles_known": len(truth),
        "missed": sorted(name for name, is_weight in truth.items() if is_weight and name not in trained),
        "wrongly_trained": sorted(name for name, is_weight in truth.items() if not is_weight and name in trained),
    }


def _check_roles(figures: Outcome) -> None:
    said = [
        f"{text} {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}"
        for text, names in (("frozen:", figures["missed"]), ("trained though a buffer:", figures["wrongly_trained"]))
        if names
    ]
    if said:
        raise CheckFailed("; ".join(said))


def _train(module: ImportedGraph, entry: Entry) -> Outcome:
    """Make one gradient step at the first rate that lowers the loss; return the losses."""
    weights = dict(module.named_parameters())
    if not weights:
        raise CheckFailed(NOTHING)
    module.train()
    for part in module.modules():
        for setting in ("p", "ratio", "dropout"):
            if isinstance(getattr(part, setting, None), float):
                setattr(part, setting, 0.0)
    inputs = as_tensors(entry.feed(6, 0))
    before = _loss(module, inputs)
    if not before.requires_grad:
        raise CheckFailed("no output depends on a weight")
    gradients = dict(zip(weights, torch.autograd.grad(before, list(weights.values()), allow_unused=True), strict=True))
    idle = [module.onnx_names[key] for key, gradient in gradients.items() if gradient is None or not gradient.any()]
    if wrong := [key for key, gradient in gradients.items() if gradient is not None and not gradient.isfinite().all()]:
        raise CheckFailed(f"the gradient of {module.onnx_names[wrong[0]]} is not finite")
    start = {key: weight.detach().clone() for key, weight in weights.items()}
    norm = max(float(sum(g.double().square().sum() for g in gradients.values() if g is not None)) ** 0.5, 1e-12)
    for rate in RATES:
        with torch.no_grad():
            for key, weight in weights.items():
                gradient = gradients[key]
                weight.copy_(start[key] if gradient is None else start[key] - rate / norm * gradient)
            after = _loss(module, inputs)
        if after < before:
            return {"loss": float(before), "loss_after": float(after), "without_gradient": idle}
    raise CheckFailed(f"no step along the gradient lowers the loss {float(before):.4g}")


def _loss(module: ImportedGraph, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the mean squared distance of all float outputs from fixed random targets."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(())
    for value in _outputs(module, inputs):
        if value.is_floating_point():
            finite = value.isfinite()
            distance = value - torch.randn(value.shape, generator=generator)
            total = total + distance[finite].square().mean()
    return total


# -- comes back


def _check_changes(module: ImportedGraph, path: Path, written: Path) -> None:
    """Check that nothing but trained tensors and running statistics differs."""
    difference = compare(path, written)
    allowed = {name for name, role in module.roles.items() if role.kind != "frozen"}
    others = [change.name for change in difference.tensors if change.name not in allowed]
    if others or difference.nodes:
        raise CheckFailed(f"differs in more than its weights: {', '.join(others[:4]) or 'nodes'}")
    if not difference.tensors:
        raise CheckFailed("a step changed no tensor of the file")
