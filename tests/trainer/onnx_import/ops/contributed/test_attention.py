"""Attention computes what onnxruntime and ONNX's definition compute, by torch's kernel where there is one."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator

from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.ops.contributed import attention
from tests.support.onenode import assert_agrees, one_node

BATCH, HEADS, WIDTH = 2, 4, 8


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def operands(groups: int, *, flat: bool, queries: int = 4, keys: int = 6):
    shapes = {"q": (HEADS, queries), "k": (groups, keys), "v": (groups, keys)}
    arrays = {name: floats(BATCH, n, length, WIDTH, seed=n) for name, (n, length) in shapes.items()}
    if not flat:
        return arrays, {}
    joined = {name: a.transpose(0, 2, 1, 3).reshape(BATCH, a.shape[2], -1) for name, a in arrays.items()}
    return joined, {"q_num_heads": HEADS, "kv_num_heads": groups}


MASKS = {
    "none": None,
    "truth": np.tril(np.ones((4, 6), bool), 1),
    "bias": floats(BATCH, 1, 4, 6),
    "heads": floats(HEADS, 4, 6),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_with_any_mask_computes_what_onnxruntime_does(mask, flat):
    for groups, causal, softcap, scale in itertools.product((1, 2, 4), (0, 1), (0.0, 2.0), (None, 0.3)):
        inputs, heads = operands(groups, flat=flat)
        inputs["mask" if MASKS[mask] is not None else "_mask"] = MASKS[mask]
        settings = {"is_causal": causal, "softcap": softcap, **heads} | ({} if scale is None else {"scale": scale})
        for opset in (23, 24):
            assert_agrees("Attention", inputs, opset=opset, **settings)


@pytest.mark.parametrize("shown", [0, 1, 3])
def test_attention_after_a_cache_gives_the_cache_and_the_scores(shown):
    inputs, _ = operands(2, flat=False)
    inputs |= {"_mask": None, "past_k": floats(BATCH, 2, 3, WIDTH), "past_v": floats(BATCH, 2, 3, WIDTH, seed=1)}
    for causal in (0, 1):
        settings = {"is_causal": causal, "qk_matmul_output_mode": shown}
        assert_agrees("Attention", inputs, opset=23, outputs=4, **settings)
        assert_agrees("Attention", inputs, opset=24, outputs=3, is_causal=causal)


@pytest.mark.parametrize(("left", "right"), [(2, -1), (-1, 1), (1, 0)])
def test_attention_windows_and_lengths_follow_onnxs_definition(left, right):
    inputs, _ = operands(HEADS, flat=False)
    inputs |= {"_mask": None, "_past_k": None, "_past_v": None, "lengths": np.array([6, 4])}
    for causal in (0, 1):
        settings = {"left_window_size": left, "right_window_size": right, "is_causal": causal}
        model = one_node("Attention", inputs, opset=25, **settings)
        given = {name: array for name, array in inputs.items() if not name.startswith("_")}
        want = ReferenceEvaluator(model).run(None, given)[0]
        model.graph.output[0].type.tensor_type.elem_type = 1
        got = to_module(model)(*(torch.from_numpy(array) for array in given.values()))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kernel"), [(HEADS, F.scaled_dot_product_attention), (2, attention.grouped_attention)]
)
def test_attention_without_extras_is_one_call_of_torchs_kernel(heads, kernel):
    inputs, _ = operands(heads, flat=False)
    model = one_node("Attention", inputs, opset=23, is_causal=1)
    model.graph.output[0].type.tensor_type.elem_type = 1
    calls = [node for node in to_module(model).graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [kernel]
    assert calls[0].kwargs["is_causal"]
    assert calls[0].kwargs["attn_mask"] is None


@pytest.mark.parametrize(("kind", "masked", "half", "repeated"), [
    ("cpu", True, False, False),
    ("cuda", False, True, False),  # flash attention reads shared heads
    ("cuda", True, True, True),  # it takes no mask
    ("cuda", False, False, True),  # and no fp32
])  # fmt: skip
def test_shared_heads_are_repeated_where_no_fused_kernel_of_a_gpu_reads_them(kind, masked, half, repeated):
    assert attention.repeats_heads(kind, masked=masked, half=half) is repeated


@pytest.mark.parametrize("mask", MASKS)
def test_repeated_heads_give_the_results_and_gradients_of_shared_ones(mask, monkeypatch):
    given = None if MASKS[mask] is None else torch.from_numpy(MASKS[mask])
    found = []
    for repeated in (False, True):
        monkeypatch.setattr(attention, "repeats_heads", lambda *kind, repeated=repeated, **how: repeated)
        q, k, v = (torch.from_numpy(array).requires_grad_() for array in operands(2, flat=False)[0].values())
        y = attention.grouped_attention(q, k, v, given, scale=0.3)
        y.square().sum().backward()
        found.append((y, q.grad, k.grad, v.grad))
    for shared, own in zip(*found, strict=True):
        torch.testing.assert_close(shared, own)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_query_whose_keys_are_all_masked_gets_zeros_and_no_gradient(softcap):
    mask = np.ones((4, 6), bool)
    mask[1] = False
    inputs, _ = operands(HEADS, flat=False)
    model = one_node("Attention", inputs | {"mask": mask}, opset=23, softcap=softcap)
    model.graph.output[0].type.tensor_type.elem_type = 1
    q, k, v = (torch.from_numpy(inputs[name]).requires_grad_() for name in "qkv")
    y = to_module(model)(q, k, v, torch.from_numpy(mask))
    y.square().sum().backward()
    assert y[:, :, 1].eq(0).all()
    assert q.grad[:, :, 1].eq(0).all()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in (q, k, v))


def test_the_gradient_of_soft_capped_attention_equals_finite_differences():
    q, k, v, mask = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ([1, 2, 3, 4],) * 3 + ([3, 3],))

    def run(*operands):
        return attention.explicit_attention(*operands, scale=0.5, softcap=2.0, score_output=3)

    assert torch.autograd.gradcheck(run, (q, k, v, mask))


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_positions_are_those_of_onnx(interleaved):
    for width, flat, placed in itertools.product((4, 8), (False, True), (False, True)):
        x = floats(BATCH, 5, HEADS * 8) if flat else floats(BATCH, HEADS, 5, 8)
        table = (10,) if placed else (BATCH, 5)
        inputs = {"x": x, "cos": floats(*table, width // 2), "sin": floats(*table, width // 2, seed=1)}
        if placed:
            inputs["at"] = np.random.default_rng(0).integers(0, 10, (BATCH, 5))
        settings = {"interleaved": interleaved, "rotary_embedding_dim": width if width < 8 else 0, "num_heads": HEADS}
        assert_agrees("RotaryEmbedding", inputs, opset=23, **settings)
