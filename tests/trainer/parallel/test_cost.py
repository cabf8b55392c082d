"""Estimated costs equal those of the real run: FLOPs, bytes kept for the backward pass, and outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.ops.batch_norm import BatchNorm
from onward.trainer.onnx_import.train_selection import select_trained
from onward.trainer.parallel.cost import Autocast, NodeCost, estimate_costs
from tests.support import graphs

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    **graphs.MODELS,
    "dropout": lambda: graphs.tiny_transformer(dropout=0.2),
}
CASTS: dict[str, Autocast] = {"fp32": nullcontext, "bf16": partial(torch.autocast, "cpu", dtype=torch.bfloat16)}


def load(name: str) -> tuple[ImportedGraph, list[Tensor]]:
    model = MODELS[name]()
    return to_module(model).train(), [torch.from_numpy(value) for value in graphs.feed(model, 4).values()]


# -- against the real run


@pytest.mark.parametrize("name", MODELS)
def test_estimated_flops_are_those_that_torch_counts_in_the_real_run(name: str) -> None:
    module, inputs = load(name)
    found = estimate_costs(module, inputs)
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # torch has no FLOP formula for the fused kernel of CPUs
        module(*inputs)
    assert sum(cost.flops for cost in found.values()) == counter.get_total_flops() > 0


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", MODELS)
def test_estimated_kept_bytes_are_those_that_autograd_saves_in_the_real_run(name: str, cast: str) -> None:
    module, inputs = load(name)
    predicted = sum(cost.kept_bytes for cost in estimate_costs(module, inputs, autocast=CASTS[cast]).values())
    saved: dict[int, Tensor] = {}
    with saved_tensors_hooks(lambda tensor: saved.setdefault(_storage(tensor), tensor), _unpacked), CASTS[cast]():
        module(*inputs)
    stored = {_storage(tensor) for tensor in (*module.state_dict(keep_vars=True).values(), *inputs, *_stored(module))}
    real = sum(tensor.untyped_storage().nbytes() for number, tensor in saved.items() if number not in stored)
    norms = (
        "norm" in name or name == "tiny_resnet"
    )  # without data, torch takes their statistics for bf16; they are fp32
    assert predicted == (pytest.approx(real, rel=0.01) if norms and cast == "bf16" else real)


def _unpacked(tensor: Tensor) -> Tensor:
    return tensor


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _stored(module: fx.GraphModule) -> list[Tensor]:
    """Return the tensors that the graph reads by get_attr, constants included."""
    interpreter = fx.Interpreter(module)
    values = [interpreter.fetch_attr(str(node.target)) for node in module.graph.find_nodes(op="get_attr")]
    return [value for value in values if isinstance(value, Tensor)]


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", ["tiny_bert", "tiny_resnet", "tiny_two_outputs"])
def test_estimated_outputs_have_the_shape_type_and_gradient_of_the_real_run(name: str, cast: str) -> None:
    module, inputs = load(name)
    found = estimate_costs(module, inputs, autocast=CASTS[cast])

    class Comparing(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            result = super().run_node(n)
            if isinstance(result, Tensor):
                (output,) = found[n.name].outputs
                assert type(output) is Tensor, "a fake tensor would make all that is computed from it fake"
                assert output.is_meta
                kinds = [(one.shape, one.dtype, one.requires_grad) for one in (output, result)]
                assert kinds[0] == kinds[1], n.name
                assert found[n.name].output_bytes == result.nbytes
            return result

    with CASTS[cast]():
        Comparing(module).run(*inputs)


# -- side effects


@pytest.mark.parametrize("name", ["tiny_conv_net_with_batch_norm", "dropout"])
def test_an_estimate_changes_neither_weights_nor_statistics_nor_modes_nor_random_numbers(name: str) -> None:
    module, inputs = load(name)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    random = torch.get_rng_state()
    for training in (True, False):
        module.train(not training)
        estimate_costs(module, inputs, training=training)
        assert module.training is not training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("name", ["tiny_transformer", "tiny_resnet"])
def test_weights_and_inputs_may_be_on_the_meta_device(name: str) -> None:
    module, inputs = load(name)
    expected = _numbers(estimate_costs(module, inputs))
    for path, weight in [*module.named_parameters()]:
        owner, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(weight.detach().to("meta")))
    assert _numbers(estimate_costs(module, [value.to("meta") for value in inputs])) == expected


def _numbers(found: dict[str, NodeCost]) -> dict[str, tuple[int, int, int]]:
    return {name: (cost.flops, cost.kept_bytes, cost.output_bytes) for name, cost in found.items()}


def test_frozen_first_layers_keep_nothing() -> None:
    module, inputs = load("tiny_conv_net")
    select_trained(module, freeze=("features.*",))
    found = estimate_costs(module, inputs)
    assert {name: cost.kept_bytes for name, cost in found.items() if cost.kept_bytes} == {"linear": 4 * 128 * 4}
    assert found["conv2d"].flops > 0


def test_dropout_keeps_no_mask_in_evaluation() -> None:
    module, inputs = load("dropout")
    training, evaluation = (estimate_costs(module, inputs, training=training) for training in (True, False))
    assert sum(cost.kept_bytes for cost in evaluation.values()) < sum(cost.kept_bytes for cost in training.values())


# -- shapes that depend on data


def compressed() -> onnx.ModelProto:
    """`x` [batch, 4] -> `y` [rows whose sum is above 0, 4]."""
    g = GraphWriter("compressed")
    x = g.input("x", ("batch", 4))
    chosen = g.op("Greater", g.op("ReduceSum", x, g.weight("axes", [1]), keepdims=0), g.weight("zero", 0.0))
    g.op("Compress", g.op("Mul", x, g.weight("w", g.normal(1.0, 4))), chosen, axis=0, outputs="y")
    g.output("y", ("rows", 4))
    return g.model()


def counted() -> onnx.ModelProto:
    """`n` -> `y` [n]."""
    g = GraphWriter("counted")
    n = g.input("n", (), TensorProto.INT64)
    places = g.op("Range", g.weight("start", np.array(0)), n, g.weight("step", np.array(1)))
    g.op("Mul", g.op("Cast", places, to=TensorProto.FLOAT), g.weight("w", 2.0), outputs="y")
    g.output("y", ("n",))
    return g.model()


@pytest.mark.parametrize(
    ("build", "example", "node"),
    [(compressed, torch.ones(3, 4), "compress_3"), (counted, torch.tensor(3), "range_0")],
)
def test_a_shape_that_depends_on_data_is_refused_with_what_to_do(
    build: Callable[[], onnx.ModelProto], example: Tensor, node: str
) -> None:
    module = to_module(build())
    assert len(module(example)) == 3
    with pytest.raises(UnsupportedModel, match=f"the shape of {node} depends on data") as raised:
        estimate_costs(module, [example])
    for setting in ("parallel.pipeline = 1", "parallel.zero = 0", "parallel.units = 0", "recompute.mode = 'none'"):
        assert setting in str(raised.value)
    assert "\n" not in str(raised.value), "one sentence"


def test_other_errors_are_raised_unchanged() -> None:
    module, _ = load("tiny_mlp")
    with pytest.raises(RuntimeError, match="same reduction dim"):
        estimate_costs(module, [torch.ones(4, 5)])


def test_every_module_keeps_its_own_mode() -> None:
    """Stages share modules with the graph, and one may be in evaluation mode when costs are estimated."""
    module, inputs = load("tiny_resnet")
    norms = [child for child in module.modules() if isinstance(child, BatchNorm)]
    norms[0].eval()
    estimate_costs(module, inputs, training=False)
    assert [norm.training for norm in norms] == [False] + [True] * (len(norms) - 1)
