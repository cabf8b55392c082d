"""What an exporting process reads of its run, each file once: configuration, signature, and the model that came in.

config.json, resolved.json ── configs ────┐
model.onnx ── source ── signature ────────┴── evaluation data, export, preprocessing.json

The written file is read again on purpose: that it can be, and holds the weights, is what is verified. The original is
read by onnx.checker, which takes files of any size, and once more for the report, because the graph that was read is by
then the one that was written, and a second copy would double the memory of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.resolve import resolved_for
from onward.trainer.data.schema.signature import Signature, digest_of_files, read_source, training_signature
from onward.trainer.data.storage.shards import Split
from onward.trainer.data.text.text_checks import length_limit
from onward.trainer.data.text.text_columns import text_columns
from onward.trainer.errors import ExportRefused
from onward.trainer.onnx_graph.files.source_model import SourceModel
from onward.trainer.onnx_import.write_back import content_digest
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import RunIdentity, read_record


@dataclass(frozen=True)
class RunAsRead:
    """A run that is exported."""

    configs: Mapping[Split, RunConfig]
    """Split that is evaluated -> the configuration, completed from the shards."""
    signature: Signature
    source: SourceModel
    """The original; its graph is that of the file until `open_trainable` changes it."""
    content: str
    """`content_digest` of the original."""
    text_limit: int
    """Tokens that a sample may have; 0 = no limit, or no text."""

    @property
    def config(self) -> RunConfig:
        """The configuration, completed for the evaluation data."""
        return self.configs["evaluation"]

    @classmethod
    def of(cls, run: RunDir, config: RunConfig | None = None) -> RunAsRead:
        """Read a run. config: what `read_config` has read, None = it is read here.

        Raises ExportRefused when the original is gone or changed since the run began, and the errors of `resolved_for`
        and `read_training_signature`.
        """
        config = config or read_config(run)
        splits: tuple[Split, ...] = ("evaluation", "test") if config.data.test_source else ("evaluation",)
        configs = resolved_for(run, config, splits)
        source = _unchanged_source(config.model.path, read_record(run.identity, RunIdentity))
        signature = training_signature(source, config.model)
        text = text_columns(config.data, config.losses, config.model, signature)
        limit = length_limit(text, source.proto.graph)[0] if text else 0
        return cls(configs, signature, source, content_digest(source.proto), limit)


def _unchanged_source(path: Path, identity: RunIdentity) -> SourceModel:
    """Read the original. Raises ExportRefused when the file is gone or changed since the run began."""
    # the weights are written into this graph by name, so it must be the one that was trained
    source = read_source(path) if path.is_file() else None
    found = digest_of_files(source.files) if source else "gone"
    if source is None or found != identity.model_sha256:
        raise ExportRefused(
            f"{path} changed since the run began (SHA-256 {identity.model_sha256[:12]}, now {found[:12]}); "
            "put the original back: its graph is needed to write the weights into"
        )
    return source
