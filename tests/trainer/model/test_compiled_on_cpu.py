"""What compiled code computes in another way on a CPU: the same to rounding, and only where it is faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from onward.trainer.model import compiled_on_cpu
from onward.trainer.model.compiled_on_cpu import (
    ProductsByOneDNN,
    compile_options,
    gelu_of_tanh,
    is_amd,
    use_sigmoid_in_gelu,
)
from onward.trainer.onnx_import.driver import to_module
from tests.support import graphs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_gelu_of_a_sigmoid_is_gelu_of_tanh_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64, requires_grad=True)
    eager = gelu_of_tanh(x)
    assert torch.equal(eager, F.gelu(x, approximate="tanh"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled = gelu_of_tanh(x)
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-13)
    gradients = [torch.autograd.grad(value.sum(), x)[0] for value in (compiled, eager)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_only_gelus_of_tanh_are_replaced() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(F.gelu(x, approximate="tanh")) + F.gelu(x, approximate="none")

    traced = fx.symbolic_trace(Both())
    use_sigmoid_in_gelu(traced)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"][:3] == [
        gelu_of_tanh,
        F.gelu,
        F.gelu,
    ]
    x = torch.randn(5)
    assert torch.equal(traced(x), Both()(x))


def replaced(function: Any, *arguments: Tensor) -> fx.GraphModule:
    """A function as torch.compile hands it to the pass, after the pass."""
    traced: fx.GraphModule = make_fx(function, tracing_mode="fake")(*arguments)
    ProductsByOneDNN()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y = torch.addmm(bias, x, weight)
    return y, torch.mm(y, weight.t()), torch.mm(x.t(), y)


@pytest.mark.parametrize("transposed", [False, True])
def test_large_fp32_products_are_those_of_onednn_but_for_gradients_of_weights(transposed: bool) -> None:
    x, bias = torch.randn(1024, 192), torch.randn(256)
    weight = torch.randn(256, 192).t() if transposed else torch.randn(192, 256)
    made = replaced(layer, x, weight, bias)
    called = [str(node.target) for node in made.graph.nodes if "mm" in str(node.target)]
    assert called == ["onward.addmm.default", "onward.mm.default", "aten.mm.default"]
    for mine, theirs in zip(made(x, weight, bias), layer(x, weight, bias), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-2)


def test_small_products_and_other_types_stay_as_they_are() -> None:
    for rows, dtype in ((64, torch.float32), (1024, torch.bfloat16), (1024, torch.float64)):
        arguments = [torch.randn(*shape, dtype=dtype) for shape in ((rows, 192), (192, 256), (256,))]
        made = replaced(layer, *arguments)
        assert not [node for node in made.graph.nodes if "onward" in str(node.target)], (rows, dtype)


def test_the_vendor_of_the_processor_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\n")
    assert is_amd(tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nvendor_id\t: GenuineIntel\n")
    assert not is_amd(tmp_path / "cpuinfo")
    assert not is_amd(tmp_path / "absent")
    monkeypatch.setattr(compiled_on_cpu, "is_amd", lambda: True)
    assert compile_options(CUDA) == {}
    assert isinstance(compile_options(CPU)["post_grad_custom_post_pass"], ProductsByOneDNN)
    monkeypatch.setattr(compiled_on_cpu, "is_amd", lambda: False)
    assert compile_options(CPU) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")  # inductor's own
@pytest.mark.parametrize("shapes", ["static", "dynamic"])
def test_with_both_a_graph_trains_as_it_does_eagerly(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.trainer.model.compile import CompileChoice, Compiler

    torch.compiler.reset()
    monkeypatch.setattr(compiled_on_cpu, "is_amd", lambda: True)
    monkeypatch.setattr(compiled_on_cpu, "MIN_FLOPS", 0)
    model = graphs.tiny_transformer()
    eager, other = to_module(model), to_module(model)
    compiled = Compiler(CompileChoice(shapes=shapes), device=CPU).compile(other, other)
    ids = torch.arange(32).reshape(2, 16) % 16
    for batch in (ids, ids) if shapes == "static" else (ids, ids[:1], ids.repeat(2, 1)):
        losses = [module(batch).square().mean() for module in (eager, compiled)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
    for mine, theirs in zip(other.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6)
