"""What MLflow shows of a run besides its metrics: parameters, tags, the description, and the facts of a version.

parameters    the ten that matter, and each setting that differs from its default; config.json has all
tags          onward.*: columns of the table of runs, such as onward.result, "accuracy 0.25 -> 0.97"
description   model, data, result, and links to Prefect and to the files
version       the metrics, what it was trained from and on, and links to the runs in MLflow and Prefect
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from prefect import runtime

from onward.trainer.config.flat_settings import changed_settings, flat_settings
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.config.urls import is_registered, url_of
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.recorded.sweep_records import membership
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record, record_if_written
from onward.trainer.run.remote.local_copies import LocalCopies

THAT_MATTER = (
    *("model.path", "model.loss", "data.source", "train.global_batch_size", "train.num_steps", "train.num_epochs"),
    *("train.seed", "optimizer.name", "optimizer.learning_rate", "schedule.mode", "precision.compute"),
)
"""Parameters of every run; of the two lengths of a run it has one."""
MOST_CHARACTERS = 500
"""Of a parameter's value; config.json has the whole."""
SHOWN = 3
"""Metrics in the line with the result."""


def parameters(config: RunConfig) -> dict[str, str]:
    """Return the parameters that matter for every run, and those that differ from their defaults, as text."""
    settings = flat_settings(config)
    wanted = []
    for key in THAT_MATTER:
        # of train.num_steps and train.num_epochs a run has one, and the other is 0
        if key in settings and (settings[key] or "num_" not in key):
            wanted.append(key)
    wanted += [key for key in changed_settings(config) if key != "name"]
    # by their names: a table has a value for each of its settings
    shown = settings | {"metrics": [metric.key for metric in config.metrics]}
    return {key: _short(shown[key]) for key in dict.fromkeys(wanted)}


def first_tags(
    run: RunDir, model: ModelConfig, data: DataConfig, parallel: ParallelConfig, identity: RunIdentity
) -> dict[str, str]:
    """Return the tags of a run that begins."""
    return {
        "onward.run_dir": str(run.root),
        "onward.model": model.path.name,
        "onward.data": data.source,
        "onward.ranks": str(parallel.world_size),
        "prefect.flow_run_id": runtime.flow_run.get_id() or "",
        "prefect.flow_run_url": identity.prefect_url,
        **_tags_of_trial(run),
        "mlflow.note.content": description(run, model, data, parallel, identity),
    }


def description(
    run: RunDir,
    model: ModelConfig,
    data: DataConfig,
    parallel: ParallelConfig,
    identity: RunIdentity,
    result: str = "",
) -> str:
    """Return the text on the run's page, in Markdown; its first line is in the table of runs."""
    # the table of runs shows the first line, so the result stands there once it is known
    lines = [f"**{result}**", ""] if result else []
    lines.append(f"`{model.path.name}` on `{data.source}`, {parallel.world_size} ranks")
    lines += ["", f"Run directory: `{run.root}`"]
    lines += ["", f"[This run in Prefect]({identity.prefect_url})"] if identity.prefect_url else []
    return "\n".join(lines)


def result_tags(run: RunDir, exported: ExportedModel) -> dict[str, str]:
    """Return the tags of a run whose file is exported."""
    config = read_config(run, "given")
    identity = read_record(run.identity, RunIdentity)
    result = before_and_after(exported, config.promote_metric)
    version = f"{exported.registered_as} {exported.version}".strip()
    return {
        "onward.result": result,
        "onward.exported_step": str(exported.step),
        "onward.version": version,
        "mlflow.note.content": description(run, config.model, config.data, config.parallel, identity, result),
    }


def before_and_after(exported: ExportedModel, first: str) -> str:
    """Return the metrics of the file before and after the training, the deciding one first, in one line."""
    # False sorts before True: the deciding metric, then accuracies, then by name
    names = sorted(exported.after, key=lambda name: (name != first, not name.endswith("accuracy"), name))
    shown = [
        f"{name.removeprefix('evaluation/')} {exported.before.get(name, math.nan):.4g} -> {exported.after[name]:.4g}"
        for name in names[:SHOWN]
    ]
    return ", ".join(shown)


def version_tags(run: RunDir, exported: ExportedModel) -> dict[str, str]:
    """Return the facts of a registered version: the metrics, what it was trained from and on, and the runs."""
    identity = read_record(run.identity, RunIdentity)
    config = read_config(run, "given")
    facts = {
        "onward.result": before_and_after(exported, config.promote_metric),
        "onward.trained_from": trained_from(run, config.model),
        "onward.trained_from_sha256": identity.model_sha256,
        "onward.data": config.data.source,
        **{f"onward.data_digest.{split}": digest for split, digest in data_digests(run).items()},
        "onward.run_id": identity.run_id,
        "prefect.flow_run_url": identity.prefect_url,
        **{name: f"{value:.6g}" for name, value in exported.after.items()},
    }
    # MLflow shows an empty tag as a row without content
    return {name: value for name, value in facts.items() if value}


def about_version(run: RunDir) -> str:
    """Return where a version comes from, in Markdown: the model before the training, the data, and the runs."""
    identity = read_record(run.identity, RunIdentity)
    config = read_config(run, "given")
    lines = [f"Trained from `{trained_from(run, config.model)}` on `{config.data.source}`, run `{identity.run_id}`"]
    links = {"MLflow": identity.mlflow_url, "Prefect": identity.prefect_url}
    lines += [f"[This run in {product}]({address})" for product, address in links.items() if address]
    return "\n\n".join(lines) + "\n"


def trained_from(run: RunDir, model: ModelConfig) -> str:
    """Return the registered version that the run began with, such as `digits/3`; else the path of its file."""
    url = url_of(model.path)
    if not is_registered(url):
        return url or str(model.path)
    copies = read_record(run.remote, LocalCopies).copies if run.remote.exists() else ()
    keys = [copy.key for copy in copies if copy.url == url]
    versions = [key.partition(" ")[0] for key in keys if " " in key]
    return versions[0] if versions else url


def data_digests(run: RunDir) -> dict[str, str]:
    """Return split -> digest of its rows; {} without shards."""
    manifest = record_if_written(run.shards / "manifest.json", ShardManifest)
    return digests_of(manifest) if manifest else {}


def digests_of(manifest: ShardManifest) -> dict[str, str]:
    """Return split -> SHA-256 of the digests of its files, for the splits that have rows."""
    splits = {"train": manifest.train, "evaluation": manifest.evaluation, "test": manifest.test}
    digests = {}
    for split, files in splits.items():
        if files:
            # equal rows have equal files, so the digest of the digests is that of the rows
            joined = "".join(file.sha256 for file in files)
            digests[split] = hashlib.sha256(joined.encode()).hexdigest()
    return digests


def _tags_of_trial(run: RunDir) -> dict[str, str]:
    """Return the tags by which MLflow shows a trial below the run of its sweep; {} for a run that is no trial."""
    trial = membership(run)
    if trial is None:
        return {}
    tags = {"onward.sweep": trial.sweep_id, "onward.trial": str(trial.number)}
    return tags | ({"mlflow.parentRunId": trial.mlflow_run_id} if trial.mlflow_run_id else {})


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
