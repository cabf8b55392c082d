"""graph.compile and graph.memory_format: one graph for every batch size, and weights that stay as the file has them."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from onward.trainer.config.sections.model import GraphConfig
from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.errors import ConfigError
from onward.trainer.model import compile as accelerate_module
from onward.trainer.model import compiled_on_cpu
from onward.trainer.model.precision import autocast
from onward.trainer.model.weight_casts import casts_kept, insert_casts
from onward.trainer.onnx_graph.examples.small_models import build_resnet18
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.run.machine.this_machine import missing_compiler
from tests.support import graphs, runs
from tests.support.accelerated import accelerate
from tests.support.graphs import feed
from tests.support.trained_models import model_with_weights

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LSTM = """<ir_version: 8, opset_import: ["" : 17]>
g (float[time, batch, 3] x, float[1, 16, 3] w, float[1, 16, 4] r) => (float[time, 1, batch, 4] y)
{ y, h = LSTM <hidden_size = 4> (x, w, r) }"""
LEAF = """<ir_version: 8, opset_import: ["" : 17]>
g (float[batch, 4] x) => (float[2, n] places, float[batch, 4] y)
{ found = NonZero(x) places = Cast <to = 1> (found) y = Relu(x) }"""


def inputs_of(model: onnx.ModelProto, batch: int) -> list[torch.Tensor]:
    return [torch.from_numpy(value) for value in feed(model, batch).values()]


def summed(outputs: Any) -> torch.Tensor:
    parts = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    total: torch.Tensor = sum(part.square().sum() for part in parts)  # type: ignore[assignment]
    return total


@pytest.mark.parametrize("name", ["tiny_transformer", "tiny_bert", "tiny_conv_net", "tiny_resnet"])
def test_a_graph_is_compiled_as_one_for_every_batch_size(name: str) -> None:
    torch.compiler.reset()
    model = getattr(graphs, name)()
    module = to_module(model)
    graphs_seen: list[int] = []

    def count(traced: torch.fx.GraphModule, _: Any) -> Any:
        graphs_seen.append(len(traced.graph.nodes))
        return traced.forward

    compiled = torch.compile(module, backend=count, fullgraph=True, dynamic=True)
    for batch in (6, 3, 5):  # of 8, it would be taken for the side of an image, and compiled once more
        x = inputs_of(model, batch)
        torch.testing.assert_close(compiled(*x), module(*x))
    assert len(graphs_seen) == 1


def test_nodes_computed_by_python_are_named_and_the_rest_is_compiled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda module, **options: asked.update(options) or module)
    monkeypatch.setattr(accelerate_module, "missing_compiler", lambda: "")
    monkeypatch.setattr(compiled_on_cpu, "is_amd", lambda: False)
    with caplog.at_level(logging.WARNING):
        accelerate(to_module(onnx.parser.parse_model(LEAF)), GraphConfig(compile=True), CPU)
    assert "(NonZero)" in caplog.text
    assert asked == {"fullgraph": False, "dynamic": True, "mode": None}


def test_without_a_compiler_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing_compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"neither g\+\+ nor clang\+\+.*graph.compile to false"):
        accelerate(to_module(graphs.tiny_mlp()), GraphConfig(compile=True), CPU)
    missing_compiler.cache_clear()


def converted(module: ImportedGraph, memory_format: str, device: torch.device, *, rows: int = 1) -> int:
    before = len(module.graph.nodes)
    accelerate(module, GraphConfig(memory_format=memory_format), device, rows=rows)  # type: ignore[arg-type]
    return len(module.graph.nodes) - before


def test_images_have_their_channels_last_where_it_is_asked_or_pays() -> None:
    def conv() -> ImportedGraph:
        return to_module(graphs.tiny_conv_net())

    found = [
        converted(conv(), *which, rows=4)
        for which in (("fastest", CUDA), ("fastest", CPU), ("channels_last", CPU), ("auto", CUDA), ("auto", CPU))
    ]
    convolutions = 1 + len(conv().graph.find_nodes(op="call_function", target=F.conv2d))
    # the images, and the weight of each convolution that is not stored so
    assert found == [convolutions, 1, convolutions, convolutions, 0]
    assert converted(conv(), "contiguous", CUDA) == 0
    assert converted(to_module(graphs.tiny_transformer()), "channels_last", CPU) == 0


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_on_a_cpu_channels_last_is_chosen_where_results_outnumber_the_weights_to_convert(compute: str) -> None:
    def large_kernels_on_small_images() -> ImportedGraph:
        module = to_module(build_resnet18(num_classes=4, image_size=8, width=16))
        insert_casts(module, PrecisionConfig(compute=compute))  # type: ignore[arg-type]
        return module

    few, many = (converted(large_kernels_on_small_images(), "fastest", CPU, rows=rows) for rows in (1, 256))
    assert few == 0
    assert many == 1  # the images: weights are stored in the format
    assert converted(large_kernels_on_small_images(), "fastest", CUDA, rows=1) > 0


@pytest.mark.parametrize("name", ["tiny_conv_net", "tiny_resnet", "tiny_conv_net_with_batch_norm"])
def test_weights_gradients_and_the_file_know_nothing_of_channels_last(name: str) -> None:
    model = getattr(graphs, name)()
    plain, last = to_module(model), to_module(model)
    accelerate(last, GraphConfig(memory_format="channels_last"), CPU)
    x = inputs_of(model, 4)
    losses = [summed(module(*x)) for module in (plain, last)]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    for mine, theirs in zip(last.parameters(), plain.parameters(), strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    untrained = to_module(model).eval()
    accelerate(untrained, GraphConfig(memory_format="channels_last"), CPU)
    untrained(*x)
    assert model_with_weights(untrained, model).SerializeToString() == model.SerializeToString()


class Conversions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies of convolution weights, and the convolutions that read a weight in channels-last format."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies = self.convolutions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        # of one channel both formats are the same
        last = isinstance(args[0], torch.Tensor) and args[0].ndim == 4 and args[0].requires_grad
        self.copies += name in ("aten::_to_copy", "aten::clone") and last and isinstance(args[0], torch.nn.Parameter)
        if name == "aten::convolution":
            self.convolutions += args[1].is_contiguous(memory_format=torch.channels_last)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_weights_of_convolutions_are_converted_once_in_a_step(compute: str) -> None:
    model, precision = graphs.tiny_resnet(), PrecisionConfig(compute=compute)  # type: ignore[arg-type]
    results = []
    for memory_format in ("contiguous", "channels_last"):
        module = to_module(model)
        insert_casts(module, precision)
        accelerate(module, GraphConfig(memory_format=memory_format), CPU)
        number = len(module.graph.find_nodes(op="call_function", target=F.conv2d))
        with casts_kept(CPU), Conversions() as seen:
            for _ in range(3):
                with autocast(precision, CPU):
                    loss = summed(module(*inputs_of(model, 4)))
                loss.backward()  # type: ignore[no-untyped-call]
        if memory_format == "channels_last":
            assert (seen.copies, seen.convolutions) == (number, 3 * number)
        assert all(weight.is_contiguous() for weight in module.parameters())
        gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
        results.append([loss.detach(), *gradients])
    tolerance = 1e-4 if compute == "fp32" else 0.05
    scale = max(float(value.abs().max()) for value in results[0][1:])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine / scale, theirs / scale, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_transformer", "tiny_bert", "tiny_conv_net"])
@pytest.mark.filterwarnings("default")  # inductor's own
def test_compiled_it_trains_as_it_does_eagerly(name: str) -> None:
    torch.compiler.reset()
    model = getattr(graphs, name)()
    trained = []
    for compiles in (False, True):
        module = to_module(model)
        run = accelerate(module, GraphConfig(compile=compiles), CPU)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        for batch in (4, 3, 4):
            optimizer.zero_grad()
            (summed(run(*inputs_of(model, batch))) / 100).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        trained.append(named_weights(module))
    for key, weight in trained[0].items():
        torch.testing.assert_close(trained[1][key], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_an_lstm_is_one_graph() -> None:
    torch.compiler.reset()
    module = to_module(onnx.parser.parse_model(LSTM), train=("w", "r"))
    explained = torch._dynamo.explain(module)(torch.randn(5, 2, 3), torch.randn(1, 16, 3), torch.randn(1, 16, 4))
    assert explained.graph_break_count == 0


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_compiled_a_killed_run_ends_with_the_bits_of_one_that_never_was(tmp_path: Path) -> None:
    def make(name: str) -> Any:
        return runs.make_run(
            tmp_path / name,
            graphs.tiny_transformer(dropout=0.2),
            runs.tiny_text(80),
            train={"global_batch_size": 8, "num_steps": 12, "evaluation_period": 10, "seed": 5},
            checkpoint={"period": 4},
            graph={"compile": True},
            launch={"heartbeat_timeout_s": 300},
        )

    undisturbed, killed = make("undisturbed"), make("killed")
    runs.train_run(undisturbed, timeout_s=400)
    runs.train_until(killed, lambda event: event.step >= 6 and event.kind == "scalars", signal.SIGKILL, rank=0)
    runs.train_run(killed, timeout_s=400)
    runs.assert_equal_bits(runs.final_tensors(killed), runs.final_tensors(undisturbed))
