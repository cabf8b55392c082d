"""Layout, channels and size are taken from the model's input; what is ambiguous or does not fit names the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.images.image_inputs import ImageInput, image_inputs
from onward.trainer.data.schema.label_axes import Dims
from onward.trainer.data.schema.signature import Signature, TensorInfo
from onward.trainer.errors import ConfigError

LOGITS = TensorInfo("logits", "float32", (None, 4))


def config_of(**image: Any) -> RunConfig:
    data = {"source": "x.csv", "image": {key: value for key, value in image.items() if key != "data"}}
    data |= image.get("data", {})
    return build_config({"model": {"path": Path("m.onnx")}, "data": data, "train": {"num_steps": 1}})


def found(shape: Dims | None, dtype: str = "float32", **image: Any) -> ImageInput:
    (one,) = image_inputs(config_of(**image).data, Signature((TensorInfo("x", dtype, shape),), (LOGITS,)))
    return one


@pytest.mark.parametrize(
    ("shape", "image", "expected"),
    [
        ((None, 3, 224, 224), {}, (3, 224, 224)),
        ((8, 224, 192, 3), {}, (224, 192, 3)),
        ((None, 1, 28, 28), {}, (1, 28, 28)),
        ((None, 3, None, None), {"size": 64}, (3, 64, 64)),
        ((None, None, None, 3), {"size": [32, 48]}, (32, 48, 3)),
        ((None, None, None, None), {"size": 32, "layout": "nhwc", "color": "grey"}, (32, 32, 1)),
        ((None, 3, 3, 3), {"layout": "nchw"}, (3, 3, 3)),
        (None, {"inputs": ["x"], "size": 32, "layout": "nchw", "color": "bgr"}, (3, 32, 32)),
    ],
)
def test_what_the_model_declares_is_taken(shape: Dims | None, image: Any, expected: tuple[int, ...]) -> None:
    assert found(shape, **image).sample_shape == expected


def test_mean_and_std_are_imagenets_unless_others_are_given_and_integers_stay() -> None:
    rgb, grey, raw = found((None, 3, 8, 8)), found((None, 1, 8, 8)), found((None, 3, 8, 8), "uint8")
    assert (rgb.mean, rgb.std, rgb.scale) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 1 / 255)
    assert (grey.mean, grey.std) == ((0.449,), (0.226,))
    assert found((None, 3, 8, 8), mean=[1, 2, 3], std=[1, 1, 1], scale=1).mean == (1, 2, 3)
    assert raw.takes_integers
    assert "pixels 0..255" in raw.summary


@pytest.mark.parametrize(
    ("shape", "image", "message"),
    [
        ((None, 3, 3, 3), {}, "input x is [?, 3, 3, 3]: both the second and the last dimension could be that of 1 or"),
        ((None, None, 32, None), {}, "neither the second nor the last dimension is that of 1 or 3 channels; set data."),
        ((None, 4, 32, 32), {}, "input x is [?, 4, 32, 32], but images have 1 or 3 channels"),
        ((None, 4, 32, 32), {"layout": "nchw"}, "[?, 4, 32, 32], with 4 channels, but images have 1 or 3"),
        ((None, 3, None, 32), {}, "input x is [?, 3, ?, 32], which leaves height and width open; set data.image.size"),
        ((None, 3, 224, 224), {"size": 200}, "data.image.size 200 x 200 does not fit input x [?, 3, 224, 224]"),
        (
            (None, 3, 8, 8),
            {"color": "grey"},
            "data.image.color 'grey' has 1 channels, but input x [?, 3, 8, 8]",
        ),
        ((None, None, 8, 8), {"layout": "nchw"}, "leaves the number of channels open; set data.image.color = 'rgb'"),
        ((None, 3, 8, 8), {"mean": [0.5], "std": [0.5]}, "mean and std have 1 values, but input x takes 3 channels"),
        ((None, 12), {}, "none of the model's inputs has four dimensions (x [?, 12]); name those that are images"),
        ((None, 12), {"inputs": ["x"]}, "input x has 2 dimensions [?, 12], but a batch of images has 4"),
        ((None, 3, 8, 8), {"inputs": ["y"]}, "data.image.inputs names y; the model's inputs are x [?, 3, 8, 8]"),
        ((None, 3, 8, 8), {"data": {"inputs": {"x": ["a", "b"]}}}, "data.inputs.x stacks columns a, b, but an image"),
    ],
)
def test_what_is_ambiguous_or_does_not_fit_is_refused_with_the_numbers(shape: Any, image: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        found(shape, **image)
    assert message in str(refused.value)


def test_integers_with_a_mean_and_two_inputs_of_one_column_in_two_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"input x takes uint8, which are pixels 0\.\.255 as they are; leave out"):
        found((None, 3, 8, 8), "uint8", mean=[1, 1, 1], std=[1, 1, 1])
    two = (TensorInfo("x", "float32", (None, 3, 8, 8)), TensorInfo("y", "float32", (None, 3, 9, 9)))
    with pytest.raises(ConfigError, match="2 of the model's inputs have four dimensions"):
        image_inputs(config_of().data, Signature(two, (LOGITS,)))
    with pytest.raises(ConfigError, match=r"inputs x and y take column 'image' differently .*\[3, 8, 8\].*\[3, 9, 9\]"):
        image_inputs(config_of(inputs=["x", "y"]).data, Signature(two, (LOGITS,)))
    kinds = (two[0], TensorInfo("y", "uint8", (None, 8, 8, 3)))
    with pytest.raises(ConfigError, match=r"differently .*NCHW, \(pixels.*NHWC, pixels 0\.\.255"):
        image_inputs(config_of(inputs=["x", "y"]).data, Signature(kinds, (LOGITS,)))


def test_settings_of_the_table_that_contradict_each_other_are_refused() -> None:
    for image, message in (
        ({"cache": "decoded", "augment": {"random_resized_crop": 0.1}}, "data.image: cache 'decoded' keeps 'crop'"),
        ({"interpolation": "lanczos_aliased"}, "did you mean 'bilinear_aliased'?"),
        ({"mean": [0.5]}, "mean has 1 values and std 0; set both"),
        ({"sizes": 3}, "unknown key data.image.sizes; did you mean data.image.size?"),
        ({"augment": {"flips": 1}}, "unknown key data.image.augment.flips; did you mean data.image.augment.flip?"),
        ({"augment": {"flip": 1.5}}, "data.image.augment.flip: input should be between 0 and 1, not 1.5"),
    ):
        with pytest.raises(ConfigError) as refused:
            config_of(**image)
        assert message in str(refused.value)
