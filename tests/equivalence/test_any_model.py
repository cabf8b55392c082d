"""Any model, whoever exported it: the same function, the same gradients, trained whole, and given back exactly."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from onward.trainer.onnx_graph.surgery.strip_training import strip_training
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from tests.support import zoo
from tests.support.trained_models import model_with_weights, running_statistics

Case = tuple[str, str, bool]
Array = np.ndarray[Any, np.dtype[Any]]

EVERY: list[Case] = [
    (name, exporter, folded)
    for name, entry in zoo.ARCHITECTURES.items()
    for exporter in entry.exporters
    for folded in (True, False)
]


def quick_cases() -> list[Case]:
    """Each architecture once, and among them every exporter in both of its ways."""
    ways = [(exporter, folded) for exporter in zoo.EXPORTERS for folded in (False, True)]
    chosen = []
    for name, entry in zoo.ARCHITECTURES.items():
        way = next(way for way in ways if way[0] in entry.exporters)
        ways.append(ways.pop(ways.index(way)))
        chosen.append((name, *way))
    return chosen


QUICK = quick_cases()
CASES = [
    pytest.param(case, id="-".join((*case[:2], "folded" if case[2] else "plain")), marks=marks)
    for case in EVERY
    for marks in ([] if case in QUICK[::12] else [pytest.mark.slow],)
]
PLAIN = [case for case in CASES if not case.values[0][2]]


@dataclass(frozen=True)
class Subject:
    """One exported file, what onnxruntime is given of it, and the module it came from."""

    name: str
    model: onnx.ModelProto
    session: onnxruntime.InferenceSession
    names: dict[str, str]
    """Every name of a parameter of the module -> the one it has in the file (tied ones have one)."""

    def native(self) -> nn.Module:
        """The module with the file's running statistics: the older exporter moves them while it traces."""
        module = zoo.build(self.name)
        stored = {tensor.name: tensor for tensor in self.model.graph.initializer}
        for key, buffer in module.named_buffers():
            if "running_" in key and key in stored:
                buffer.copy_(torch.from_numpy(numpy_helper.to_array(stored[key]).copy()))
        return module


@functools.lru_cache(maxsize=4)
def subject(case: Case) -> Subject:
    name, exporter, folded = case
    model = zoo.export(name, exporter, folded=folded)
    stored = {tensor.name for tensor in model.graph.initializer}
    ties: dict[int, list[str]] = {}
    for key, parameter in zoo.build(name).named_parameters(remove_duplicate=False):
        ties.setdefault(id(parameter), []).append(key)
    names = {key: next((k for k in keys if k in stored), keys[0]) for keys in ties.values() for key in keys}
    return Subject(name, model, session(model), names)


def inference_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without dropout and the learning of statistics, which onnxruntime would do even when it predicts."""
    inference = onnx.ModelProto()
    inference.CopyFrom(model)
    strip_training(inference)
    return inference


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(inference_form(model).SerializeToString(), providers=["CPUExecutionProvider"])


def run(module: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The outputs; an imported module is given the inputs that its file kept."""
    names = module.input_names if isinstance(module, ImportedGraph) else list(inputs)
    result = module(*(inputs[name] for name in names))
    return result if isinstance(result, tuple) else (result,)


def judged(session: onnxruntime.InferenceSession, inputs: dict[str, Tensor], model: onnx.ModelProto) -> list[Array]:
    """By onnxruntime; by onnx.reference where onnxruntime does not broadcast the mask of Attention-23."""
    kept = [value.name for value in session.get_inputs()]
    feed = {name: inputs[name].numpy() for name in kept}
    try:
        return session.run(None, feed)
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail as error:
        if "inconsistent q_sequence_length" not in str(error):
            raise
        return list(ReferenceEvaluator(inference_form(model)).run(None, feed))


def assert_same(got: Tensor | Array, want: Tensor | Array, within: float = 2e-5) -> None:
    """Shapes, and values to a part of the largest of them, or to 1e-6."""
    a, b = (x.detach().numpy() if isinstance(x, Tensor) else x for x in (got, want))
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    assert np.abs(a - b).max(initial=0) <= within * np.abs(b).max(initial=0.05)


def loss_of(module: nn.Module, name: str, batch: int = 6) -> Tensor:
    """Distance from fixed random targets, over the outputs the architecture itself has."""
    results = run(module, zoo.feed(name, batch))[: len(zoo.ARCHITECTURES[name].outputs)]
    generator = torch.Generator().manual_seed(1)
    return sum((y - torch.randn(y.shape, generator=generator)).square().mean() for y in results)  # type: ignore[return-value]


def gradients(module: nn.Module, name: str) -> dict[str, Tensor]:
    """By name in the file where there is one."""
    module.zero_grad()
    loss_of(module, name).backward()
    names = module.onnx_names if isinstance(module, ImportedGraph) else {}
    found = {names.get(path, path): parameter.grad for path, parameter in module.named_parameters()}
    assert [path for path, gradient in found.items() if gradient is None] == []
    return {path: gradient.clone() for path, gradient in found.items() if gradient is not None}


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Each to a part of its largest value; what is nothing but rounding is measured by the largest of all."""
    rounding = 1e-6 * max(float(gradient.abs().max()) for gradient in want.values())
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(
            got[name],
            gradient,
            rtol=0,
            atol=1e-4 * float(gradient.abs().max()) + rounding,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("case", CASES)
def test_forward_equals_onnxruntime_and_the_module_that_was_exported(case: Case) -> None:
    tested = subject(case)
    module, native = to_module(tested.model).eval(), tested.native()
    for batch in (2, 3):
        inputs = zoo.feed(tested.name, batch)
        results = run(module, inputs)
        for got, want in zip(results, run(native, inputs), strict=False):  # what was added behind it is not its own
            assert_same(got, want)
        for got, want in zip(results, judged(tested.session, inputs, tested.model), strict=True):
            assert_same(got, want)


@pytest.mark.parametrize("case", PLAIN)
def test_what_is_trained_is_what_the_module_trains(case: Case) -> None:
    tested = subject(case)
    module = to_module(tested.model)
    trained = {module.onnx_names[path] for path, _ in module.named_parameters()}
    assert trained == set(tested.names.values())


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_gradients_equal_the_modules(case: Case, training: bool) -> None:
    """In training, too: statistics of the batch in BatchNormalization; dropout is switched off in both."""
    tested = subject(case)
    module, native = to_module(tested.model).train(training), tested.native().train(training)
    for part in (*module.modules(), *native.modules()):
        for setting in ("p", "ratio", "dropout"):
            if isinstance(getattr(part, setting, None), float):
                setattr(part, setting, 0.0)
    found = gradients(module, tested.name)
    assert_same_gradients(found, {tested.names[path]: g for path, g in gradients(native, tested.name).items()})
    for name, statistic in running_statistics(module).items():
        assert_same(statistic, native.get_buffer(name))


@pytest.mark.parametrize("case", CASES)
def test_fused_equals_unfused(case: Case) -> None:
    tested = subject(case)
    fused, plain = to_module(tested.model).eval(), to_module(tested.model, fuse=False).eval()
    inputs = zoo.feed(tested.name, 3)
    for got, want in zip(run(fused, inputs), run(plain, inputs), strict=True):
        assert_same(got, want)
    assert_same_gradients(gradients(fused, tested.name), gradients(plain, tested.name))


@pytest.mark.parametrize("case", CASES)
def test_zero_steps_give_the_same_bytes_and_twenty_a_better_model_that_onnxruntime_runs(case: Case) -> None:
    tested = subject(case)
    module = to_module(tested.model)
    assert model_with_weights(module, tested.model).SerializeToString() == tested.model.SerializeToString()

    before = {name: tensor.detach().clone() for name, tensor in named_weights(module).items()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    torch.manual_seed(0)
    losses = []
    module.train()
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(module, tested.name)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in module.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-3:]) < 0.98 * losses[0]
    assert [name for name, tensor in named_weights(module).items() if torch.equal(tensor, before[name])] == []

    written = model_with_weights(module.eval(), tested.model)
    runs = session(written)
    for batch in (2, 3):
        inputs = zoo.feed(tested.name, batch, seed=1)
        for got, want in zip(run(module, inputs), judged(runs, inputs, written), strict=True):
            assert_same(got, want)


def test_the_quick_cases_hold_every_architecture_and_every_way_to_export() -> None:
    assert {case[0] for case in QUICK} == set(zoo.ARCHITECTURES)
    assert {case[1:] for case in QUICK} == {
        (exporter, folded) for exporter in zoo.EXPORTERS for folded in (True, False)
    }
