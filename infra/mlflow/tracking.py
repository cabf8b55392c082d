"""Record runs, metrics, checkpoints and models in MLflow. Only this folder and the web server import MLflow.

Every call may be repeated after an outage or a crash: a run is found by its tag, equal metric points are stored once, a
checkpoint is recorded once per step, a model file is registered once. (`log_batch` stores points twice in MLflow's
retired file stores.) Run ids are passed explicitly; nothing uses MLflow's global active run.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import posixpath
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onward.infra.mlflow.mlflow_store import Store, artifacts_of, local_store, translate_errors
from onward.infra.mlflow.model_package import ModelFile, Point, Port, write_package
from onward.infra.servers.databases import named_database, without_password
from onward.infra.servers.login import named_home
from onward.infra.servers.service_state import healthy_url, read_state

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel, Metric

RUN_KEY = "onward.run_id"
"""The tag of an MLflow run with the id of its run directory."""
MAX_TAG_CHARACTERS = 5000
"""Longest text of a tag that every MLflow store keeps."""
TRAINING_PAGES = "workflowType=machine_learning"
"""The part of an address, behind its `#`, without which MLflow shows its pages for language models."""
VIEW = "onward"
"""The name of a view of each experiment that `table_of` opens: MLflow's table of runs begins without any metric."""
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
COLUMNS = (
    *("tags.`onward.result`", "metrics.`evaluation/loss`", "metrics.`evaluation/accuracy`", "metrics.`evaluation/f1`"),
    *("metrics.`evaluation/mean_iou`", "metrics.`evaluation/mae`", "metrics.`evaluation/r2`", "metrics.`train/loss`"),
)
"""The columns of the view; MLflow leaves out the metrics that no run of the experiment has."""
BATCH = 1000
"""MLflow's limit of metric points per call."""
RACES = 10
"""Times that a batch of metrics is stored while others store some of them."""
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class DataSplit:
    """The rows that a run reads for one purpose."""

    name: str
    context: Literal["training", "evaluation", "test"]
    digest: str
    profile: Mapping[str, int | str]
    """Facts about the rows, such as their number."""
    columns: tuple[Port, ...] = ()


def page_on_own_server(tracking_uri: str, run_id: str) -> str:
    """Return the address of a run's page on Onward's own MLflow server; "" if it does not run or shows another store.

    Raises TrackingError when the store cannot be read.
    """
    home = named_home()
    own = local_store(home)
    if tracking_uri not in (own, without_password(named_database("mlflow"))):
        return ""
    # it may have been started when the environment named another database
    shown = read_state(home, "mlflow").get("database") or own
    if shown != tracking_uri or not (server := healthy_url(home, "mlflow")):
        return ""
    return Tracker(tracking_uri, run_id).page(server)


def table_of(page: str) -> str:
    """Return the address of the table of runs with columns of metrics, from that of a run of the experiment."""
    return f"{page.partition('/runs/')[0]}/runs?viewStateShareKey={VIEW}&{TRAINING_PAGES}"


def metric_name(key: str) -> str:
    """Return a name that MLflow accepts for a metric; weights may have names such as `/h.0/c@attn`."""
    return posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", key)).lstrip("/.")[:250] or "_"


class Tracker(Store):
    """One MLflow run in the store at `tracking_uri`. Several threads and processes may use the store.

    tracking_uri: `http://...`, or a database such as `sqlite:////home/me/mlflow.db` or `postgresql://...`, whose
    artifacts are where `artifacts_of` says.
    """

    def __init__(self, tracking_uri: str, run_id: str = "") -> None:
        super().__init__(tracking_uri)
        self.run_id = run_id
        self._expected = bool(run_id)

    # -- the run

    @translate_errors
    def start_run(
        self, experiment: str, *, key: str, name: str, tags: Mapping[str, str], params: Mapping[str, Any]
    ) -> tuple[str, str]:
        """Find the run tagged with `key` (the Onward run id) or create it, and set its status to RUNNING.

        Tags are replaced; parameters that exist keep their first value. Returns the MLflow run id and the address of
        its page ("" for a store without a server).
        """
        from mlflow.entities import Param

        experiment_id = self._experiment(experiment)
        # searched by tag and not by name: names may be given twice, and a resumed flow knows no MLflow id yet
        found = self._client.search_runs([experiment_id], f"tags.`{RUN_KEY}` = '{key}'", max_results=1)
        if found:
            run = found[0]
        else:
            with contextlib.suppress(OSError, KeyError):  # in a container the user may have no name
                tags = {"mlflow.user": getpass.getuser(), **tags}
            # the tags are a part of the creation, so that a killed flow leaves no run that is never found again
            tags = {RUN_KEY: key, "mlflow.source.name": "onward", **tags}
            run = self._client.create_run(experiment_id, run_name=name, tags=_storable(tags))
        self.run_id = run.info.run_id
        if found:
            self._client.update_run(self.run_id, status="RUNNING")
            self.set_tags(tags)
        # MLflow refuses another value for a parameter that it has, and takes 100 of them, of 6000 characters, in a call
        new = [name for name in params if name not in run.data.params]
        entries = [Param(metric_name(name), str(params[name])[:6000]) for name in new]
        for start in range(0, len(entries), 100):
            self._client.log_batch(self.run_id, params=entries[start : start + 100], synchronous=True)
        return self.run_id, self.page() if self.tracking_uri.startswith("http") else ""

    @translate_errors
    def page(self, server: str = "") -> str:
        """Return the address of the run's page on a server, by default that of the store."""
        experiment_id = self._client.get_run(self.run_id).info.experiment_id
        base = (server or self.tracking_uri).rstrip("/")
        return f"{base}/#/experiments/{experiment_id}/runs/{self.run_id}?{TRAINING_PAGES}"

    def _experiment(self, name: str) -> str:
        """Return the id of an experiment; create it, restore a deleted one, or give it its view, if needed."""
        view = json.dumps({"selectedColumns": COLUMNS})
        if (known := self._client.get_experiment_by_name(name)) is None:
            artifacts = artifacts_of(self.tracking_uri) or None
            try:
                return self._client.create_experiment(name, artifact_location=artifacts, tags={VIEW_TAG: view})
            except Exception:
                if (known := self._client.get_experiment_by_name(name)) is None:  # else another process has created it
                    raise
        # an experiment that was deleted on a page keeps its name, and takes no run
        if known.lifecycle_stage == "deleted":
            self._client.restore_experiment(known.experiment_id)
        if known.tags.get(VIEW_TAG) != view:
            self._client.set_experiment_tag(known.experiment_id, VIEW_TAG, view)
        return str(known.experiment_id)

    @translate_errors
    def log_batch(self, points: Iterable[Point]) -> None:
        """Store metric points. After an outage a first part of them may be stored."""
        from mlflow.entities import Metric

        # synchronous, so that an outage is raised here, where the caller repeats the call
        metrics = [Metric(metric_name(p.key), p.value, p.at_ms, p.step) for p in points]
        for start in range(0, len(metrics), BATCH):
            self._store_metrics(metrics[start : start + BATCH])

    def _store_metrics(self, metrics: list[Metric]) -> None:
        """Store metrics, of which another task may store some just now: the monitor, beside the export of the file.

        MLflow looks for those that it has when its database refuses a batch, and gives up if others came since.
        """
        from mlflow.exceptions import MlflowException

        # each turn meets points that came since the one before; with few writers it ends soon
        for tries_left in reversed(range(RACES)):
            try:
                self._client.log_batch(self.run_id, metrics=metrics, synchronous=True)
                return
            except MlflowException as error:
                if not tries_left or not any(words in str(error) for words in ("IntegrityError", "UniqueViolation")):
                    raise

    @translate_errors
    def set_status(self, status: Status) -> None:
        """Set the final status of the run, or RUNNING again."""
        if status == "RUNNING":
            self._client.update_run(self.run_id, status=status)
        else:
            self._client.set_terminated(self.run_id, status)

    @translate_errors
    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; `mlflow.note.content` is the description on the run's page, in Markdown."""
        from mlflow.entities import RunTag

        entries = [RunTag(name, text) for name, text in _storable(tags).items()]
        for start in range(0, len(entries), 100):
            self._client.log_batch(self.run_id, tags=entries[start : start + 100], synchronous=True)

    @translate_errors
    def log_file(self, path: Path, folder: str = "") -> None:
        """Upload one small file to the run's artifacts."""
        if not path.exists():
            raise FileNotFoundError(path)
        self._client.log_artifact(self.run_id, str(path), folder or None)

    @translate_errors
    def log_datasets(self, datasets: Iterable[DataSplit], *, source: Path) -> None:
        """Record the data of the run. MLflow finds all runs on the same rows by their digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        location = json.dumps({"uri": source.absolute().as_uri()})
        inputs = [
            DatasetInput(
                Dataset(
                    data.name[:500],
                    data.digest[:36],
                    "local",
                    location,
                    schema=_schema(data.columns),
                    profile=json.dumps(dict(data.profile)),
                ),
                [InputTag("mlflow.data.context", data.context)],
            )
            for data in datasets
        ]
        self._client.log_inputs(self.run_id, datasets=inputs)

    # -- models

    @translate_errors
    def record_checkpoint(
        self,
        step: int,
        *,
        path: Path,
        bytes: int,
        digest: str,
        metrics: Mapping[str, float],
        points: Sequence[Point] = (),
        best: bool,
    ) -> None:
        """Record a checkpoint by reference, without uploading it.

        points: its metrics as they are sent for the run, so that the run has them once. `search_logged_models` ordered
        by one of them gives the best; `deleted` is "false" as long as the checkpoint is on disk.
        """
        tags = {"path": str(path), "sha256": digest, "bytes": str(bytes), "step": str(step), "deleted": "false"}
        model = self._logged_model(path.name, "checkpoint", tags)
        # The tag of the former best is removed first: after a crash in between there is no best, never two.
        if best:
            for former in self._models("tags.best = 'true'"):
                if former.model_id != model.model_id:
                    self._client.set_logged_model_tags(former.model_id, {"best": "false"})
            self.set_tags({"onward.best_checkpoint": path.name})
        self._client.set_logged_model_tags(model.model_id, {**tags, "best": str(best).lower()})
        self._finish(model, step, metrics, points)

    @translate_errors
    def mark_deleted_checkpoints(self) -> None:
        """Tag the records of this run's checkpoints whose directories were deleted as `deleted`."""
        for model in self._models("tags.best = 'false'"):
            path = model.tags.get("path")
            is_marked = model.tags.get("deleted") == "true"
            if model.model_type != "checkpoint" or not path or is_marked:
                continue
            if not Path(path).exists():
                self._client.set_logged_model_tags(model.model_id, {"deleted": "true"})

    @translate_errors
    def register_model(self, model: ModelFile, *, name: str) -> str:
        """Upload an ONNX file with signature and example, and register it; returns the version.

        When the same file (by `sha256`) of the same run is registered already, its version is returned.
        """
        # an export that was repeated after an outage must not make a second version of the same bytes
        version = self._version(name, model.sha256)
        if not version:
            tags = {**model.tags, "sha256": model.sha256}
            logged = self._logged_model(model.path.stem, "onnx", tags)
            with tempfile.TemporaryDirectory() as folder:
                write_package(model, Path(folder) / "model", model_id=logged.model_id, run_id=self.run_id)
                self._client.log_model_artifacts(logged.model_id, f"{folder}/model")
            # READY is set last: a model without its files must not look complete
            self._finish(logged, model.step, model.metrics, model.points)
            # A server accepts no local path. With a database, MLflow would look `models:/` up in the default store of
            # this process, which may be another one.
            is_database = artifacts_of(self.tracking_uri)
            source = logged.artifact_location if is_database else f"models:/{logged.model_id}"
            created = self._client.create_model_version(name, source, self.run_id, tags=tags, model_id=logged.model_id)
            version = str(created.version)
        return version

    def _version(self, name: str, digest: str) -> str:
        """Return the version of this run's file in the registry, or ""; create the registered model if it is new."""
        if not self._client.search_registered_models(f"name = '{name}'", max_results=1):
            self._client.create_registered_model(name)
        known = self._client.search_model_versions(f"name = '{name}' and run_id = '{self.run_id}'")
        return next((str(version.version) for version in known if version.tags.get("sha256") == digest), "")

    def _models(self, condition: str) -> list[LoggedModel]:
        """Return the LoggedModels of this run that meet a condition."""
        experiment = self._client.get_run(self.run_id).info.experiment_id
        # other runs of the experiment have models of the same names
        return list(self._logged_models([experiment], f"source_run_id = '{self.run_id}' AND {condition}"))

    def _logged_model(self, name: str, kind: str, tags: Mapping[str, str]) -> LoggedModel:
        """Find this run's LoggedModel of that name and digest, or create it."""
        name = re.sub(r"[/:.%\"']", "-", name)  # characters that MLflow refuses
        if found := self._models(f"name = '{name}' AND tags.sha256 = '{tags['sha256']}'"):
            return found[0]
        experiment = self._client.get_run(self.run_id).info.experiment_id
        return self._client.create_logged_model(experiment, name, self.run_id, dict(tags), model_type=kind)

    def _finish(self, model: LoggedModel, step: int, metrics: Mapping[str, float], points: Sequence[Point]) -> None:
        """Attach metrics and the run to a LoggedModel and set it READY, unless it is READY already.

        The run gets them, too; MLflow stores equal points once. Of a metric among the points, the point counts.
        """
        from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric

        if model.status == LoggedModelStatus.READY:
            return
        at_ms = model.creation_timestamp  # the same at every repetition, so that equal points are stored once
        own = {metric_name(key): Point(metric_name(key), value, at_ms, step) for key, value in metrics.items()}
        entries = [
            Metric(*point, model_id=model.model_id) for point in (own | {point.key: point for point in points}).values()
        ]
        self._store_metrics(entries)
        self._client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step)])
        self._client.finalize_logged_model(model.model_id, "READY")


def _schema(columns: tuple[Port, ...]) -> str | None:
    """Return columns as MLflow's pages read them; None if they are too many."""
    specs = {column.name: {"dtype": column.dtype, "shape": [-1, *column.shape]} for column in columns}
    entries = [{"name": name, "type": "tensor", "tensor-spec": spec} for name, spec in specs.items()]
    text = json.dumps({"mlflow_tensorspec": {"features": json.dumps(entries), "targets": None}})
    return text if len(text) < 1_000_000 else None


def _storable(tags: Mapping[str, Any]) -> dict[str, str]:
    """Return tags with names and texts that every store takes."""
    return {metric_name(name): str(text)[:MAX_TAG_CHARACTERS] for name, text in tags.items()}
