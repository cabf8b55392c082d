"""No order in memory of an input, or of the gradient of a result, changes a gradient: torch's own are wrong in some.

torch 2.13 on the CPU: F.batch_norm where the batch or a length is 1, F.instance_norm everywhere but with one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.onnx_import.ops.batch_norm import BatchNorm
from onward.trainer.onnx_import.ops.norm import instance_norm

Operator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [batch, channels, ...], two weights [channels]) -> the result."""
CHANNELS = 4
PLANES = [(4, 4, 1, 6), (4, 4, 6, 1), (1, 4, 1, 6), (4, 4, 3, 2), (1, 4, 3, 2)]
SHAPES = [(4, 4, 6), *PLANES, (2, 4, 1, 3, 2)]
KERNEL = torch.linspace(-1, 1, 6 * CHANNELS * 3, dtype=torch.float64).view(6, CHANNELS, 1, 3)


def orders(x: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in every order of its axes in memory, and with other strides of its axes of length 1."""
    seen = set()
    for order in permutations(range(x.ndim)):
        placed = x.permute(order).contiguous().permute([order.index(axis) for axis in range(x.ndim)])
        for stride in (None, 1, 10**6):
            strides = [
                stride if stride and size == 1 else own for size, own in zip(x.shape, placed.stride(), strict=True)
            ]
            if tuple(strides) not in seen:
                seen.add(tuple(strides))
                yield placed.as_strided(x.shape, strides)


def normalise(training: bool) -> Operator:
    mean = torch.linspace(-1, 1, CHANNELS, dtype=torch.float64)

    def operator(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return BatchNorm(0.1, 1e-5).train(training)(x, scale, bias, mean.clone(), mean.square() + 0.5)

    return operator


OWN: dict[str, Operator] = {
    "BatchNormalization, training": normalise(True),
    "BatchNormalization, evaluation": normalise(False),
    "InstanceNormalization": lambda x, scale, bias: instance_norm(x, scale, bias, 1e-5),
}
OTHERS: dict[str, Operator] = {
    "GroupNormalization": lambda x, scale, bias: F.group_norm(x, 2, scale, bias),
    "LayerNormalization": lambda x, scale, bias: F.layer_norm(x.movedim(1, -1), (CHANNELS,), scale, bias).movedim(
        -1, 1
    ),
    "LRN": lambda x, scale, bias: F.local_response_norm(x, 3),
    "PRelu": lambda x, scale, bias: F.prelu(x, scale),
    "Softmax": lambda x, scale, bias: x.softmax(1),
    "MaxPool": lambda x, scale, bias: F.max_pool2d(x, (1, 2), stride=1, padding=(0, 1)),
    "AveragePool": lambda x, scale, bias: F.avg_pool2d(x, (1, 2), stride=1, padding=(0, 1)),
    "GlobalAveragePool": lambda x, scale, bias: F.adaptive_avg_pool2d(x, 1),
    "Resize, linear": lambda x, scale, bias: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "Resize, nearest": lambda x, scale, bias: F.interpolate(x, scale_factor=2.0),
    "Conv": lambda x, scale, bias: F.conv2d(x, KERNEL * scale.view(-1, 1, 1), padding=(0, 1)),
    "Conv, depthwise": lambda x, scale, bias: F.conv2d(
        x, KERNEL[0].unsqueeze(1) * scale.view(-1, 1, 1, 1), bias, padding=(0, 1), groups=CHANNELS
    ),
    "ConvTranspose": lambda x, scale, bias: F.conv_transpose2d(x, KERNEL.transpose(0, 1) * scale.view(-1, 1, 1, 1)),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *product(OWN, SHAPES),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product(OTHERS, PLANES)),
    ],
)
def test_gradients_are_the_same_in_every_order_in_memory(name: str, shape: tuple[int, ...]) -> None:
    operator = (OWN | OTHERS)[name]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    weights = [torch.rand(CHANNELS, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]

    def gradients(x: Tensor, gradient: Tensor) -> list[Tensor | None]:
        x = x.detach().requires_grad_()
        return list(torch.autograd.grad(operator(x, *weights), [x, *weights], gradient, allow_unused=True))

    result = operator(values, *weights)
    gradient = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    wanted = gradients(values, gradient)
    # of five axes there are thousands of pairs
    steps = (1, 1) if len(shape) < 5 else (7, 11)
    inputs, results = list(orders(values))[:: steps[0]], list(orders(gradient))[:: steps[1]]
    for x, each in product(inputs, results):
        for got, want in zip(gradients(x, each), wanted, strict=True):
            where = f"strides {x.stride()}, {each.stride()}"
            torch.testing.assert_close(got, want, msg=lambda text, where=where: f"{where}: {text}")


def test_the_gradient_of_the_first_order_is_that_of_the_formula() -> None:
    x = torch.randn(4, CHANNELS, 1, 6, dtype=torch.float64, requires_grad=True)
    weights = [torch.rand(CHANNELS, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for operator in OWN.values():
        assert torch.autograd.gradcheck(operator, (x, *weights))
