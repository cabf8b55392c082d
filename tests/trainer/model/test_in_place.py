"""A ReLU in the memory of its operand: the same bits, and only where nothing else reads the operand."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from onward.trainer.model.in_place import relu_in_place
from onward.trainer.onnx_import.driver import to_module
from tests.support import graphs
from tests.support.graphs import feed


@pytest.mark.parametrize("name", ["tiny_conv_net", "tiny_resnet"])
def test_a_relu_that_overwrites_its_operand_changes_no_bit(name: str) -> None:
    model = getattr(graphs, name)()
    plain, in_place = to_module(model), to_module(model)
    relu_in_place(in_place)
    assert in_place.graph.find_nodes(op="call_function", target=torch.relu_)
    x = [torch.from_numpy(value) for value in feed(model, 4).values()]
    outputs = [module(*x) for module in (plain, in_place)]
    for found in outputs:
        found.square().sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(*outputs)
    for mine, theirs in zip(in_place.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None and theirs.grad is None) or torch.equal(mine.grad, theirs.grad)


def test_a_relu_overwrites_nothing_that_is_read_elsewhere_or_that_a_backward_pass_needs() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            read_twice = F.conv2d(x, w)
            needed = torch.sigmoid(x)  # its backward pass reads its result
            return torch.relu(read_twice), read_twice + 1, torch.relu(needed), torch.relu(x), torch.relu(x + 1)

    module = fx.symbolic_trace(Net())
    relu_in_place(module)
    changed = module.graph.find_nodes(op="call_function", target=torch.relu_)
    assert [node.args[0].target for node in changed] == [operator.add]
    x, w = torch.randn(2, 3, 4, 4, requires_grad=True), torch.randn(3, 3, 1, 1)
    sum(y.sum() for y in module(x, w)).backward()
