"""Resampling, pools and transposed convolutions compute what onnxruntime computes, and are differentiable."""

import itertools

import numpy as np
import pytest
import torch

from onward.trainer.onnx_import.ops import conv, image, pool
from onward.trainer.onnx_import.ops.image import Interpolation, ResizeTarget
from tests.support.onenode import assert_agrees

NOTHING = np.zeros(0, np.float32)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


SCALES = [(2.0, 3.0), (0.5, 1.5), (0.6, 2.3), (0.3, 0.7), (1.0, 4.0)]
COORDINATES = ["half_pixel", "pytorch_half_pixel", "asymmetric", "half_pixel_symmetric"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scales", SCALES)
def test_resize_by_scales_computes_what_onnxruntime_does(scales, dynamic):
    x = floats(2, 3, 6, 7)
    constants = {"_roi": NOTHING, "scales": np.array([1, 1, *scales], np.float32)}
    for coordinates, mode in itertools.product(COORDINATES, ("nearest", "linear", "cubic")):
        settings = {"mode": mode, "coordinate_transformation_mode": coordinates, "opset": 19, "dynamic": dynamic}
        roundings = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil") if mode == "nearest" else ("floor",)
        for rounding in roundings:
            assert_agrees("Resize", {"x": x}, constants, nearest_mode=rounding, **settings)
    for mode in ("linear", "cubic"):
        assert_agrees("Resize", {"x": x}, constants, mode=mode, antialias=1, opset=18, dynamic=dynamic)
    assert_agrees("Resize", {"x": x}, constants, mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5, opset=13)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_to_lengths_computes_what_onnxruntime_does(mode):
    x = floats(2, 3, 6, 7)
    for coordinates in (*COORDINATES, "align_corners"):
        constants = {"_roi": NOTHING, "_scales": NOTHING, "sizes": np.array([2, 3, 9, 4])}
        assert_agrees("Resize", {"x": x}, constants, mode=mode, coordinate_transformation_mode=coordinates, opset=19)
    roi = np.array([0, 0, 0.1, -0.2, 1, 1, 0.8, 1.1], np.float32)
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 3.0}
    constants = {"roi": roi, "_scales": NOTHING, "sizes": np.array([2, 3, 9, 4])}
    assert_agrees("Resize", {"x": x}, constants, mode=mode, opset=13, **crop)
    for policy in ("not_larger", "not_smaller"):
        constants = {"_roi": NOTHING, "_scales": NOTHING, "sizes": np.array([9, 4])}
        settings = {"axes": [2, 3], "keep_aspect_ratio_policy": policy, "opset": 18}
        assert_agrees("Resize", {"x": x}, constants, mode=mode, **settings)


def test_resize_and_upsample_before_version_11_compute_what_onnxruntime_does():
    x, up, down = floats(2, 3, 6, 7), [1.0, 1.0, 2.3, 3.0], np.array([1, 1, 0.6, 0.5], np.float32)
    for mode in ("nearest", "linear"):
        assert_agrees("Upsample", {"x": x}, opset=7, mode=mode, scales=up)
        assert_agrees("Upsample", {"x": x}, {"scales": np.array(up, np.float32)}, opset=9, mode=mode)
        assert_agrees("Resize", {"x": x}, {"scales": down}, opset=10, mode=mode)


def test_doubling_an_image_repeats_its_pixels():
    x = torch.randn(2, 3, 4, 5)
    got = image.resize(x, ResizeTarget((2, 3), (2.0, 2.0)), None, Interpolation("nearest", "asymmetric", "floor"))
    torch.testing.assert_close(got, x.repeat_interleave(2, 2).repeat_interleave(2, 3), rtol=0, atol=0)


WINDOWS = [
    {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 2, 1]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1},
    {"kernel_shape": [3, 2], "strides": [3, 2], "pads": [0, 1, 2, 0], "ceil_mode": 1},
    {"kernel_shape": [3, 3], "strides": [2, 1], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [2, 3], "strides": [2, 3], "auto_pad": "SAME_LOWER"},
    {"kernel_shape": [2, 2], "strides": [1, 2], "dilations": [2, 3], "pads": [1, 1, 0, 1]},
    {"kernel_shape": [2, 2], "strides": [2, 2], "dilations": [2, 1], "ceil_mode": 1},
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_pools_compute_what_onnxruntime_does(window, dynamic):
    inputs = {"x": floats(2, 3, 7, 8)}
    settings = {**window, "opset": 22, "dynamic": dynamic}
    assert_agrees("MaxPool", inputs, outputs=2, storage_order=1, **settings)
    assert_agrees("MaxPool", inputs, outputs=2, **settings)
    assert_agrees("MaxPool", inputs, **settings)
    assert_agrees("AveragePool", inputs, **settings)
    assert_agrees("AveragePool", inputs, count_include_pad=1, **settings)
    assert_agrees("LpPool", inputs, p=3, **settings)


def test_max_pool_of_8_bit_integers_computes_what_onnxruntime_does():
    x = np.random.default_rng(0).integers(-128, 127, (1, 2, 6, 6)).astype(np.int8)
    assert_agrees("MaxPool", {"x": x}, opset=12, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])


def test_the_gradient_of_an_lp_pool_over_zeros_is_zero():
    x = torch.zeros(1, 1, 4, 4, requires_grad=True)
    pool.lp_pool(x, 2, [[2, 2], [2, 2], [1, 1]], [0, 0, 0, 0], False, False).sum().backward()
    assert x.grad.eq(0).all()


TRANSPOSED = [
    {"strides": [2, 3], "pads": [1, 0, 0, 2]},
    {"strides": [2, 3], "output_padding": [1, 2]},
    {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"strides": [2, 2], "auto_pad": "SAME_LOWER"},
    {"strides": [2, 2], "output_shape": [10, 11]},
    {"strides": [2, 1], "dilations": [2, 2], "pads": [2, 1, 1, 0]},
]


@pytest.mark.parametrize("settings", TRANSPOSED)
def test_transposed_convolutions_compute_what_onnxruntime_does(settings):
    weights = {"w": floats(4, 3, 3, 3), "b": floats(6)}
    assert_agrees("ConvTranspose", {"x": floats(2, 4, 5, 5)}, weights, group=2, **settings)
    assert_agrees("ConvTranspose", {"x": floats(2, 4, 5, 5)}, weights, group=2, dynamic=True, **settings)


def test_auto_pad_of_a_dynamic_length_computes_what_onnxruntime_does():
    for mode, stride in (("SAME_UPPER", 2), ("SAME_LOWER", 3)):
        settings = {"strides": [stride, stride], "auto_pad": mode, "dynamic": True}
        assert_agrees("Conv", {"x": floats(2, 3, 7, 8)}, {"w": floats(4, 3, 3, 3), "b": floats(4)}, **settings)


def test_col2im_computes_what_onnxruntime_does():
    settings = {"strides": [2, 1], "dilations": [1, 2], "pads": [1, 0, 0, 1]}
    shapes = {"image": np.array([6, 7]), "block": np.array([3, 2])}
    assert_agrees("Col2Im", {"x": floats(2, 18, 3 * 6)}, shapes, **settings)


def test_deform_conv_computes_what_onnxruntime_does_and_its_gradient_is_right():
    inputs = {"x": floats(2, 4, 6, 6), "w": floats(4, 2, 3, 3), "o": 2 * floats(2, 36, 3, 3), "b": floats(4)}
    inputs["m"] = floats(2, 18, 3, 3)
    settings = {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 2, "offset_group": 2, "kernel_shape": [3, 3]}
    assert_agrees("DeformConv", inputs, opset=22, **settings)

    def run(x, weight, offset, mask):
        return conv.deform_conv(x, weight, offset, None, mask, [[1, 1], [1, 1], [0] * 4], (1, 1))

    torch.manual_seed(0)
    shapes = ((1, 1, 3, 3), (1, 1, 2, 2), (1, 8, 2, 2), (1, 4, 2, 2))
    assert torch.autograd.gradcheck(run, [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes])


@pytest.mark.parametrize(
    "how", [Interpolation("linear", "asymmetric"), Interpolation("cubic", antialias=True), Interpolation("nearest")]
)
def test_the_gradient_of_resize_equals_differences(how):
    x = torch.randn(1, 1, 5, 4, requires_grad=True)
    y = image.resize(x, ResizeTarget((2, 3), (0.7, 1.6)), None, how)
    direction = torch.randn_like(x)
    moved = image.resize(x.detach() + direction, ResizeTarget((2, 3), (0.7, 1.6)), None, how)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()  # resize is linear: differences are its derivative
    torch.testing.assert_close(((moved - y.detach()) * weights).sum(), (x.grad * direction).sum(), rtol=1e-4, atol=1e-4)
