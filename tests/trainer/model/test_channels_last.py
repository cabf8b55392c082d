"""Weights that are stored in channels-last format: the same bits, and other readers keep the order of the file."""

from __future__ import annotations

import torch

from onward.trainer.config.sections.model import GraphConfig
from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.model.channels_last import use_channels_last
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.optim.optimizers import build_optimizer
from tests.support import graphs
from tests.support.graphs import feed

CPU = torch.device("cpu")


def test_parameters_that_only_convolutions_read_are_stored_channels_last_and_train_with_the_same_bits() -> None:
    model = graphs.tiny_resnet()
    x, results = [torch.from_numpy(value) for value in feed(model, 4).values()], []
    for memory_format in ("channels_last", "fastest"):
        module = to_module(model)
        use_channels_last(module, GraphConfig(memory_format=memory_format), CPU, rows=64)  # type: ignore[arg-type]
        kernels = [weight for weight in module.parameters() if weight.ndim == 4 and weight[0, 0].numel() > 1]
        assert kernels
        assert all(kernel.is_contiguous() == (memory_format == "channels_last") for kernel in kernels)
        weights = {name: weight for name, weight in named_weights(module).items() if weight.requires_grad}
        optimizer = build_optimizer(OptimizerConfig(), weights.items())
        for _ in range(3):
            module.zero_grad()
            module(*x).square().sum().backward()
            optimizer.step()
        results.append([*module.parameters(), *(state["moment_1"] for state in optimizer.state.values())])
    for stored, converted_ in zip(*results, strict=True):
        assert torch.equal(stored, converted_)


def test_a_parameter_that_something_else_reads_or_that_is_tied_keeps_its_order() -> None:
    module = to_module(graphs.tiny_conv_net())
    name, weight = next((name, weight) for name, weight in named_weights(module).items() if weight.ndim == 4)
    use_channels_last(module, GraphConfig(), CPU, rows=64, but=[name])
    assert weight.is_contiguous()
    read = next(
        node for node in module.graph.find_nodes(op="get_attr") if module.get_parameter(str(node.target)) is weight
    )
    with module.graph.inserting_after(read):
        module.graph.call_function(torch.sum, (read,))
    use_channels_last(module, GraphConfig(), CPU, rows=64)
    assert weight.is_contiguous()
