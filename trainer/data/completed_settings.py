"""Complete a configuration with what its files say: columns in place of patterns, the input of audio, the scores that
losses read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onward.trainer.config.losses import LossConfig, key_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.section import as_tuple
from onward.trainer.config.sections.audio import AudioConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.scores_read import with_scores
from onward.trainer.data.tables.column_patterns import expanded, is_pattern, matching
from onward.trainer.data.tables.table_columns import INDICATOR
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session

UNSAID_LENGTH = 64
"""Of an axis that a file leaves open, where any length will do."""


def completed(config: RunConfig, local: RunConfig | None = None) -> RunConfig:
    """Return the configuration as a new run keeps it. What is completed already stays as it is.

    local: the same configuration with local copies in place of URLs. Raises the errors of `with_columns`
    and `with_audio_input`.
    """
    return with_scores(with_inputs(config, local), local)


def with_inputs(config: RunConfig, local: RunConfig | None = None) -> RunConfig:
    """Return the configuration with what feeds the inputs, columns in place of patterns and the input of audio, and
    with the number of queries of a loss of sets.

    local: as in `completed`, and so are the errors.
    """
    local = local or config
    entries = with_queries(config.loss, config.losses, local.model)
    if entries != config.loss:
        config = config.model_copy(update={"loss": entries})
    data = with_audio_input(with_columns(config.data, config.losses, local.data), local.model)
    return config if data is config.data else config.model_copy(update={"data": data})


def with_queries(
    given: tuple[LossConfig, ...], losses: Sequence[LossConfig], model: ModelConfig
) -> tuple[LossConfig, ...]:
    """Return [loss] with the number of queries of losses of sets, as the file says it.

    given, losses: as in the configuration, and filled in. model: with local copies in place of URLs. Raises ConfigError
    where the file leaves it open.
    """
    entries = list(given)
    for place, loss in enumerate(losses):
        if loss.name != "set_classes" or loss.num_queries:
            continue
        queries = _queries(model, loss.outputs[0])
        if not queries and loss.scores == "sigmoid":
            continue  # it only says that images have no more objects
        if not queries:
            raise ConfigError(
                f"the file does not say how many boxes {loss.outputs[0] or 'its first output'} predicts for an image; "
                f"set {key_of(losses, place, 'num_queries')}, such as 100"
            )
        # the short form of one loss has no entry
        entries = entries or [LossConfig()]
        entries[place] = entries[place].model_copy(update={"num_queries": queries})
    return tuple(entries)


def _queries(model: ModelConfig, name: str) -> int | None:
    """Return the length of axis 1 of an output [batch, queries, classes], which exporters rarely declare; None where
    the file neither says nor computes it."""
    signature = read_training_signature(model)
    output = signature.output(name)
    dims = (output.shape if output else None) or ()
    if len(dims) == 3 and dims[1]:
        return dims[1]
    try:
        feeds = {}
        for info in signature.inputs:
            sample = info.sample_shape or ()
            feeds[info.name] = np.zeros([1, *(dim or UNSAID_LENGTH for dim in sample)], info.dtype)
        found = open_session(model.path).run([output.name if output else name], feeds)[0]
    except Exception:  # onnxruntime's errors have no common base, and others report a file that it does not run
        return None
    return int(found.shape[1]) if found.ndim == 3 else None


def with_columns(data: DataConfig, loss: Sequence[LossConfig], local: DataConfig) -> DataConfig:
    """Return [data] with columns in place of patterns; the data is read only if there are any.

    local: [data] with local copies in place of URLs. Raises ConfigError for patterns that match no column, or a label,
    and DataError when the data cannot be read.
    """
    if not any(is_pattern(name) for names in (data.label, *data.inputs.values()) for name in as_tuple(names)):
        return data
    columns = list(infer_schema(local))
    columns += [name + INDICATOR for name in matching(data.table.indicators, columns)]
    labels = {name for each in loss for name in each.columns}
    return expanded(data, columns, labels)


def with_audio_input(data: DataConfig, model: ModelConfig) -> DataConfig:
    """Return [data] with the column of [data.audio] in data.inputs, if one input of the model alone can take it.

    Unchanged where an input is named like the column or reads it already, and where no input or several have as many
    axes as the audio; the check of the columns says so. model: with local copies in place of URLs. Raises
    UnsupportedModel, and ConfigError where the graph does not allow the configured surgery.
    """
    if data.audio is None or data.audio.column in data.inputs.values():
        return data
    fed = read_training_signature(model).fed
    if any(info.name == data.audio.column for info in fed):
        return data
    candidates = []
    for info in fed:
        is_float = "float" in info.dtype
        has_axes_of_clips = len(info.shape or ()) == 1 + _axes(data.audio)
        if is_float and has_axes_of_clips and info.name not in data.inputs:
            candidates.append(info.name)
    # of several candidates any choice would be a guess: the check of the columns asks the user
    if len(candidates) != 1:
        return data
    return data.model_copy(update={"inputs": {**data.inputs, candidates[0]: data.audio.column}})


def _axes(audio: AudioConfig) -> int:
    """Return the axes of one clip as the model gets it."""
    return (2 if audio.features == "log_mel" else 1) + audio.channel_axis
