"""A Prefect server that has gone by the end of a run: the run's own record says how it ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from onward.flows.running.local_run import run_to_end
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.errors import OnwardError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.run_ending import RunEnding
from onward.trainer.run.records import ExportedModel, write_record


def test_a_run_that_is_done_has_its_result_although_prefect_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    run = RunDir(tmp_path / "runs" / "the-run")
    exported = ExportedModel.model_validate(
        {"path": run.export / "m.onnx", "sha256": "", "step": 1, "parity": 0.0, "before": {}, "after": {}, "changed": 1}
    )
    write_record(run.exported, exported)
    config = RunConfig(
        model=ModelConfig(path=tmp_path / "m.onnx"), data=DataConfig(source="digits"), train=TrainConfig(num_steps=1)
    )

    def refused(*_: Any, **__: Any) -> Any:
        raise httpx.ConnectError("All connection attempts failed")

    monkeypatch.setattr("prefect.flow_engine.run_flow", refused)
    this: Any = SimpleNamespace(id="the-run")
    write_record(run.flow_ending, RunEnding(status="completed", flow_run_id="the-run"))
    assert run_to_end(this, dict(config)) == exported
    assert caplog.text.count("its Prefect server does not answer any more (ConnectError)") == 1

    write_record(run.flow_ending, RunEnding(status="completed", flow_run_id="an earlier one"))
    with pytest.raises(OnwardError, match="ConnectError"):
        run_to_end(this, dict(config))
