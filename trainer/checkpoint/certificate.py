"""Certify a checkpoint: digests of all that decides how training continues, in a chain. Needs no torch.

    step 20                  step 40                  step 60
    weights    8f1c..        weights    02aa..        weights    77d0..        the same in every layout (tensor_sums.py)
    optimizer  31b0..        optimizer  c9d4..        optimizer  5e12..
    position   ...           position   ...           position   ...           step, samples, loss scaler, [stop]
    config, data, model ...  config, data, model ...  config, data, model ...  what the steps were computed from
    previous   0000..   <----previous   digest   <----previous   digest        the checkpoint that training went on from

Two checkpoints with equal `weights`, `optimizer` and `position` continue alike; with equal `config`, `data` and `model`
they continue with the same computation. So a part of a run that is computed again must reach the same certificate.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from onward.trainer.checkpoint.tensor_sums import KINDS, Sum, kind_of
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.setting_paths import PATHS, replaced
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import Record, RunIdentity, read_record

if TYPE_CHECKING:
    from onward.trainer.checkpoint.manifest import TensorEntry

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
NO_DIGEST = "0" * 64
"""In the place of a digest of something that is not there."""

UNDECIDING = ("name", "metrics", "launch", "checkpoint", "stop", "monitor", "export")
"""Sections that do not decide the bits of a step. Of [launch], the device and the threads of a rank do."""


class Origin(Record):
    """What the steps of a run are computed from."""

    config: Sha256 = NO_DIGEST
    """Of the settings that decide the bits of a step, without paths, and of the code of its losses and converters."""
    data: Sha256 = NO_DIGEST
    """Of the shards: the digest of each of their files."""
    model: Sha256 = NO_DIGEST
    """Of the ONNX file that the run began with, and of its external data."""


class Certificate(Origin):
    """The digests of a checkpoint."""

    weights: Sha256
    """Of all weights: names, types, shapes and elements; independent of the layout."""
    optimizer: Sha256
    """Of all other tensors likewise: the optimizer's state, moving averages."""
    position: Sha256
    """Of the step, the samples used, the loss scaler, and what has counted for [stop]."""
    previous: Sha256 = NO_DIGEST
    """The digest of the certificate before; zeros for the first of a run."""

    @property
    def digest(self) -> str:
        """Return the digest of this certificate, which the next one names."""
        return _digest_of(self.model_dump())


def certify(
    tensors: Mapping[str, TensorEntry], sums: Mapping[str, Sum], state: TrainState, origin: Origin, previous: str
) -> Certificate:
    """Return the certificate of a checkpoint. sums: by kind, of all tensors of that kind."""
    return Certificate(
        **{kind: digest_of_tensors(tensors, kind, sums[kind]) for kind in KINDS},
        position=digest_of_position(state),
        previous=previous,
        **origin.model_dump(),
    )


def digest_of_tensors(tensors: Mapping[str, TensorEntry], kind: str, total: Sum) -> str:
    """Return the digest of the tensors of a kind: their names, types and shapes, and the sum of their elements."""
    listed = {name: [entry.dtype, entry.shape] for name, entry in tensors.items() if kind_of(name) == kind}
    return _digest_of({"tensors": listed, "sum": [f"{number:016x}" for number in total]})


def digest_of_position(state: TrainState) -> str:
    """Return the digest of what decides how training continues beside the tensors; not of times and of metrics."""
    stop = state.stop.model_dump(exclude={"trained_s"})
    return _digest_of({"step": state.step, "samples_seen": state.samples_seen, "scaler": state.scaler, "stop": stop})


def digest_of_config(config: RunConfig, code: Mapping[str, str]) -> str:
    """Return the digest of the settings that decide the bits of a step. code: path -> SHA-256; paths do not count."""
    settings = config.model_dump(mode="json")
    for key in PATHS:
        settings = replaced(settings, key.split("."), lambda path: "" if path else path)
    decisive = {section: values for section, values in settings.items() if section not in UNDECIDING}
    launch = {name: settings["launch"][name] for name in ("device", "threads_per_rank")}
    return _digest_of({**decisive, "launch": launch, "code": sorted(code.values())})


@functools.lru_cache(maxsize=8)  # what a run is computed from does not change
def origin_of(run: RunDir) -> Origin:
    """Return what the steps of a run are computed from; zeros for records that the directory does not have."""
    identity = read_record(run.identity, RunIdentity) if run.identity.exists() else None
    shards = run.shards / "manifest.json"
    origin = {}
    if run.config.exists():
        origin["config"] = digest_of_config(read_config(run, "given"), identity.code_sha256 if identity else {})
    if identity and identity.model_sha256:
        origin["model"] = identity.model_sha256
    if shards.exists():
        origin["data"] = digest_of_data(read_record(shards, ShardManifest))
    return Origin(**origin)


def digest_of_data(shards: ShardManifest) -> str:
    """Return the digest of the rows: of each file of the shards."""
    splits = ("train", "evaluation", "test")
    return _digest_of({split: [[file.rows, file.sha256] for file in getattr(shards, split)] for split in splits})


def _digest_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
