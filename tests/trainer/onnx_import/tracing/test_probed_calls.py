"""A call on meta tensors is run once for equal operands, and for all others again; no compiler is loaded for it."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onward.trainer.onnx_import.ops.shape import expand
from onward.trainer.onnx_import.passes.fused_attention import Attention
from onward.trainer.onnx_import.tracing.probed_calls import ProbedCalls, call_key, exact_key, meta_key, module_key
from tests.support.ranks import ROOT

CONV_NET = """
import sys, torch
from onward.trainer.onnx_import.driver import to_module
from tests.support.graphs import MODELS
for build in MODELS.values():
    to_module(build())
print("torch._dynamo" in sys.modules)
import torch._dynamo
assert torch.relu(torch.empty(2, device="meta")).shape == (2,)
double = torch.compile(lambda x: torch.relu(x) * 2, backend="eager", fullgraph=True)
assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
"""


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def counted(calls: ProbedCalls, key, args, kwargs=None) -> int:
    """Return how often a function is called by running it with these operands."""
    count = 0

    def run(*args, **kwargs):
        nonlocal count
        count += 1
        return args

    calls.run(key, run, args, kwargs or {})
    return count


@pytest.mark.parametrize(
    "other",
    [
        (meta(2, 4), 1),
        (meta(2, 3, dtype=torch.float16), 1),
        (meta(3, 2).t(), 1),
        (meta(2, 3), 1.0),
        (meta(2, 3), True),
        (meta(2, 3), (1,)),
        (meta(2, 3), [1]),
        (meta(2, 3), slice(1)),
        (meta(2, 3), meta()),
    ],
)
def test_only_a_call_with_equal_operands_is_not_run_again(other):
    calls = ProbedCalls()
    assert counted(calls, torch.add, (meta(2, 3), 1)) == 1
    assert counted(calls, torch.add, (meta(2, 3), 1)) == 0
    assert counted(calls, torch.sub, (meta(2, 3), 1)) == 1
    assert counted(calls, torch.add, (meta(2, 3), 1), {"alpha": 2}) == 1
    assert counted(calls, torch.add, other) == 1
    assert counted(calls, torch.add, other) == 0


def test_zeros_of_both_signs_and_nan_are_told_apart():
    assert exact_key(0.0) != exact_key(-0.0)
    assert exact_key(float("nan")) == exact_key(float("nan"))


def test_operands_that_have_no_key_and_functions_of_others_are_run_each_time():
    calls = ProbedCalls()
    assert [counted(calls, torch.add, ({1},)) for _ in range(2)] == [1, 1]
    assert [counted(calls, None, (1,)) for _ in range(2)] == [1, 1]
    own = 3
    for function in (lambda x: x, lambda x: x + own, counted, "add_", torch.relu_):
        assert call_key(function) is None, function
    for function in ("add", torch.add, F.gelu, expand):
        assert call_key(function) == function


def test_the_type_of_less_than_a_byte_is_part_of_the_key():
    packed = meta(2)
    packed.packed = 21
    assert meta_key(packed) != meta_key(meta(2))


def test_layers_are_equal_by_their_settings_and_mode_and_those_with_weights_have_no_key():
    def layer(**changes) -> Attention:
        return Attention(**{"scale": 1.0, "causal": True, "dropout": 0.1, **changes})

    assert module_key(layer()) == module_key(layer())
    for other in (layer(scale=2.0), layer(causal=False), layer().eval()):
        assert module_key(layer()) != module_key(other)
    assert module_key(nn.ReLU()) is None
    weighted = layer()
    weighted.weight = nn.Parameter(torch.ones(1))
    assert module_key(weighted) is None


def test_an_error_is_raised_each_time():
    calls = ProbedCalls()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            calls.run(torch.matmul, torch.matmul, (meta(2, 3), meta(2, 3)), {})


@pytest.mark.slow
def test_an_import_does_not_load_the_compiler_which_works_afterwards():
    ended = subprocess.run([sys.executable, "-c", CONV_NET], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["False"]
