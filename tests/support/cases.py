"""The two models that every promise is proven on, and which of them a test leaves to `make slow`."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest

from tests.support import graphs, runs

CASES: dict[str, tuple[Callable[..., onnx.ModelProto], Callable[..., dict[str, runs.Array]]]] = {
    "conv-net": (graphs.tiny_conv_net, runs.tiny_images),
    "transformer": (graphs.tiny_transformer, runs.tiny_text),
}


def both_cases(*, slow: str) -> pytest.MarkDecorator:
    """Run a test of fixture `case` on both models, on one of them only with `make slow`: the other is in every run."""
    marked = [pytest.param(name, marks=pytest.mark.slow if name == slow else (), id=name) for name in CASES]
    return pytest.mark.parametrize("case", marked, indirect=True)
