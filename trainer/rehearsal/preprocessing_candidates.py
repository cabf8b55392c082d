"""The preprocessings that published models were trained with, as settings of a configuration.

    images   0..255 or 0..1; no mean, 0.5, ImageNet's, Caffe's; RGB or BGR; the centre or all of the image, stretched
    texts    with or without special tokens
    tables   as they are, or standardised
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.input_columns import file_feeds
from onward.trainer.data.signature import Signature

Settings = Mapping[str, Any]
"""Setting, such as `data.image.scale` -> its value."""


def candidates(config: RunConfig, signature: Signature) -> list[Settings]:
    """Return the preprocessings to try, each as the settings that differ from `config`; first `config` itself: {}."""
    choices = [list(each) for each in (_texts(config), _tables(config, signature)) if each]
    found: list[Settings] = [{}]
    for chosen in itertools.product(*choices):
        settings = {key: value for each in chosen for key, value in each.items()}
        found.append(settings)
    return [settings for place, settings in enumerate(found) if settings not in found[:place]]
