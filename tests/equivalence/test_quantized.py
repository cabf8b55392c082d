"""Files with QuantizeLinear train in every layout what one rank trains, their scales and zero points included."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.trainer.errors import ConfigError
from onward.trainer.parallel.planning.planner import plan
from onward.trainer.run.directory import read_config
from tests.equivalence.layouts import ALONE, MODELS, TOLERANCE, Case, differences, make_case, trained
from tests.support.quantized import quantized
from tests.support.runs import tiny_images

LAYOUTS = (("dp2", 0), ("dp2", 3), ("pp2", 0), ("dp2 x pp2", 3))


@pytest.mark.mpi
def test_quantized_products_cannot_be_divided_over_tensor_parallel_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "qdq", (quantized, tiny_images))
    with pytest.raises(ConfigError, match=r"nothing of this graph can be divided over parallel\.tensor = 2 ranks"):
        plan(read_config(make_case(Case("qdq", "tp2"), tmp_path)))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("scales", ["recalibrate", "train"])
def test_every_layout_trains_the_same_scales(scales: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "qdq", (quantized, tiny_images))
    alone, *cases = [Case("qdq", *layout, {"quantize": {"scales": scales}}) for layout in ((ALONE, 0), *LAYOUTS)]
    runs = trained([alone, *cases], tmp_path)
    found = {case.name: differences(runs[case], runs[alone]) for case in cases}
    assert {name: each for name, each in found.items() if max(each.values()) > TOLERANCE} == {}
