"""Compressed activations: the exact ones leave every bit as it was, and the rounded ones nothing but the gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onward.trainer.config.sections.model import GraphConfig
from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.model.channels_last import use_channels_last
from onward.trainer.model.weight_casts import insert_casts
from onward.trainer.onnx_graph.examples.reference_models import build_squeezenet
from onward.trainer.onnx_graph.examples.small_models import build_resnet18, build_unet
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.planning.dry_run import MemoryCounter
from onward.trainer.parallel.recomputation import compressed_functions as stash_functions
from onward.trainer.parallel.recomputation.compressed_activations import Stash, compress
from onward.trainer.parallel.recomputation.compressed_functions import (
    RoundedInputs,
    pack_bits,
    restore,
    round_,
    unpack_bits,
)
from tests.support.graphs import MODELS, feed
from tests.support.mobile_models import mobile_net

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# -- one operator


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor as integers: 0 and -0 differ, and there is one NaN."""
    return (
        x.masked_fill(x.isnan(), math.nan)
        .contiguous()
        .view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    )


def result_and_gradient(call: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    result = call(x)
    (found,) = torch.autograd.grad(result, x, gradient)
    return [bits(result), bits(found)]


def assert_same_bits(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor) -> None:
    gradient = torch.randn(theirs(x).shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    for place, value in enumerate((math.inf, math.nan, -0.0)):
        gradient.view(-1)[place::31] = value
    for mine, wanted in zip(*(result_and_gradient(call, x, gradient) for call in (ours, theirs)), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5, 7), (2, 16, 4, 4)])
def test_bits_come_out_as_they_went_in(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.5
    packed = pack_bits(mask)
    assert (packed.dtype, packed.shape) == (torch.uint8, (-(-mask.numel() // 8),))
    assert torch.equal(unpack_bits(packed, mask.shape, mask.stride()) != 0, mask)


def images(dtype: torch.dtype, layout: str) -> Tensor:
    x = torch.randn(3, 6, 9, 11, generator=torch.Generator().manual_seed(0))
    x.view(-1)[::17], x.view(-1)[::19], x.view(-1)[::23] = 0.0, -0.0, math.nan
    if layout == "channels last":
        x = x.to(memory_format=torch.channels_last)
    return (x[:, 1:5] if layout == "narrow" else x).to(dtype)


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (stash_functions.relu, torch.relu),
    "leaky_relu": (lambda x: stash_functions.leaky_relu(x, 0.3), lambda x: F.leaky_relu(x, 0.3)),
    "clamp": (
        lambda x: stash_functions.clamp(x, -0.5, 0.7),
        lambda x: torch.clamp_max(torch.clamp_min(x, -0.5), 0.7),
    ),
    "bounds that cross": (
        lambda x: stash_functions.clamp(x, 0.7, -0.5),
        lambda x: torch.clamp_max(torch.clamp_min(x, 0.7), -0.5),
    ),
    "clamp_min": (lambda x: stash_functions.clamp(x, 0.0, None), lambda x: torch.clamp_min(x, 0.0)),
    "clamp_max": (lambda x: stash_functions.clamp(x, None, 0.0), lambda x: torch.clamp_max(x, 0.0)),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "narrow"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_has_the_bits_of_torch(name: str, dtype: torch.dtype, layout: str) -> None:
    assert_same_bits(*ACTIVATIONS[name], images(dtype, layout))


WINDOWS: dict[str, tuple[Any, ...]] = {
    "3 by 2": ([3, 2], [2, 1], [1, 0], [1, 1], False),
    "larger than the image with its pads": ([9, 11], [1, 1], [4, 5], [1, 1], False),
    "rounded up": ([3, 3], [2, 2], [0, 0], [1, 1], True),
    "dilated": ([2, 3], [1, 2], [1, 1], [3, 2], False),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "narrow"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WINDOWS)
def test_a_max_pool_has_the_bits_of_torch(name: str, dtype: torch.dtype, layout: str) -> None:
    *window, ceil = WINDOWS[name]
    assert_same_bits(
        lambda x: stash_functions.max_pool(x, *window, ceil_mode=ceil),
        lambda x: F.max_pool2d(x, *window, ceil_mode=ceil),
        images(dtype, layout),
    )


@pytest.mark.parametrize("pool", [F.max_pool1d, F.max_pool3d])
def test_a_max_pool_of_one_or_three_dimensions_has_the_bits_of_torch(pool: Any) -> None:
    rank = 1 if pool is F.max_pool1d else 3
    window = [[3, 2, 3][:rank], [2, 1, 2][:rank], [1, 1, 0][:rank], [1, 2, 1][:rank]]
    x = torch.randn(2, 3, *[7, 8, 9][:rank])
    assert_same_bits(lambda x: stash_functions.max_pool(x, *window), lambda x: pool(x, *window), x)


@pytest.mark.parametrize(("width", "bytes_each"), [(254, 1), (255, 2), (40_000, 4)])
def test_the_place_of_a_maximum_takes_more_bytes_in_wider_images(width: int, bytes_each: int) -> None:
    x = torch.randn(1, 1, 4, width, requires_grad=True)
    window = [[2, 2], [2, 2], [0, 0], [1, 1]]
    result = stash_functions.max_pool(x, *window)
    (kept,) = result.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert kept.element_size() == bytes_each
    assert_same_bits(lambda x: stash_functions.max_pool(x, *window), lambda x: F.max_pool2d(x, *window), x)


# -- whole graphs


def squeezenet() -> onnx.ModelProto:
    return build_squeezenet(num_classes=5, image_size=24, dropout=0.5)


GRAPHS: dict[str, Callable[[], onnx.ModelProto]] = {
    "squeezenet": squeezenet,
    "resnet18": lambda: build_resnet18(num_classes=5, image_size=16, width=8),
    "unet": lambda: build_unet(num_classes=5, image_size=16, width=8),
    "mobile_net": mobile_net,
}


def graph_of(
    build: Callable[[], onnx.ModelProto], stash: Stash | None, *, compute: str = "fp32", layout: str = "contiguous"
) -> ImportedGraph:
    module = to_module(build())
    insert_casts(module, PrecisionConfig.model_validate({"compute": compute}))
    use_channels_last(module, GraphConfig.model_validate({"memory_format": layout}), CPU, rows=4)
    if stash is not None:
        compress(module, stash)
    return module.train()


def inputs_of(model: onnx.ModelProto, rows: int = 4) -> list[Tensor]:
    return [torch.from_numpy(array) for array in feed(model, rows).values()]


def outputs_of(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    outputs = module(*inputs)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def learn(module: nn.Module, inputs: Sequence[Tensor], cast: torch.dtype | None = None) -> list[Tensor]:
    """Outputs, gradients and buffers after two forward passes and then their backward passes."""
    torch.manual_seed(3)
    losses, outputs = [], []
    for _ in range(2):
        with torch.autocast("cpu", dtype=cast) if cast else nullcontext():
            results = outputs_of(module, inputs)
        outputs += [result.detach() for result in results]
        losses.append(sum(result.double().square().sum() for result in results if result.requires_grad))
    for loss in losses:
        loss.backward()  # type: ignore[union-attr]
    gradients = [p.grad if p.grad is not None else torch.zeros(0) for p in module.parameters()]
    return [*outputs, *gradients, *module.buffers(), torch.rand(3)]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


QUICK = (("fp32", "contiguous"), ("bf16", "channels_last"))
CASES = [
    pytest.param(name, compute, layout, marks=() if (compute, layout) in QUICK else pytest.mark.slow)
    for name in GRAPHS
    for compute in ("fp32", "bf16", "fp64")
    for layout in ("contiguous", "channels_last")
]


@pytest.mark.parametrize(("name", "compute", "layout"), CASES)
def test_exact_compression_of_a_graph_changes_no_bit(name: str, compute: str, layout: str) -> None:
    build = GRAPHS[name]
    inputs = inputs_of(build())
    sides = []
    for stash in (None, "exact"):
        # fp64 is the type of the weights themselves, and not one that products compute in
        module = graph_of(build, stash, compute="bf16" if compute == "bf16" else "fp32", layout=layout)  # type: ignore[arg-type]
        given = inputs
        if compute == "fp64":
            module, given = module.double(), [x.double() for x in inputs]
        sides.append(learn(module, given, torch.bfloat16 if compute == "bf16" else None))
    assert equal(*sides)


@pytest.mark.slow
@pytest.mark.parametrize("stash", ["exact", "bf16", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_any_graph_is_compressed_without_another_result(name: str, stash: Stash) -> None:
    model = MODELS[name]()
    module, other = to_module(model).train(), to_module(model).train()
    compress(other, stash)
    one, two = (learn(each, inputs_of(model)) for each in (module, other))
    count = 2 * len(module.output_names)
    assert equal(one[:count], two[:count])
    assert stash != "exact" or equal(one, two)


def kept_bytes(module: nn.Module, inputs: Sequence[Tensor]) -> int:
    """What is alive after a forward pass, beyond weights and inputs."""
    counter = MemoryCounter()
    for tensor in (*module.parameters(), *module.buffers(), *inputs):
        counter.ignore(tensor)
    with counter:
        results = outputs_of(module, inputs)
        del results
        results = outputs_of(module, inputs)
        found = counter.current_bytes
    assert any(result.grad_fn is not None for result in results)
    return found


@pytest.mark.parametrize(
    ("name", "exact", "bf16", "fp8"),
    [("squeezenet", 0.36, 0.25, 0.2), ("mobile_net", 0.7, 0.45, 0.35), ("resnet18", 1.0, 0.55, 0.4)],
)
def test_a_convolution_network_keeps_less(name: str, exact: float, bf16: float, fp8: float) -> None:
    build = GRAPHS[name]
    inputs = inputs_of(build(), rows=16)
    plain = kept_bytes(graph_of(build, None), inputs)
    for stash, limit in (("exact", exact), ("bf16", bf16), ("fp8", fp8)):
        assert kept_bytes(graph_of(build, stash), inputs) <= limit * plain, stash  # type: ignore[arg-type]


# -- rounded


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The norm of the difference of all gradients over that of the gradients."""
    squares = [(a - b).double().square().sum() for a, b in zip(found, wanted, strict=True)]
    return float((sum(squares) / sum(b.double().square().sum() for b in wanted)) ** 0.5)


def gradients_of(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(3)
    results = outputs_of(module, inputs)
    sum(result.square().sum() for result in results).backward()
    return [result.detach() for result in results], [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize(("stash", "limit"), [("bf16", 0.01), ("fp8", 0.15)])
@pytest.mark.parametrize("name", GRAPHS)
def test_rounded_inputs_change_gradients_a_little_and_nothing_else(
    name: str, stash: Stash, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stash_functions, "SMALLEST", 1)
    build = GRAPHS[name]
    inputs = inputs_of(build())
    results, wanted = gradients_of(graph_of(build, None), inputs)
    rounded_results, found = gradients_of(graph_of(build, stash), inputs)
    assert equal(results, rounded_results)
    assert 1e-5 < error(found, wanted) < limit


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_no_weight_and_no_data_is_rounded(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 26 convolutions of SqueezeNet but the first read an activation, and 8 read one that another reads, too."""
    rounded: list[int] = []

    def noted(flat: Tensor, stash: str, version: int = 0) -> Any:
        rounded.append(flat.untyped_storage()._cdata)
        return round_(flat, stash, version)

    monkeypatch.setattr(stash_functions, "SMALLEST", 1)
    monkeypatch.setattr(stash_functions, "round_", noted)
    module = graph_of(squeezenet, "fp8", compute=compute)
    inputs = inputs_of(squeezenet())
    with torch.autocast("cpu", dtype=torch.bfloat16) if compute == "bf16" else nullcontext():
        module(*inputs)
    stored = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers(), *inputs)}
    assert not stored.intersection(rounded)
    # a tensor that two convolutions read is rounded once
    assert len(rounded) == 17


def test_what_already_has_two_bytes_is_not_rounded_to_two() -> None:
    module = graph_of(GRAPHS["resnet18"], "bf16")
    first = next(each for each in module.modules() if isinstance(each, RoundedInputs))
    x = torch.randn(256, 64, requires_grad=True) * 1
    assert first._is_worth_it(x)
    assert not first._is_worth_it(x.to(torch.bfloat16))
    # the other half would stay in memory
    assert not first._is_worth_it(x[:, :32])


def test_a_tensor_that_is_kept_anyway_is_not_rounded() -> None:
    """The result of a sigmoid stays for its own backward pass: a rounded copy of it would be one more."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(torch.sigmoid(torch.matmul(torch.neg(torch.matmul(x, self.weight)), self.weight)), x)

    graph = torch.fx.symbolic_trace(Gate())
    compress(graph, "bf16")
    # not the first operand of the last product
    assert [each.positions for each in graph.modules() if isinstance(each, RoundedInputs)] == [(0,), (0,), (1,)]


def test_fp8_is_restored_as_torch_restores_it() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = every[~every.float().isnan()]
    assert len(numbers) == 254
    kept = stash_functions.Rounded(numbers, torch.tensor(1.0), 0)
    for dtype in DTYPES:
        assert torch.equal(restore(kept, dtype), numbers.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 1e-4, 100.0])
def test_fp8_keeps_four_bits_of_every_size(dtype: torch.dtype, scale: float) -> None:
    x = (torch.randn(10_000) * scale).to(dtype)
    found = restore(round_(x, "fp8"), dtype)
    assert found.dtype == dtype
    # three bits behind the point, and a fixed step below 2^-6
    step = float(x.abs().max()) / 448 * 2**-9 + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert bool(((found - x).abs() <= x.abs().double() * 2**-4 * 1.01 + step).all())


def test_an_infinite_activation_is_not_hidden() -> None:
    assert not restore(round_(torch.tensor([1.0, math.inf]), "fp8"), torch.float32).isfinite().any()


# -- the same wherever it is used


@pytest.mark.parametrize("stash", ["exact", "bf16", "fp8"])
def test_a_backward_pass_in_two_parts_has_the_gradients_of_one(stash: Stash) -> None:
    module = graph_of(GRAPHS["resnet18"], stash)
    (x,) = inputs_of(build_resnet18(num_classes=5, image_size=16, width=8))
    x.requires_grad_()
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    loss = outputs_of(module, [x])[0].square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    rest = torch.autograd.grad(loss, weights)
    both = torch.autograd.grad(outputs_of(module, [x])[0].square().sum(), [x, *weights])
    assert equal([first, *rest], both)


@pytest.mark.parametrize("stash", ["exact", "fp8"])
def test_outside_training_results_are_those_without(stash: Stash) -> None:
    plain, compressed = graph_of(squeezenet, None).eval(), graph_of(squeezenet, stash).eval()
    inputs = inputs_of(squeezenet())
    with torch.no_grad():
        assert equal(outputs_of(plain, inputs), outputs_of(compressed, inputs))


def test_a_compressed_graph_can_be_copied() -> None:
    module = graph_of(GRAPHS["unet"], "fp8")
    inputs = inputs_of(build_unet(num_classes=5, image_size=16, width=8))
    other = copy.deepcopy(module)
    assert equal(learn(module, inputs), learn(other, inputs))
