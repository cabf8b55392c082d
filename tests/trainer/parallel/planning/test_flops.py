"""The FLOPs of an update equal hand counts, and what torch counts while autograd really runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.parallel.cost import estimate_costs
from onward.trainer.parallel.planning.flops import Flops, count_flops, measure_flops
from tests.support import graphs, zoo
from tests.trainer.parallel.test_cost import compressed

# -- by hand

B, T, IN, H = 3, 5, 8, 16


def two_products() -> onnx.ModelProto:
    """`x` [batch, 8] -> MatMul 16 -> MatMul 4."""
    g = GraphWriter("two_products")
    hidden = g.op("MatMul", g.input("x", ("batch", IN)), g.weight("first", g.normal(1.0, IN, H)))
    g.op("MatMul", hidden, g.weight("second", g.normal(1.0, H, 4)), outputs="y")
    g.output("y", ("batch", 4))
    return g.model()


def gemm() -> onnx.ModelProto:
    """`x` [batch, 8] -> Gemm 16 with a bias."""
    g = GraphWriter("gemm")
    x = g.input("x", ("batch", IN))
    g.op("Gemm", x, g.weight("w", g.normal(1.0, H, IN)), g.weight("b", g.normal(1.0, H)), transB=1, outputs="y")
    g.output("y", ("batch", H))
    return g.model()


def convolutions(groups: int) -> onnx.ModelProto:
    """`x` [batch, 2, 8, 8] -> Conv 1 x 1 to 8 channels -> Conv 3 x 3 in groups to 12 channels, without padding."""
    g = GraphWriter("convolutions")
    x = g.op("Conv", g.input("x", ("batch", 2, 8, 8)), g.weight("first", g.normal(1.0, 8, 2, 1, 1)))
    g.op("Conv", x, g.weight("second", g.normal(1.0, 12, 8 // groups, 3, 3)), group=groups, outputs="y")
    g.output("y", ("batch", 12, 6, 6))
    return g.model()


def attention() -> onnx.ModelProto:
    """`x` [batch, 5, 16] -> query, key and value by a product each -> attention of one head."""
    g = GraphWriter("attention")
    x = g.input("x", ("batch", T, H))
    q, k, v = (g.op("MatMul", x, g.weight(name, g.normal(0.1, H, H))) for name in "qkv")
    scores = g.op("Div", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])), g.weight("root", float(H**0.5)))
    g.op("MatMul", g.op("Softmax", scores, axis=-1), v, outputs="y")
    g.output("y", ("batch", T, H))
    return g.model()


def recurrent(kind: str, gates: int, directions: int) -> onnx.ModelProto:
    """`x` [5, batch, 8] -> MatMul 8 -> a recurrent layer of 16."""
    g = GraphWriter(kind)
    x = g.op("MatMul", g.input("x", (T, "batch", IN)), g.weight("below", g.normal(0.1, IN, IN)))
    w, r = (g.weight(name, g.normal(0.1, directions, gates * H, size)) for name, size in (("W", IN), ("R", H)))
    attributes = {"direction": "bidirectional"} if directions == 2 else {}
    if kind == "GRU":
        attributes["linear_before_reset"] = 1
    g.op(kind, x, w, r, hidden_size=H, outputs=["Y", "Y_h"], **attributes)
    g.output("Y", (T, directions, "batch", H))
    return g.model()


CONVOLVED = 2 * B * 8 * 8 * 2 * 8
"""Of the convolution 1 x 1."""
PRODUCTS = 3 * 2 * B * T * H * H
"""Of query, key and value."""
BELOW = 2 * B * T * IN * IN
HAND = {
    # no input of a graph has a gradient, so the first layer has one product in the backward pass and the others two
    "linear": (two_products, (B, IN), 2 * B * IN * H + 2 * B * H * 4, 2 * B * IN * H + 2 * 2 * B * H * 4),
    "Gemm": (gemm, (B, IN), 2 * B * IN * H, 2 * B * IN * H),
    "Conv": (
        lambda: convolutions(1),
        (B, 2, 8, 8),
        CONVOLVED + 2 * B * 6 * 6 * 9 * 8 * 12,
        CONVOLVED + 2 * 2 * B * 6 * 6 * 9 * 8 * 12,
    ),
    "Conv in 4 groups": (
        lambda: convolutions(4),
        (B, 2, 8, 8),
        CONVOLVED + 2 * B * 6 * 6 * 9 * 2 * 12,
        CONVOLVED + 2 * 2 * B * 6 * 6 * 9 * 2 * 12,
    ),
    "attention": (
        attention,
        (B, T, H),
        PRODUCTS + 4 * B * T * T * H,
        PRODUCTS + 2 * 4 * B * T * T * H,
    ),
    **{
        f"{kind}, {directions} direction(s)": (
            lambda kind=kind, gates=gates, directions=directions: recurrent(kind, gates, directions),
            (T, B, IN),
            BELOW + directions * 2 * T * B * gates * H * (IN + H),
            BELOW + directions * 2 * 2 * T * B * gates * H * (IN + H),
        )
        for kind, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1))
        for directions in (1, 2)
    },
}
"""What -> (the graph, the shape of its input, FLOPs forward, FLOPs backward)."""


@pytest.mark.parametrize("what", HAND)
def test_the_flops_are_those_of_a_count_by_hand(what: str) -> None:
    build, shape, forward, backward = HAND[what]
    assert count_flops(to_module(build()), [torch.empty(shape)]) == Flops(forward, backward)


def test_the_forward_flops_are_those_that_the_planner_divides_the_graph_by() -> None:
    for what, (build, shape, forward, _) in HAND.items():
        found = estimate_costs(to_module(build()), [torch.empty(shape)])
        assert sum(cost.flops for cost in found.values()) == forward, what


# -- what is trained


def test_a_frozen_weight_has_no_gradient_and_nothing_below_the_first_trained_one_has() -> None:
    first, second = 2 * B * IN * H, 2 * B * H * 4
    for frozen, backward in {
        (): first + 2 * second,
        ("first",): second,  # the weight gradient of the second: below it nothing is trained
        ("second",): first + second,  # the gradient passes through it
    }.items():
        module = to_module(two_products())
        select_trained(module, freeze=frozen)
        assert count_flops(module, [torch.empty(B, IN)]) == Flops(first + second, backward), frozen


def test_an_output_that_no_loss_reads_has_no_backward_pass() -> None:
    g = GraphWriter("two_outputs")
    x = g.input("x", ("batch", IN))
    for name, width in (("small", 4), ("large", H)):
        g.op("MatMul", x, g.weight(f"w_{name}", g.normal(1.0, IN, width)), outputs=name)
        g.output(name, ("batch", width))
    module, small, large = to_module(g.model()), 2 * B * IN * 4, 2 * B * IN * H
    for read, backward in {("small",): small, ("large",): large, (): small + large}.items():
        assert count_flops(module, [torch.empty(B, IN)], read) == Flops(small + large, backward)


# -- against torch's counter in the real passes


def counted_by_torch(module: ImportedGraph, inputs: Sequence[Tensor]) -> Flops:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        found = module.train()(*inputs)
        forward = counter.get_total_flops()
        ends = [each for each in ([found] if isinstance(found, Tensor) else found) if each.requires_grad]
        torch.autograd.backward(ends, [torch.zeros_like(each) for each in ends])
        return Flops(forward, counter.get_total_flops() - forward)


def imported(model: onnx.ModelProto, batch: int = 4) -> tuple[ImportedGraph, list[Tensor]]:
    return to_module(model), [torch.from_numpy(value) for value in graphs.feed(model, batch).values()]


@pytest.mark.parametrize("name", graphs.MODELS)
def test_the_flops_of_every_small_model_are_those_that_torch_counts(name: str) -> None:
    module, inputs = imported(graphs.MODELS[name]())
    assert count_flops(module, inputs) == counted_by_torch(module, inputs)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "resnet", "unet", "vit", "recommender"])
def test_the_flops_of_the_zoo_are_those_that_torch_counts(name: str) -> None:
    module, inputs = to_module(zoo.export(name, "legacy-17", folded=False)), [*zoo.feed(name, 3).values()]
    found = count_flops(module, inputs)
    assert found == counted_by_torch(module, inputs)
    assert found.backward > found.forward > 0


@pytest.mark.parametrize("name", ["mobilenet", "convnext"])
def test_torch_counts_the_weight_gradient_of_grouped_convolutions_as_if_they_were_not_grouped(name: str) -> None:
    module, inputs = to_module(zoo.export(name, "legacy-17", folded=False)), [*zoo.feed(name, 3).values()]
    found, by_torch = count_flops(module, inputs), counted_by_torch(module, inputs)
    assert found.forward == by_torch.forward
    assert found.forward < found.backward <= 2 * found.forward < by_torch.backward


# -- shapes that depend on data; side effects


def test_shapes_that_depend_on_data_are_counted_in_a_real_pass_that_changes_nothing() -> None:
    module, rows = to_module(compressed()), torch.tensor([[1.0] * 4, [-1.0] * 4, [1.0] * 4])
    with pytest.raises(RuntimeError):
        count_flops(module, [rows])
    assert measure_flops(module, [rows]).total == 0  # it has no product
    module, inputs = imported(graphs.MODELS["tiny_resnet"]())
    assert_unchanged(module, lambda: measure_flops(module, inputs))
    assert measure_flops(module, inputs) == count_flops(module, inputs)


def test_counting_changes_neither_weights_nor_statistics_nor_modes_nor_random_numbers() -> None:
    for model in (graphs.MODELS["tiny_resnet"](), graphs.tiny_transformer(dropout=0.2)):
        module, inputs = imported(model)
        assert_unchanged(module, lambda module=module, inputs=inputs: count_flops(module, inputs))


def assert_unchanged(module: ImportedGraph, act: Callable[[], object]) -> None:
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    random, training = torch.get_rng_state(), [each.training for each in module.modules()]
    act()
    assert torch.equal(torch.get_rng_state(), random)
    assert [each.training for each in module.modules()] == training
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_only_the_shapes_of_the_inputs_are_used() -> None:
    module, inputs = imported(graphs.tiny_transformer())
    assert count_flops(module, [value.to("meta") for value in inputs]) == count_flops(module, inputs)
    assert np.isfinite(count_flops(module, inputs).total)
