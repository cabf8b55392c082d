"""What all tests share: child processes can import `tests`, and servers are started by one worker at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if "PYTEST_XDIST_WORKER" in os.environ:  # two workers with two threads each on two cores spend their time waiting
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


QUICK_SHARES = {
    **dict.fromkeys(("ops/test_memory_order.py", "ops/contributed/test_attention.py", "data/test_plain_csv.py"), 3),
    **dict.fromkeys(("ops/test_image.py", "recomputation/test_compressed_activations.py"), 6),
    **dict.fromkeys(("training/test_files.py", "optim/test_optimizers.py", "onnx_import/test_driver.py"), 2),
    **dict.fromkeys(("flows/test_bundles.py", "flows/test_files_outside.py"), 3),
    **dict.fromkeys(("quantization/test_quantized_weights.py", "fixed_batch/test_fixed_batch.py"), 3),
    **dict.fromkeys(("equivalence/test_zero_step_identity.py", "equivalence/test_gate_refuses_mutants.py"), 3),
    **dict.fromkeys(("equivalence/test_checkpoint_faults.py", "equivalence/test_standardised_labels.py"), 3),
    **dict.fromkeys(("pipeline/test_split.py", "planning/test_stage_memory.py", "replicas/test_zero_in_half.py"), 3),
    **dict.fromkeys(("surgery/test_stochastic_depth.py", "variants/test_variants.py", "quantized/test_moe.py"), 2),
    **dict.fromkeys(("images/test_image_batches.py", "proposal/test_initialise.py", "planning/test_flops.py"), 2),
    **dict.fromkeys(("equivalence/test_overflow_skips_everywhere.py", "recomputation/test_recompute.py"), 2),
}
"""End of a file's name -> k: of each parametrized test in it every k-th case is quick; `make slow` runs the others."""


@pytest.fixture(scope="module")
def only_servers() -> Iterator[None]:
    """Wait until no other pytest-xdist worker runs a module with servers: two servers prefer the same port."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", "alone")
    path = Path(tempfile.gettempdir()) / f"onward-servers-{session}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start rehearsals, plans, exports and the ranks of `train` as forks of one process that has imported torch.

    Each import takes four seconds. The tests in tests/flows start these processes as users do.
    """
    from onward.infra.job import forks
    from tests.support import rank_server

    monkeypatch.setattr(forks, "python", lambda: list(rank_server.command()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that are not quick as slow, before `-m` chooses; run the tests with servers first.

    Those run one after the other, so the other worker should not wait for them.
    """
    seen = Counter[tuple[Path, str]]()
    for item in items:
        share = next((k for end, k in QUICK_SHARES.items() if str(item.path).endswith(end)), 1)
        if share > 1 and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            test = item.path, item.name.partition("[")[0]
            if seen[test] % share:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1
    items.sort(key=lambda item: "only_servers" not in getattr(item, "fixturenames", ()))
