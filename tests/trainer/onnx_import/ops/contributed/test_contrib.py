"""Files that onnxruntime's optimisers wrote are imported, compute the same and can be trained."""

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onward.trainer.onnx_import.driver import load_model, to_module
from tests.support.graphs import MODELS, feed
from tests.support.onenode import assert_agrees

OURS = {"domain": "com.microsoft", "opset": 17}


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def optimised_by_the_runtime(source, level: str):
    target = source.with_suffix(f".{level}.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(str(source), options)
    return target


def optimised_for_transformers(source, kind: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imports inside of onnxruntime
        from onnxruntime.transformers import optimizer
    target = source.with_suffix(".transformer.onnx")
    width = {"bert": 16, "gpt2": 32}[kind]
    optimizer.optimize_model(
        str(source), model_type=kind, num_heads=2, hidden_size=width, opt_level=0
    ).save_model_to_file(str(target))
    return target


def assert_imported_whole(path, model) -> set[str]:
    """Equal to onnxruntime, and gradients reach every weight; returns the operators that are not ONNX's."""
    optimised = load_model(path)
    module = to_module(optimised).eval()
    inputs = feed(model, 3)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    want = onnxruntime.InferenceSession(str(path), options).run(None, inputs)
    got = module(*(torch.from_numpy(inputs[name]) for name in module.input_names))
    got = got if isinstance(got, tuple) else (got,)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-4, atol=1e-5)
    sum(output.square().sum() for output in got).backward()
    assert [name for name, weight in module.named_parameters() if weight.grad is None or not weight.grad.any()] == []
    return {node.op_type for node in optimised.graph.node if node.domain == "com.microsoft"}


def num_weights(model: onnx.ModelProto) -> int:
    return sum(weight.numel() for weight in to_module(model).parameters())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_file_optimised_by_onnxruntime_computes_the_same(name, tmp_path):
    model = MODELS[name]()
    onnx.save(model, str(tmp_path / "model.onnx"))
    path = optimised_by_the_runtime(tmp_path / "model.onnx", "EXTENDED")
    fused = assert_imported_whole(path, model)
    expected = {
        "tiny_bert": {"BiasGelu", "FusedMatMul", "FusedGemm"},
        "tiny_transformer": {"FastGelu", "FusedMatMul"},
        "tiny_mlp": {"FusedGemm"},
        "tiny_resnet": {"FusedConv"},
    }
    assert expected.get(name, set()) <= fused
    if not any(node.op_type == "BatchNormalization" for node in model.graph.node):  # which it folds away
        assert num_weights(load_model(path)) == num_weights(model)


@pytest.mark.parametrize(("name", "kind"), [("tiny_bert", "bert"), ("tiny_transformer", "gpt2")])
def test_a_file_optimised_for_transformers_computes_the_same(name, kind, tmp_path):
    model = MODELS[name]()
    onnx.save(model, str(tmp_path / "model.onnx"))
    path = optimised_for_transformers(tmp_path / "model.onnx", kind)
    assert "SkipLayerNormalization" in assert_imported_whole(path, model)
    assert num_weights(load_model(path)) == num_weights(model)


# -- operator by operator


def test_fused_activations_compute_what_onnxruntime_does():
    x, bias = floats(2, 5, 8), floats(8)
    assert_agrees("Gelu", {"x": x}, **OURS)
    assert_agrees("BiasGelu", {"x": x, "b": bias}, **OURS)
    assert_agrees("FastGelu", {"x": x, "b": bias}, **OURS)
    assert_agrees("FastGelu", {"x": x}, **OURS)
    assert_agrees("QuickGelu", {"x": x}, **OURS)


@pytest.mark.parametrize("which", range(16))
def test_fused_matmul_computes_what_onnxruntime_does(which):
    turn_a, turn_b, batch_a, batch_b = ((which >> i) & 1 for i in range(4))

    def shape(rows, columns, turned, batch):
        lengths = [3, columns, rows] if turned else [3, rows, columns]
        return [lengths[1], lengths[0], lengths[2]] if batch else lengths

    inputs = {"a": floats(*shape(4, 5, turn_a, batch_a)), "b": floats(*shape(5, 6, turn_b, batch_b))}
    turns = {"transA": turn_a, "transB": turn_b, "transBatchA": batch_a, "transBatchB": batch_b}
    assert_agrees("FusedMatMul", inputs, alpha=0.5, **turns, **OURS)


@pytest.mark.parametrize("name", ["Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid"])
def test_fused_gemm_and_conv_compute_what_onnxruntime_does(name):
    settings = {"activation": name, "activation_alpha": 0.3, "activation_beta": 0.4, "alpha": 0.5, "beta": 2.0}
    assert_agrees("FusedGemm", {"a": floats(3, 4), "b": floats(4, 5), "c": floats(5)}, **settings, **OURS)
    inputs = {"x": floats(2, 3, 6, 6), "w": floats(4, 3, 3, 3), "b": floats(4), "z": floats(2, 4, 6, 6)}
    numbers = {"LeakyRelu": [0.3], "HardSigmoid": [0.3, 0.4]}.get(name)
    settings = {"activation": name, "pads": [1] * 4} | ({"activation_params": numbers} if numbers else {})
    assert_agrees("FusedConv", inputs, **settings, **OURS)


def test_fused_norms_compute_what_onnxruntime_does():
    x, skip, scale = floats(2, 5, 8), floats(2, 5, 8, seed=1), floats(8)
    shifted = {"x": x, "skip": skip, "g": scale, "b": floats(8, seed=1), "bias": floats(8, seed=2)}
    assert_agrees("SkipLayerNormalization", shifted, **OURS)
    plain = {"x": x, "skip": skip, "g": scale, "bias": floats(8, seed=2)}
    assert_agrees("SkipSimplifiedLayerNormalization", plain, **OURS)
    assert_agrees("SimplifiedLayerNormalization", {"x": x, "g": scale}, opset=17, axis=-1, epsilon=1e-5, stash_type=1)
    assert_agrees("LayerNormalization", {"x": x, "g": scale, "b": floats(8)}, opset=14, axis=-1, epsilon=1e-5)


def test_fused_embeddings_compute_what_onnxruntime_does():
    ids = np.random.default_rng(0).integers(0, 10, (2, 5)).astype(np.int32)
    tables = {"w": floats(10, 8), "p": floats(6, 8), "t": floats(2, 8), "g": floats(8), "b": floats(8, seed=1)}
    mask = {"m": np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)}
    kinds = {"s": (ids % 2).astype(np.int32)}
    assert_agrees("EmbedLayerNormalization", {"i": ids, **kinds, **tables, **mask}, outputs=3, epsilon=1e-5, **OURS)
    tables["_t"], kinds["_s"] = tables.pop("t"), kinds.pop("s")
    inputs = {"i": ids, "_s": ids, "w": tables["w"], "p": tables["p"], "_t": ids, "g": tables["g"], "b": tables["b"]}
    assert_agrees("EmbedLayerNormalization", inputs, outputs=2, epsilon=1e-5, **OURS)


MASKS = {
    "none": None,
    "keys": np.array([[1, 1, 0, 1], [1, 0, 1, 1]], np.int32),
    "pairs": np.tril(np.ones((2, 4, 4), np.int32)),
    "lengths": np.array([4, 3], np.int32),
    "ends and begins": np.array([4, 3, 1, 0], np.int32),
}


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_packed_attention_computes_what_onnxruntime_does(mask, causal):
    inputs = {"x": floats(2, 4, 8), "w": floats(8, 24), "b": floats(24)}
    inputs["mask" if MASKS[mask] is not None else "_mask"] = MASKS[mask]
    assert_agrees("Attention", inputs, num_heads=2, unidirectional=causal, **OURS)
    biased = inputs | {"_past": None, "added": floats(2, 2, 4, 4)}
    assert_agrees("Attention", biased, num_heads=2, unidirectional=causal, scale=0.3, **OURS)


def test_packed_attention_after_a_cache_computes_what_onnxruntime_does():
    inputs = {"x": floats(2, 3, 8), "w": floats(8, 24), "b": floats(24), "_mask": None, "past": floats(2, 2, 2, 4, 4)}
    assert_agrees("Attention", inputs, outputs=2, num_heads=2, unidirectional=1, **OURS)


def test_multi_head_attention_computes_what_onnxruntime_does():
    q, k, v = floats(2, 4, 8), floats(2, 6, 8, seed=1), floats(2, 6, 8, seed=2)
    mask = np.array([[1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 0, 0]], np.int32)
    inputs = {"q": q, "k": k, "v": v, "b": floats(24), "m": mask, "added": floats(1, 2, 4, 6)}
    assert_agrees("MultiHeadAttention", inputs, num_heads=2, **OURS)
    split = {"q": q, "k": floats(2, 2, 6, 4), "v": floats(2, 2, 6, 4, seed=1)}
    assert_agrees("MultiHeadAttention", split, num_heads=2, **OURS)
    cached = {"q": q, "k": q, "v": q, "_b": q, "_m": q, "_a": q, "pk": floats(2, 2, 3, 4), "pv": floats(2, 2, 3, 4)}
    assert_agrees("MultiHeadAttention", cached, outputs=3, num_heads=2, **OURS)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_group_query_attention_computes_what_onnxruntime_does(interleaved):
    tables = {"cos": floats(10, 8), "sin": floats(10, 8, seed=1)}
    for x in (floats(2, 5, 32), floats(2, 2, 5, 16)):
        for at in (np.array([2]), np.arange(10).reshape(2, 5)):
            assert_agrees("RotaryEmbedding", {"x": x, "at": at}, tables, interleaved=interleaved, **OURS)
    inputs = {"q": floats(2, 5, 64), "k": floats(2, 5, 32), "v": floats(2, 5, 32), "_pk": None, "_pv": None}
    inputs |= {"ends": np.array([4, 4], np.int32), "total": np.array(5, np.int32)}
    heads = {"num_heads": 4, "kv_num_heads": 2}
    for extra in ({}, {"softcap": 2.0}, {"local_window_size": 2}):
        turned = {"do_rotary": 1, "rotary_interleaved": interleaved}
        assert_agrees("GroupQueryAttention", inputs | tables, outputs=3, **heads, **turned, **extra, **OURS)
