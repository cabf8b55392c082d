"""On the device every operator gives ONNX's results, and every kind of model trains as on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import onnx
import pytest
import torch
from torch import Tensor, nn

from onward.trainer.onnx_import.driver import to_module
from tests.equivalence.test_any_model import assert_same_gradients
from tests.gpu.device import DEVICE, REASON, REHEARSAL, available
from tests.support import suite, zoo
from tests.trainer.onnx_import.ops.test_conformance import BY_DESIGN, problems

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason=REASON)]

INITIALS = "bdw" if REHEARSAL else "abcdefghilmnopqrstuwx"
ZOO = ("siamese", "gpt2") if REHEARSAL else tuple(zoo.ARCHITECTURES)
NUM_STEPS = 3
Record = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def full_fp32() -> Iterator[None]:
    """Without TF32, which torch allows in convolutions by default."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


@pytest.mark.parametrize("initial", INITIALS)
def test_no_case_of_the_onnx_suite_is_wrong_on_the_device(initial: str, record_property: Record) -> None:
    judged = [case for case in suite.cases() if case.name[len("test_")] == initial and case.name not in BY_DESIGN]
    found = [problem for case in judged for problem in problems(case, device=DEVICE)]
    record_property("cases", len(judged))
    record_property("wrong", len(found))
    assert found == []


@pytest.mark.parametrize("name", ZOO)
def test_three_steps_of_a_model_equal_those_on_the_cpu(name: str, record_property: Record) -> None:
    """Losses to 1e-5; gradients to 1e-4 of their largest value, or to 1e-6 of the largest of all."""
    model = exported(name)
    wanted_losses, wanted = trained(model, name, torch.device("cpu"))
    losses, gradients = trained(model, name, DEVICE)
    difference = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, wanted_losses, strict=True))
    record_property("loss_difference", difference)
    largest = {key: float(gradient.abs().max()) for key, gradient in wanted.items()}
    floor = 1e-2 * max(largest.values())
    record_property(
        "gradient_difference",
        max(float((gradients[key] - wanted[key]).abs().max()) / max(largest[key], floor) for key in wanted),
    )
    assert difference <= 1e-5
    assert_same_gradients(gradients, wanted)


def exported(name: str) -> onnx.ModelProto:
    """A model of the zoo as the newer exporter writes it; in a rehearsal by the older one, which is quicker."""
    wanted = "legacy-17" if REHEARSAL else "dynamo-20"
    exporters = zoo.ARCHITECTURES[name].exporters
    return zoo.export(name, wanted if wanted in exporters else exporters[0], folded=False)


def trained(model: onnx.ModelProto, name: str, device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of three steps of SGD on this device, and the gradients of the first."""
    module = to_module(model).train().to(device)
    without_dropout(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    losses, gradients = [], dict[str, Tensor]()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(module, name, device)
        loss.backward()
        if not losses:
            gradients = {path: p.grad.cpu().clone() for path, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


def without_dropout(module: nn.Module) -> None:
    """The masks of two devices differ."""
    for part in module.modules():
        for setting in ("p", "ratio", "dropout"):
            if isinstance(getattr(part, setting, None), float):
                setattr(part, setting, 0.0)


def loss_of(module: nn.Module, name: str, device: torch.device) -> Tensor:
    """The distance of the outputs from targets that are the same on every device."""
    inputs = zoo.feed(name, 6)
    results = module(*(inputs[key].to(device) for key in module.input_names))  # type: ignore[union-attr]
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    terms = []
    for result in results[: len(zoo.ARCHITECTURES[name].outputs)]:
        assert result.device.type == device.type
        terms.append((result - torch.randn(result.shape, generator=generator).to(device)).square().mean())
    return torch.stack(terms).sum()


def test_the_operators_without_a_deterministic_implementation_are_listed(
    record_property: Record,
) -> None:
    """Not a proof: what torch says of one forward and backward pass of every model, model by model."""
    found: dict[str, list[str]] = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for name in ZOO:
            module = to_module(exported(name)).train().to(DEVICE)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss_of(module, name, DEVICE).backward()
            said = {str(each.message) for each in caught if "deterministic" in str(each.message)}
            if operators := sorted(sentence.split(" does not have")[0].split()[-1] for sentence in said):
                found[name] = operators
    finally:
        torch.use_deterministic_algorithms(False)
    record_property("models", len(ZOO))
    record_property("without", found)
