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
    2: """
        onnx_import/ops/test_conformance.py onnx_import/ops/test_gradients.py tasks/test_endings_of_real_ranks.py
    """,
    3: """
        data/test_table_columns.py data/test_written_parts.py distributed/test_processes.py
        equivalence/test_noise_of_the_model.py equivalence/test_production_kinds.py
        export/test_exported_model.py export/test_preprocessing_record.py flows/test_boxes_of_files.py
        flows/test_broken_disks.py flows/test_bundles.py flows/test_files_outside.py flows/test_named_run.py
        flows/test_recorded_endings.py flows/test_refusals.py guards/test_guard.py images/test_boxes.py
        measuring/test_file_precision.py model/test_adapters.py model/test_compile.py
        onnx_import/test_lengths.py onnx_import/test_weight_or_constant.py ops/recurrent/test_rnn.py
        ops/test_dynamic_quantize_lstm.py ops/test_signal.py outcomes/test_storage.py parallel/test_cost.py
        pipeline/test_balance.py pipeline/test_weight_casts.py preprocessing/test_box_nodes.py
        preprocessing/test_with_preprocessing.py proposal/test_dense_detectors.py proposal/test_questions.py
        proposal/test_scikit_learn.py quantized/test_blockwise.py quantized/test_qlinear.py
        quantized/test_quant.py replicas/test_zero_conduct.py roles/test_scaled_integers.py run/test_home.py
        servers/test_services.py shown/test_terminal.py surgery/test_new_detector_head.py tensor/test_regions.py
        tasks/test_train.py text/test_sample_streams.py trainer/test_fork_server.py trainer/test_step_profiler.py
        trials/test_preprocessing_trials.py
    """,
    6: """
        data/test_plain_csv.py equivalence/test_checkpoint_faults.py equivalence/test_gate_refuses_mutants.py
        equivalence/test_overflow_skips_everywhere.py equivalence/test_standardised_labels.py
        equivalence/test_zero_step_identity.py fixed_batch/test_fixed_batch.py images/test_image_batches.py
        onnx_import/test_driver.py ops/contributed/test_attention.py ops/test_image.py ops/test_memory_order.py
        optim/test_optimizers.py pipeline/test_split.py planning/test_flops.py planning/test_stage_memory.py
        proposal/test_initialise.py quantization/test_quantized_weights.py quantized/test_moe.py
        recomputation/test_compressed_activations.py recomputation/test_recompute.py
        replicas/test_zero_in_half.py surgery/test_stochastic_depth.py training/test_files.py
        variants/test_variants.py
    """,
}
"""k -> ends of files' names. Of a parametrized test in them every k-th case is quick; `make slow` runs the others."""


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
    shares = {end: share for share, ends in QUICK_SHARES.items() for end in ends.split()}
    seen = Counter[tuple[Path, str]]()
    for item in items:
        share = next((k for end, k in shares.items() if str(item.path).endswith(end)), 1)
        if share > 1 and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            test = item.path, item.name.partition("[")[0]
            if seen[test] % share:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1
    items.sort(key=lambda item: "only_servers" not in getattr(item, "fixturenames", ()))
