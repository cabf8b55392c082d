"""Lengths behind many layers that halve, long windows and cut-off lengths: right at every size, or refused when run."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser

from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.tracing.trial_sizes import LARGE, MIXED, SMALL, Need, lengths_needed, trial_sizes

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
CONV = "Conv<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>"
FOUR_CONVOLUTIONS = f"c1 = {CONV}(x, w1) c2 = {CONV}(c1, w) c3 = {CONV}(c2, w) c4 = {CONV}(c3, w)"
FOUR_POOLS = "c1 = {p}(x) c2 = {p}(c1) c3 = {p}(c2) c4 = {p}(c3)".format(p="MaxPool<kernel_shape=[2,2], strides=[2,2]>")
FOUR_SLICES = "c1 = Slice(x, zero, most, three, two) c2 = Slice(c1, zero, most, three, two) " + (
    "c3 = Slice(c2, zero, most, three, two) c4 = Slice(c3, zero, most, three, two)"
)
SHRUNK = 'c4 = Resize<mode="nearest", nearest_mode="floor">(x, , scales)'
LENGTH = "shape = Shape(h) T = Gather(shape, one_) Tf = Cast<to=1>(T)"
READS = {
    "mean_by_length": "s = ReduceSum(h, one) y = Div(s, Tf)",
    "scale_by_length": "p = Pow(Tf, minus_half) y = Mul(h, p)",
    "range": "r = Range(zero_, T, one_) f = Cast<to=1>(r) u = Unsqueeze(f, one) y = Mul(h, u)",
    "last": "t1 = Sub(T, one_) y = Gather<axis=1>(h, t1)",
    "positions": "e = Unsqueeze(T, zero) p = Slice(table, zero, e, one) y = Add(h, p)",
    "at_most_ten": "e = Min(T, ten_) ef = Cast<to=1>(e) y = Div(h, ef)",
    "remainder": "odd = Mod(T, two_) f = Cast<to=1>(odd) y = Add(h, f)",
}


def graph(front: str, read: str) -> onnx.ModelProto:
    """A tensor h [batch, T, channels] behind a front that divides the width by 16, and something that reads T."""
    body = f"{front} m = ReduceMean<axes=[2], keepdims=0>(c4) h = Transpose<perm=[0,2,1]>(m) {LENGTH} {READS[read]}"
    model = parser.parse_model(f"{HEADER} g (float[B,C,H,W] x) => (float y) {{ {body} }}".replace("C,H", "3,32"))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    random = np.random.default_rng(0)
    channels = 4 if front == FOUR_CONVOLUTIONS else 3
    stored = {
        "w1": random.normal(size=(4, 3, 3, 3)) / 4,
        "w": random.normal(size=(4, 4, 3, 3)) / 4,
        "table": random.normal(size=(1, 64, channels)),
        "minus_half": np.array(-0.5),
        "scales": np.array([1, 1, 1 / 16, 1 / 16]),
    }
    integers = {"zero": [0], "one": [1], "two": [2], "three": [3], "most": [2**62], "zero_": 0, "one_": 1, "two_": 2}
    model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), n) for n, v in stored.items())
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(v, np.int64), n) for n, v in {**integers, "ten_": 10}.items()
    )
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    "front", [FOUR_CONVOLUTIONS, FOUR_POOLS, FOUR_SLICES, SHRUNK], ids=["conv", "pool", "slice", "resize"]
)
def test_a_length_that_collapses_at_short_widths_is_right_at_every_width(front: str, read: str) -> None:
    model = graph(front, read)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    module = to_module(model).eval()
    for width in (32, 48, 160, 336, 640):
        x = torch.randn(2, 3, 32, width)
        (expected,) = session.run(None, {"x": x.numpy()})
        np.testing.assert_allclose(module(x).detach().numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_length_that_is_equal_at_all_trial_sizes_is_checked_at_run_time() -> None:
    # four rows at every length from four on; the number of rows is a constant of the graph
    text = """g (float[B,S,4] x) => (float[B,T,4] y) {
        h = Slice(x, zero, four, one) shape = Shape(h) T = Gather(shape, one_) f = Cast<to=1>(T) y = Div(h, f) }"""
    model = parser.parse_model(f"{HEADER} {text}")
    numbers = {"zero": [0], "one": [1], "four": [4], "one_": 1}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(v, np.int64), n) for n, v in numbers.items())
    module = to_module(model)
    assert torch.equal(module(torch.ones(2, 9, 4)), torch.full((2, 4, 4), 0.25))
    with pytest.raises(RuntimeError, match=r"size\('h', 1\) is 4, but now it is 3"):
        module(torch.ones(2, 3, 4))


@pytest.mark.parametrize("kernel", [256, 400, 512, 4096])
def test_a_window_longer_than_the_usual_trial_lengths_is_imported(kernel: int) -> None:
    text = f"g (float[B,1,S] x) => (float[B,8,T] y) {{ y = Conv<kernel_shape=[{kernel}], strides=[160]>(x, W) }}"
    model = parser.parse_model(f"{HEADER} {text}")
    weight = np.random.default_rng(0).standard_normal((8, 1, kernel)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight / kernel, "W"))
    module = to_module(model)
    x = torch.randn(2, 1, 16000)
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(module(x).detach().numpy(), expected, atol=1e-5)


def test_trial_lengths_are_multiples_of_what_the_graph_divides_by() -> None:
    assert lengths_needed(graph(FOUR_CONVOLUTIONS, "last").graph) == Need(16, 16)
    assert lengths_needed(graph(FOUR_POOLS, "last").graph) == Need(16, 16)
    first, second, *_ = trial_sizes(graph(FOUR_POOLS, "last").graph)
    for (lengths, _), table in ((first, SMALL), (second, MIXED)):
        assert lengths["x", 3] == tuple(16 * (length + 1) for length in table[1])


def test_graphs_that_divide_by_four_at_most_are_tried_at_short_lengths_first() -> None:
    model = parser.parse_model(
        f"{HEADER} g (float[B,3,32,W] x) => (float[B,3,16,V] y) {{ y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) }}"
    )
    tried = [lengths["x", 3] for lengths, _ in trial_sizes(model.graph)]
    assert tried[:2] == [SMALL[1], LARGE[1]]
