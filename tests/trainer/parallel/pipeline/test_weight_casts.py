"""Under autocast a step casts each weight once, and computes the gradients of a cast at every use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batch
from onward.trainer.distributed.mesh import Coordinate
from onward.trainer.model.adapters import low_rank, low_rank_conv
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.model.precision import autocast
from onward.trainer.model.trainable import open_trainable
from onward.trainer.model.weight_casts import PRODUCTS, half
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.parallel import layout
from onward.trainer.parallel.layout import build_layout, recompute_units
from onward.trainer.parallel.pipeline import engine
from onward.trainer.parallel.pipeline.engine import Pipeline
from tests.support import graphs

CPU = torch.device("cpu")
NUM_MICRO_BATCHES = 4


class Casts(TorchDispatchMode):
    """Count the casts of each weight to half precision."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = {weight.data_ptr(): number for number, weight in enumerate(weights)}
        self.casts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            number = self._numbers.get(args[0].data_ptr())
            self.casts.update(() if number is None else (number,))
        return result


class Step:
    """A model on one rank, without process groups, whose gradients a step leaves in its parameters."""

    def __init__(self, folder: Path, proto: onnx.ModelProto, **sections: Any) -> None:
        onnx.save(proto, folder / "model.onnx")
        self.config: RunConfig = build_config(
            {
                "model": {"path": folder / "model.onnx"},
                "data": {"source": "x"},
                "train": {"num_steps": 1, "global_batch_size": 8, "gradient_accumulation_steps": NUM_MICRO_BATCHES},
                "precision": {"compute": "bf16"},
                **sections,
            }
        )
        cast = partial(autocast, self.config.precision, CPU)
        module = open_trainable(self.config).module
        feeds = [graphs.feed(proto, 2, seed=number).values() for number in range(NUM_MICRO_BATCHES)]
        inputs = [tuple(map(torch.from_numpy, feed)) for feed in feeds]
        divided = build_layout(module, self.config, inputs[0], rank=0, group="", autocast=cast)
        recompute_units(divided, divided.stages, self.config, inputs[0], pipeline=0)
        with torch.no_grad():
            outputs = module.eval()(*inputs[0])
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        labels = torch.zeros(logits.shape[:-1], dtype=torch.int64)
        self.batches = [Batch(values, (labels,), 2, (labels.numel(),)) for values in inputs]
        self.losses = Losses(self.config.losses, module.output_names)
        self.weights = [w.tensor for w in divided.weights(divided.stages, Coordinate(0, 0, 0))]
        one = SimpleNamespace(size=lambda: 1)
        self.pipeline = Pipeline(
            divided.stages,
            self.losses,
            schedule="1f1b",
            stages_for=lambda inputs: divided.stages,
            autocast=cast,
            device=CPU,
            group_pipeline=one,  # type: ignore[arg-type]
            group_data=one,  # type: ignore[arg-type]
        )

    def begin(self, num_backwards: int, num_targets: float, num_batchnorm_updates: int) -> None:
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None

    def gradients(self) -> list[Tensor]:
        torch.manual_seed(0)
        self.pipeline.run(self.batches, self, scale=1.0)
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def evaluate(self) -> dict[str, float]:
        totals = EvaluationMetrics(self.losses, device=CPU)
        return self.pipeline.evaluate(self.batches, totals, lambda: None)


def shared_layers() -> onnx.ModelProto:
    """Three layers with one weight and one bias: `x` [batch, 8] -> `y` [batch, 8]."""
    g = GraphWriter("shared_layers", seed=0)
    x = g.input("x", ("batch", 8))
    weight, bias = g.weight("weight", g.normal(0.3, 8, 8)), g.weight("bias", g.normal(0.3, 8))
    for _ in range(2):
        x = g.op("Tanh", g.op("Gemm", x, weight, bias))
    g.op("Gemm", x, weight, bias, outputs="y")
    g.output("y", ("batch", 8))
    return g.model()


CASES: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any]]] = {
    "tied weights, dropout": (graphs.tiny_transformer, {"graph": {"dropout": 0.1}}),
    "convolutions": (graphs.tiny_resnet, {}),
    "recomputed": (
        graphs.tiny_transformer,
        {"recompute": {"mode": "whole"}, "parallel": {"units": 3}, "graph": {"dropout": 0.1}},
    ),
    "recomputed in part": (graphs.tiny_bert, {"recompute": {"mode": "selective"}, "parallel": {"units": 3}}),
    "weights of several products": (shared_layers, {}),
    "adapters": (graphs.tiny_llama, {"lora": {"weights": ["*"], "rank": 2}}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_casts_each_weight_once_and_has_the_bits_of_casting_it_at_every_use(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, sections = CASES[name]
    proto = make()
    step = Step(tmp_path, proto, **sections)
    with Casts(step.weights) as once:
        found = step.gradients()
    monkeypatch.setattr(layout, "insert_casts", lambda module, config: None)
    monkeypatch.setattr(engine, "casts_kept", lambda device: nullcontext())
    reference = Step(tmp_path, proto, **sections)
    torch.set_autocast_cache_enabled(False)  # so that it casts a weight each time that it is read
    try:
        with Casts(reference.weights) as each:
            expected = reference.gradients()
    finally:
        torch.set_autocast_cache_enabled(True)
    assert set(once.casts.values()) == {1}
    assert once.casts.keys() == each.casts.keys()
    assert min(each.casts.values()) >= NUM_MICRO_BATCHES
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, found, expected))


def test_no_cast_outlives_an_update_of_the_weights(tmp_path: Path) -> None:
    step = Step(tmp_path, graphs.tiny_transformer())
    with Casts(step.weights) as first:
        before = step.gradients(), step.evaluate()
    with torch.no_grad():
        for weight in step.weights:
            weight.mul_(1.5)
    with Casts(step.weights) as second:
        after = step.evaluate(), step.gradients()
    assert first.casts == second.casts
    assert set(first.casts.values()) == {2}, "once in the step, once in the evaluation"
    assert before[1] != after[0]
    assert not all(map(torch.equal, before[0], after[1]))


def operands(product: Callable[..., Tensor]) -> list[Any]:
    """An input, and weights of the shapes that a product reads."""
    name = product.__name__
    if "conv" in name:
        size = int(name[-2]) if name[-1] == "d" else 1
        x, weight = torch.randn(2, 4, *[5] * size), torch.randn(4, 4, *[3] * size)
        return (
            [x, weight, torch.randn(4, 4), 2.0, 1, 0, 1, 1] if product is low_rank_conv else [x, weight, torch.randn(4)]
        )
    if product is low_rank:
        return [torch.randn(2, 4), torch.randn(3, 4), torch.randn(5, 3), 2.0, False]
    leading = [torch.randn(2, 5)] if name in ("addmm",) else [torch.randn(3, 2, 5)] if name == "baddbmm" else []
    if name in ("bmm", "baddbmm"):
        return [*leading, torch.randn(3, 2, 4), torch.randn(3, 4, 5)]
    if product is F.linear:
        return [torch.randn(2, 4), torch.randn(5, 4), torch.randn(5)]
    return [*leading, torch.randn(2, 4), torch.randn(4, 5)]


@pytest.mark.parametrize("product", sorted(PRODUCTS, key=lambda product: product.__name__), ids=lambda p: p.__name__)
def test_a_product_of_weights_in_half_precision_has_the_bits_of_the_product_that_autocast_makes(
    product: Callable[..., Tensor],
) -> None:
    torch.manual_seed(0)
    given = operands(product)
    with torch.autocast("cpu", torch.bfloat16):
        expected = product(*given)
        found = product(given[0], *(half(value) if isinstance(value, Tensor) else value for value in given[1:]))
    assert expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)
