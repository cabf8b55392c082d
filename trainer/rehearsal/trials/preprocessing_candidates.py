"""The preprocessings that published models were trained with, as settings of a configuration.

images   pixels of 0..1 or 0..255; mean and std of ImageNet, 0.5, none; RGB or BGR; cropped, stretched, padded
texts    with or without special tokens; lower-case, where only the vocabulary is
tables   as they are, standardised, or scaled to 0..1
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from onward.trainer.config.loading import load_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.images import GREY_MEAN, GREY_STD, RGB_MEAN, RGB_STD
from onward.trainer.config.sections.text import TextConfig
from onward.trainer.data.images.image_inputs import image_inputs
from onward.trainer.data.input_columns import file_feeds
from onward.trainer.data.schema.signature import Signature
from onward.trainer.data.text.tokenizer import open_tokenizer

SPACES = "\u0120\u2581"
"""What stands for a space in front of a token, in byte-level and SentencePiece vocabularies."""
Settings = Mapping[str, Any]
"""Setting, such as `data.image.scale` -> its value."""


def candidates(config: RunConfig, signature: Signature) -> list[Settings]:
    """Return the preprocessings to try, each as settings that are changed in `config`; first `config` itself: {}."""
    choices = [
        each for each in (_images(config.data, signature), _texts(config.data), _tables(config.data, signature)) if each
    ]
    found: list[Settings] = [{}]
    for chosen in itertools.product(*choices):
        found.append({key: value for each in chosen for key, value in each.items()})
    same: dict[str, Settings] = {}
    for settings in found:
        same.setdefault(load_config(config, list(settings.items())).data.model_dump_json(), settings)
    return list(same.values())


def _images(data: DataConfig, signature: Signature) -> list[Settings]:
    inputs = image_inputs(data, signature)
    if not inputs:
        return []
    channels = inputs[0].channels
    sizes = [{"resize": "crop", "crop_ratio": 0.875}, {"resize": "crop", "crop_ratio": 1.0}, {"resize": "stretch"}]
    if data.image is not None and data.image.boxes:  # a crop would cut off objects
        # borders of another colour or at another place change little, so that those of the family alone are tried
        sizes = [{"resize": data.image.resize if data.image.fit == "pad" else "pad"}, {"resize": "stretch"}]
    orders = [{"color": "rgb"}, {"color": "bgr"}] if channels == 3 else [{}]
    values = [{}] if any(each.takes_integers for each in inputs) else list(_pixel_values(channels))
    combinations: list[Settings] = []
    for size, order, value in itertools.product(sizes, orders, values):
        settings: Settings = {**size, **order, **value}
        combinations.append({f"data.image.{key}": setting for key, setting in settings.items()})
    return combinations


def _pixel_values(channels: int) -> Iterator[dict[str, Any]]:
    """Yield scale, mean and std: of torchvision, Keras, TensorFlow, and Caffe."""
    mean, std = (RGB_MEAN, RGB_STD) if channels == 3 else (GREY_MEAN, GREY_STD)
    none = [0.0] * channels
    one = [1.0] * channels
    half = [0.5] * channels
    yield {"scale": 1 / 255, "mean": list(mean), "std": list(std)}
    yield {"scale": 1 / 255, "mean": none, "std": one}
    yield {"scale": 1 / 255, "mean": half, "std": half}
    yield {"scale": 1.0, "mean": none, "std": one}
    yield {"scale": 1.0, "mean": [round(255 * each, 3) for each in mean], "std": one}


def _texts(data: DataConfig) -> list[Settings]:
    if data.text is None:
        return []
    cases = [{"data.text.lowercase": value} for value in (False, True)] if _lacks_lowercase(data.text) else [{}]
    return [{"data.text.special_tokens": value, **case} for value in (True, False) for case in cases]


def _lacks_lowercase(text: TextConfig) -> bool:
    """Return whether the vocabulary is lower-case, but the tokenizer does not make texts so."""
    opened = open_tokenizer(text.tokenizer)
    normalizer = opened.library.normalizer
    vocabulary = opened.library.get_vocab(with_added_tokens=False)
    if normalizer is not None and normalizer.normalize_str("A") == "a":
        return False
    # single letters are there as bytes, and special tokens as they are
    longer = [token.lstrip(SPACES) for token in vocabulary.keys() - opened.special_ids.keys()]
    longer = [token for token in longer if sum(map(str.isalpha, token)) > 1]
    return bool(longer) and all(token == token.lower() for token in longer)


def _tables(data: DataConfig, signature: Signature) -> list[Settings]:
    """Return the scales of columns of numbers; none where no input of floats reads single numbers or vectors."""
    images = {each.name for each in image_inputs(data, signature)}
    for name, feed in file_feeds(data, signature).items():
        is_number_or_vector = len(feed.sample_shape or (1,)) <= 1
        if "float" in feed.dtype and name not in images and is_number_or_vector:
            return [{"data.table.standardise": scale} for scale in ("none", "standard", "min_max")]
    return []
