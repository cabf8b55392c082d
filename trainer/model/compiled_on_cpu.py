"""What compiled code computes in another way than eager code where that is faster on a CPU; in exact arithmetic equal.

    gelu(x, tanh)            0.5 x (1 + tanh(u))   ->   x sigmoid(2 u)       u = sqrt(2 / pi) (x + 0.044715 x^3)
    mm, addmm in fp32        MKL                   ->   oneDNN               on AMD, from MIN_FLOPS on

A vectorised tanh takes about twice the time of the exponential in a sigmoid, in forward and backward passes. Of a GELU
of tanh they are all that is not a memory access.

MKL's products are slower on processors of AMD than oneDNN's, which torch has, too: by 8 to 13 % where it was measured
(`python -m tests.bench.products`). Gradients of weights, whose first operand is transposed, stay with MKL, which is
faster there. The processor's vendor decides and no measurement, so that a resumed run computes the same bits.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

MIN_FLOPS = 64e6
"""Smaller products are as fast with MKL: oneDNN takes some 15 us for a call, however small."""

aten = torch.ops.aten


def compile_options(device: torch.device) -> dict[str, Any]:
    """Return the options of torch.compile for a device."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not has_onednn or not is_amd():
        return {}
    return {"post_grad_custom_post_pass": ProductsByOneDNN()}


def is_amd(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor is one of AMD; False where the system does not say it."""
    try:
        return "AuthenticAMD" in cpuinfo.read_text()
    except OSError:
        return False


# -- GELU


def use_sigmoid_in_gelu(graph: fx.GraphModule) -> None:
    """Replace each GELU of tanh, in place, by a function that is one of sigmoid when it is compiled."""
    gelus = [node for node in graph.graph.find_nodes(op="call_function", target=F.gelu) if _is_of_tanh(node)]
    for node in gelus:
        node.target = gelu_of_tanh
        node.args = node.args[:1]
        node.kwargs = {}
    if gelus:
        graph.recompile()


def _is_of_tanh(node: fx.Node) -> bool:
    return len(node.args) == 1 and dict(node.kwargs) == {"approximate": "tanh"}


def gelu_of_tanh(x: Tensor) -> Tensor:
    """Return GELU of x [...] in its approximation by tanh: eagerly with torch's kernel, compiled as x sigmoid(2 u)."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


# -- products

_library: Any = torch.library.Library("onward", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("mm(Tensor a, Tensor b) -> Tensor")
_library.define("addmm(Tensor bias, Tensor a, Tensor b) -> Tensor")


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, "none", [], "")  # type: ignore[no-any-return]


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), bias, "none", [], "")  # type: ignore[no-any-return]


for _name, _function in (("mm", _mm), ("addmm", _addmm)):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, lambda *given: given[-2].new_empty(given[-2].shape[0], given[-1].shape[1]), "Meta")


class ProductsByOneDNN(CustomGraphPass):
    """Lets oneDNN compute the large fp32 products of a graph that torch.compile is about to make code of."""

    def __call__(self, graph: fx.Graph) -> None:
        """Replace the calls, in place."""
        for node in graph.find_nodes(op="call_function", target=aten.mm.default):
            if _is_faster(*node.args):
                node.target = torch.ops.onward.mm.default
        for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
            # a bias of one row, which oneDNN adds; beta and alpha are 1 without keywords
            if not node.kwargs and node.args[0].meta["val"].ndim == 1 and _is_faster(*node.args[1:]):
                node.target = torch.ops.onward.addmm.default

    def uuid(self) -> Any:
        """Return what the key of kept code has of this pass."""
        return get_hash_for_files((__file__,))


def _is_faster(a: Any, b: Any) -> bool:
    first = a.meta["val"]
    second = b.meta["val"]
    if first.dtype != torch.float32 or first.device.type != "cpu" or first.stride(-1) != 1:
        return False
    size = 2
    for length in (*first.shape, second.shape[1]):
        # a length that is not fixed has the value of the first call as its hint
        size *= length if isinstance(length, int) else length.node.hint or 0
    return size >= MIN_FLOPS
