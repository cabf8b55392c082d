"""A rank that starts takes the memory of its own part of the weights, whatever the size of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.rank_memory import make_case, of_ranks

LAYERS, WIDTH = 4, 576
"""64 MiB of weights."""
MIB = 2**20


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(600)
@pytest.mark.parametrize("external", [False, True], ids=["one file", "external data"])
@pytest.mark.parametrize(
    "parallel", [{"tensor": 2}, {"pipeline": 2}, {"data": 2, "zero": 3}], ids=["tensor", "pipeline", "zero"]
)
def test_a_rank_reads_its_own_part_alone(parallel: dict[str, Any], external: bool, tmp_path: Path) -> None:
    tiny, full = (
        of_ranks(make_case(tmp_path / str(width), LAYERS, width, parallel, external=external)) for width in (16, WIDTH)
    )
    # weights and buffers of their gradients; ZeRO's weights are shards, and there are no gradients yet
    own = full[:, 0]
    assert (own < (40 if "zero" in parallel else 80) * MIB).all(), own
    # reading the whole file alone would be 64 MiB more, three times as much with the copies that the import made
    greatest, kept, of_files = (full - tiny)[:, 1:].T
    assert (greatest <= 1.1 * own + 12 * MIB).all(), (greatest, own)
    assert (kept <= 1.1 * own + 4 * MIB).all(), (kept, own)
    assert (of_files <= MIB).all(), of_files
