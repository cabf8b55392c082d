"""What goes wrong while a training batch is made is a finding, beside all others."""

from __future__ import annotations

from typing import Any

import pytest

from onward.trainer.diagnostics.output_warnings import SELECTED
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.rehearsal.checks import _run
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.rehearsal.sizes import Size
from onward.trainer.run.records import ExporterWarning


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("Padding size should be less than the input"),
            "a micro-batch of 4 rows cannot be made of the data: RuntimeError: Padding size should be less than the "
            "input; look at data.image.augment, which evaluation leaves out",
        ),
        (DataError("label 9 cannot be mixed"), "label 9 cannot be mixed"),
    ],
)
def test_a_training_batch_that_cannot_be_made_is_refused_beside_what_else_is_wrong(
    error: Exception, message: str
) -> None:
    def fails(rows: int, kind: str) -> Any:
        assert (rows, kind) == (4, "training")
        raise error

    findings = Findings()
    findings.refuse("another reason")
    graph: Any = None  # not reached
    _run(graph, Size("training", 4, "a micro-batch of 4 rows", ""), fails, findings, gradients=True)
    with pytest.raises(ConfigError) as refused:
        findings.record(elapsed_s=1.0)
    assert refused.value.problems == ("another reason", message)


def test_a_refusal_says_that_the_loss_reads_what_a_detector_has_chosen() -> None:
    findings = Findings()
    selected = ExporterWarning(
        key=SELECTED, what="output 'y' holds what TopK has chosen", remedy="set model.output to 't'"
    )
    findings.warnings = (selected,)
    assert findings.record(elapsed_s=1.0).warnings == (selected,), "alone it is a warning"
    findings.refuse("10 labels for 3 rows")
    with pytest.raises(ConfigError) as raised:
        findings.record(elapsed_s=1.0)
    assert list(raised.value.problems) == [
        "10 labels for 3 rows",
        "output 'y' holds what TopK has chosen; set model.output to 't'",
    ]
