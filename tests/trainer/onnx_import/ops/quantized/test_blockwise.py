"""Frozen weights of 2, 4 and 8 bits in blocks: onnxruntime's results, exact gradients, and what stays in memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.write_back import write_model
from tests.support.packed import contrib_model, matmul_nbits, pack

Array = np.ndarray[Any, np.dtype[Any]]


def by_onnxruntime(model: onnx.ModelProto, **inputs: Array) -> Array:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)[0]


def sample(columns: int, rows: int = 5) -> Array:
    return np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)


def check(model: onnx.ModelProto, weights: Array, x: Array) -> None:
    """Compare with onnxruntime, as far as sums of fp32 products in another order agree."""
    want = by_onnxruntime(model, x=x)
    got = to_module(model)(torch.from_numpy(x)).detach().numpy()
    assert np.abs(got - want).max() <= 5e-7 * (np.abs(x) @ np.abs(weights).T).max()


KINDS = [
    (bits, columns, block, zero, bias)
    for bits, columns, block, zero, bias in itertools.product(
        (4, 8, 2), (32, 48, 300), (16, 32, 64, 128, 256), ("none", "packed", "float"), (False, True)
    )
    # onnxruntime takes float zero points with 4 bits only
    if bits == 4 or zero != "float"
]


@pytest.mark.parametrize("bits", [4, 8, 2])
def test_matmul_nbits_computes_what_onnxruntime_computes(bits: int) -> None:
    kinds = [kind for kind in KINDS if kind[0] == bits]
    assert len(kinds) >= 60
    for _, columns, block, zero, bias in kinds:
        model, weights = matmul_nbits(bits=bits, columns=columns, block=block, zero=zero, bias=bias)
        check(model, weights, sample(columns))


@pytest.mark.parametrize("zero", ["none", "float"])
def test_blocks_by_g_idx_are_those_of_onnxruntime(zero: str) -> None:
    for columns, block in itertools.product((32, 48, 300), (16, 64)):
        model, weights = matmul_nbits(columns=columns, block=block, zero=zero, groups=True)
        check(model, weights, sample(columns))


@pytest.mark.parametrize(("bits", "zero"), [(8, "none"), (2, "none"), (4, "packed")])
def test_g_idx_that_onnxruntime_does_not_compute_is_refused(bits: int, zero: str) -> None:
    model, _ = matmul_nbits(bits=bits, zero=zero, groups=True)
    with pytest.raises(UnsupportedModel, match="g_idx with"):
        to_module(model)


def test_weights_of_another_size_are_refused_with_the_sizes() -> None:
    model, _ = matmul_nbits()
    next(a for a in model.graph.node[0].attribute if a.name == "N").i = 7
    with pytest.raises(UnsupportedModel, match=r"N=7, K=64, block_size=16 and 4 bits need uint8 of 224 elements"):
        to_module(model)
    model, _ = matmul_nbits()
    next(a for a in model.graph.node[0].attribute if a.name == "bits").i = 3
    with pytest.raises(UnsupportedModel, match=r"bits=3 is not implemented \(only 4, 2, 8\)"):
        to_module(model)


@pytest.mark.parametrize("zero", ["none", "packed", "float"])
def test_the_gradient_of_the_input_is_that_of_the_dequantized_weights(zero: str) -> None:
    model, weights = matmul_nbits(columns=48, block=32, zero=zero, bias=True)
    module = to_module(model)
    x = torch.from_numpy(sample(48)).requires_grad_()
    outer = torch.from_numpy(np.random.default_rng(2).standard_normal((5, 6)).astype(np.float32))
    (module(x) * outer).sum().backward()
    assert x.grad is not None
    want = outer.double().numpy() @ weights
    assert np.abs(x.grad.numpy() - want).max() <= 1e-6 * np.abs(want).max()
    bias = dict(module.named_parameters())["bias"].grad
    assert torch.allclose(bias, outer.sum(0), rtol=1e-6)


@pytest.mark.parametrize("zero", ["none", "packed"])
def test_autocast_and_half_precision_files_keep_the_weights_packed(zero: str) -> None:
    model, weights = matmul_nbits(zero=zero)
    x = torch.from_numpy(sample(64)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = to_module(model)(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    assert torch.allclose(x.grad[0], torch.from_numpy(weights.sum(0)).float(), rtol=0.03, atol=0.05)


def kept_bytes(module: torch.nn.Module, x: torch.Tensor) -> int:
    """The bytes that a forward pass keeps for the backward pass, without what the module stores."""
    own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers(), x)}
    kept = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        module(x)
    return sum(kept.values())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_weights_stay_packed_in_memory_between_the_passes(bits: int) -> None:
    columns, rows, block = 512, 256, 32
    model, _ = matmul_nbits(bits=bits, columns=columns, rows=rows, block=block)
    module = to_module(model)
    stored = sum(tensor.untyped_storage().nbytes() for tensor in module.buffers())
    packed, scales = columns * rows * bits // 8, 4 * columns * rows // block
    assert packed + scales <= stored <= packed + scales + 64
    x = torch.from_numpy(sample(columns)).requires_grad_()
    # nothing of the size of the weights: 4 x 512 x 256 bytes
    assert kept_bytes(module, x) < columns * rows


def test_scales_can_be_trained_by_name_and_are_written_back(tmp_path: Path) -> None:
    model, _ = matmul_nbits(zero="packed", bias=True)
    source = tmp_path / "m.onnx"
    onnx.save(model, source)
    model = load_model(source)
    roles = to_module(model).roles
    assert {name: role.kind for name, role in roles.items()} == {
        "packed": "frozen", "scales": "frozen", "bias": "trained"
    }  # fmt: skip
    module = to_module(model, train=["scales"])
    x = torch.from_numpy(sample(64))
    module(x).square().sum().backward()
    with torch.no_grad():
        for weight in module.parameters():
            assert weight.grad is not None
            assert weight.grad.any()
            weight -= 1e-4 * weight.grad
    write_model(module, model, source, tmp_path / "after.onnx")
    after = onnx.load(tmp_path / "after.onnx")
    want = by_onnxruntime(after, x=x.numpy())
    assert np.allclose(module(x).detach().numpy(), want, rtol=1e-5, atol=1e-5)
    before = {tensor.name: tensor for tensor in model.graph.initializer}
    same = {tensor.name for tensor in after.graph.initializer if tensor == before[tensor.name]}
    assert same == {"packed", "zero"}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zero", [False, True])
def test_rows_of_a_packed_table_are_those_of_onnxruntime(bits: int, has_zero: bool) -> None:
    rng = np.random.default_rng(0)
    integers = rng.integers(0, 2**bits, (20, 64))
    stored: dict[str, Array] = {"table": pack(integers, bits), "scales": rng.random((20, 4)).astype(np.float32)}
    if has_zero:
        stored["zero"] = pack(rng.integers(0, 2**bits, (20, 4)), bits)
    node = helper.make_node(
        *("GatherBlockQuantized", ["table", "x", "scales", *(["zero"] if has_zero else [])], ["y"]),
        **{"bits": bits, "block_size": 16, "quantize_axis": 1, "gather_axis": 0},
    )
    model = contrib_model(node, {"x": (TensorProto.INT64, ["n", 3])}, stored, {"y": ["n", 3, 64]})
    x = np.array([[0, 19, -1], [4, 5, 4]])
    module = to_module(model)
    assert np.array_equal(module(torch.from_numpy(x)).numpy(), by_onnxruntime(model, x=x))
    assert {name: role.kind for name, role in module.roles.items()} == {"table": "frozen", "scales": "frozen"}
