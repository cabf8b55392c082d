"""What was changed of a run's configuration after a failure: a damaged record of it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.errors import RecordError
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import write_record


def changed_run(folder: Path, changes: str) -> RunDir:
    run = RunDir(folder)
    config = build_config({"model": {"path": "model.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 2}})
    write_record(run.config, config)
    run.adjusted.write_text(changes)
    return run


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (f'{{"data": {2**31}}}', "does not fit the run's configuration: train.gradient_accumulation_steps"),
        (f'{{"micro_batch_divisor": {2**40}}}', f"does not fit .*: micro_batch_divisor {2**40} is above the"),
        ('{"micro_batch_divisor": 0}', "it is damaged: micro_batch_divisor"),
        ('{"data": -1}', "it is damaged: data"),
    ],
)
def test_changes_that_do_not_fit_the_configuration_are_a_damaged_record(changes: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=why):
        read_config(changed_run(tmp_path, changes))


def test_changes_that_fit_are_read_with_the_configuration(tmp_path: Path) -> None:
    assert read_config(changed_run(tmp_path, '{"skip_steps": [1]}')).train.skip_steps == (1,)
