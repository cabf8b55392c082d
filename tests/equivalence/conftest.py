"""The two graphs that every promise is proven on: a conv net and a transformer, with data for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from onward.trainer.run.directory import RunDir
from tests.support import graphs, runs

CASES: dict[str, tuple[Callable[..., onnx.ModelProto], Callable[..., dict[str, runs.Array]]]] = {
    "conv net": (graphs.tiny_conv_net, runs.tiny_images),
    "transformer": (graphs.tiny_transformer, runs.tiny_text),
}


TWINS = {
    "test_a_rank_killed_at_any_step_changes_not_one_bit_of_the_end[conv-net]",
    "test_asked_to_stop_it_saves_at_once_and_goes_on_with_the_same_bits[transformer]",
    "test_a_run_may_start_from_another_ones_checkpoint_but_only_where_it_passes_through[conv-net]",
    "test_evaluation_is_exact_to_the_last_sample_on_any_number_of_ranks[transformer]",
    "test_ignored_labels_do_not_make_the_division_matter[conv-net]",
    "test_two_replicas_equal_one_with_twice_the_batch[conv-net]",
    "test_three_micro_batches_equal_one_batch_three_times_as_large[transformer]",
    "test_the_exported_file_under_onnxruntime_equals_the_trained_module[conv net]",
    "test_the_exported_file_under_onnxruntime_equals_the_trained_module[transformer]",
    "test_the_trained_file_passes_and_every_mutant_is_refused[tiny_resnet]",
    "test_on_real_ranks_killed_twice_every_sample_has_been_learned_from_once_in_each_epoch[1-1]",
    "test_on_real_ranks_killed_twice_every_sample_has_been_learned_from_once_in_each_epoch[2-1]",
}
"""Their likes on the other graph run every time; these, which take long, before a release."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in TWINS:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(case: str, tmp_path: Path) -> Callable[..., RunDir]:
    """make("name", train={...}, ...) -> a run directory of this case's model and data."""

    def make(name: str, *, rows: int = 80, graph: dict[str, Any] | None = None, **sections: Any) -> RunDir:
        build, data = CASES[case]
        return runs.make_run(tmp_path / name, build(**(graph or {})), data(rows), **sections)

    return make
