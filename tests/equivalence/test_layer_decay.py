"""Learning rates by layers are those of one rank in every layout, and those of the files for onnxruntime."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equivalence.layouts import ALONE, MODELS, TOLERANCE, Case, differences, trained

GPT2, BERT, LLAMA, CONV = MODELS
DECAY = {"optimizer": {"layer_decay": 0.5}}


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", [GPT2, CONV])
def test_rates_by_layers_train_alike_in_every_layout(model: str, tmp_path: Path) -> None:
    plain, alone = Case(model, ALONE), Case(model, ALONE, 0, DECAY)
    divided = (("dp2", 3), ("tp2", 0), ("pp2", 0), ("pp2 interleaved", 0), ("2x2x2", 1))
    cases = [Case(model, layout, zero, DECAY) for layout, zero in divided]
    runs = trained([plain, alone, *cases], tmp_path)
    found = {case.name: differences(runs[case], runs[alone]) for case in cases}
    assert {name: each for name, each in found.items() if max(each.values()) > TOLERANCE} == {}
    assert differences(runs[plain], runs[alone])["parameters"] > 10 * TOLERANCE, "the rates differ from those without"
