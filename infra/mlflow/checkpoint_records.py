"""Find and delete MLflow's records of checkpoints whose directories were deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from onward.infra.mlflow.mlflow_store import Store, translate_errors


class CheckpointRecord(NamedTuple):
    """MLflow's record of a checkpoint (a LoggedModel)."""

    model_id: str
    path: Path


class CheckpointRecords(Store):
    """The records of checkpoints in an MLflow store, of all its runs."""

    @translate_errors
    def lost(self, below: Path, *, is_gone: Callable[[Path], bool]) -> list[CheckpointRecord]:
        """Return the records of checkpoints in a directory, at any depth, that are gone."""
        experiments = [experiment.experiment_id for experiment in self._client.search_experiments()]
        found = []
        for model in self._logged_models(experiments):
            path = Path(model.tags.get("path", ""))
            # other machines record in the same store
            if model.model_type == "checkpoint" and below in path.parents and is_gone(path):
                found.append(CheckpointRecord(model.model_id, path))
        return found

    @translate_errors
    def delete(self, records: Iterable[CheckpointRecord]) -> None:
        """Delete records; MLflow keeps the metrics of their run."""
        for record in records:
            self._client.delete_logged_model(record.model_id)
