"""A kill and a full disk in the pass over the whole file leave nothing half-written, and the next export works."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from onward.tasks.export import export_file
from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring import file_precision
from tests.equivalence.test_detectors import detector_run
from tests.support.runs import train_run
from tests.trainer.data.images.test_boxes import annotate, pictures

ENDING = """
import os, sys


def ended(self, batch, row):
    if {kill}:
        os.kill(os.getpid(), 9)
    raise OSError({number}, "No space left on device")


def hook(event, arguments):
    module = sys.modules.get("onward.trainer.export.measuring.file_precision")
    if hasattr(module, "WholeFile") and module.WholeFile.outputs is not ended:
        module.WholeFile.outputs = ended


sys.addaudithook(hook)
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_kill_and_a_full_disk_in_the_pass_over_the_whole_file_leave_no_half_of_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    annotate(tmp_path / "data", pictures(tmp_path / "data", 16))
    run = detector_run(tmp_path, tmp_path / "data", kind="file of yolov8", train={"num_epochs": 1})
    train_run(run)
    checkpoint = max(run.checkpoints.glob("step-*"))
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for kill, said in ((True, "the exporting process ended with signal 9"), (False, "No space left on device")):
        (hooks / "sitecustomize.py").write_text(ENDING.format(kill=kill, number=errno.ENOSPC))
        with monkeypatch.context() as patched:
            patched.setenv("PYTHONPATH", str(hooks), prepend=":")
            with pytest.raises(Exception, match=said) as caught:
                export_file(run, checkpoint)
        assert isinstance(caught.value, ExportRefused) == kill
        assert not run.exported.exists()
        assert not list(run.export.glob("*.onnx"))
    exported = export_file(run, checkpoint)
    assert "evaluation/file/map" in exported.after
    assert not list(run.export.glob(".verifying-*"))


def test_only_a_disk_ends_the_pass_over_the_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_precision, "file_measures", full)
    with pytest.raises(OSError, match="No space left on device"):
        file_precision.file_precision(None, None, None, ())  # type: ignore[arg-type]
