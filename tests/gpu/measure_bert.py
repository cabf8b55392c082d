"""Measure BERT-base with padded sequences beside the module it was exported from. About 2 minutes on an H200."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from tests.bench.handwritten import BERT, exported
from tests.gpu.device import REHEARSAL
from tests.gpu.measure import compare, connected
from tests.gpu.results import attempt
from tests.support.runs import Array

SIZES = {"vocabulary": 30522, "length": 512, "layers": 12, "heads": 12, "width": 768, "classes": 10}
TINY = {"vocabulary": 64, "length": 16, "layers": 1, "heads": 2, "width": 16, "classes": 10}
CHECKS = {"BERT-base bf16": False, "BERT-base bf16, compiled": True}


def padded_text(rows: int, length: int, words: int) -> dict[str, Array]:
    """Return random tokens of which the last up to half of a row are padding, and a class for each row."""
    random = np.random.default_rng(0)
    lengths = random.integers(length // 2, length + 1, rows)
    mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
    return {"tokens": mask * random.integers(1, words, (rows, length)), "attention_mask": mask, "label": lengths % 10}


def main() -> None:
    """Time it with 32 sequences of 512 tokens, eager and compiled."""
    sizes, batch = (TINY, 4) if REHEARSAL else (SIZES, 32)
    columns = padded_text(batch, sizes["length"], sizes["vocabulary"])
    torch.manual_seed(0)
    module = BERT(**sizes)
    probe = {name: torch.from_numpy(columns[name][:2]) for name in ("tokens", "attention_mask")}
    model = exported(module, probe)
    options = {"compute": "bf16", "unit": "tokens", "per_sample": sizes["length"]}
    with connected() as mpi:
        for check, compiled in CHECKS.items():
            attempt(check, partial(compare, mpi, model, module, columns, compiled=compiled, **options))


if __name__ == "__main__":
    main()
