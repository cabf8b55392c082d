"""Complete a configuration with what its files say: columns in place of patterns, the input of audio, the scores that
losses read."""

from __future__ import annotations

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.audio import AudioConfig
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.scores_read import with_scores
from onward.trainer.data.tables.column_patterns import as_tuple, expanded, is_pattern, matching
from onward.trainer.data.tables.table_columns import INDICATOR


def completed(config: RunConfig, local: RunConfig | None = None) -> RunConfig:
    """Return the configuration as a new run keeps it. What is completed already stays as it is.

    local: the same configuration with local copies in place of URLs. Raises the errors of `with_columns`
    and `with_audio_input`.
    """
    return with_scores(with_inputs(config, local), local)


def with_inputs(config: RunConfig, local: RunConfig | None = None) -> RunConfig:
    """Return the configuration with what feeds the inputs: columns in place of patterns, and the input of audio.

    local: as in `completed`, and so are the errors.
    """
    return with_audio_input(with_columns(config, local), local)


def with_columns(config: RunConfig, local: RunConfig | None = None) -> RunConfig:
    """Return the configuration with columns in place of patterns; the data is read only if there are any.

    local: the same configuration with local copies in place of URLs. Raises ConfigError for patterns that match no
    column, or a label, and DataError when the data cannot be read.
    """
    data = config.data
    if not any(is_pattern(name) for names in (data.label, *data.inputs.values()) for name in as_tuple(names)):
        return config
    columns = list(infer_schema((local or config).data))
    columns += [name + INDICATOR for name in matching(data.table.indicators, columns)]
    labels = {name for each in config.loss for name in each.columns}
    return config.model_copy(update={"data": expanded(data, columns, labels)})


def with_audio_input(config: RunConfig, local: RunConfig | None = None) -> RunConfig:
    """Return the configuration with the column of [data.audio] in data.inputs, if one input alone can take it.

    Unchanged where an input is named like the column or reads it already, and where no input or several have as many
    axes as the audio; the check of the columns says so. local: as `config`, with local copies in place of URLs. Raises
    UnsupportedModel, and ConfigError where the graph does not allow the configured surgery.
    """
    data = config.data
    if data.audio is None or data.audio.column in data.inputs.values():
        return config
    fed = read_training_signature((local or config).model).fed
    if any(info.name == data.audio.column for info in fed):
        return config
    candidates = []
    for info in fed:
        is_float = "float" in info.dtype
        has_axes_of_clips = len(info.shape or ()) == 1 + _axes(data.audio)
        if is_float and has_axes_of_clips and info.name not in data.inputs:
            candidates.append(info.name)
    # of several candidates any choice would be a guess: the check of the columns asks the user
    if len(candidates) != 1:
        return config
    inputs = {**data.inputs, candidates[0]: data.audio.column}
    return config.model_copy(update={"data": data.model_copy(update={"inputs": inputs})})


def _axes(audio: AudioConfig) -> int:
    """Return the axes of one clip as the model gets it."""
    return (2 if audio.features == "log_mel" else 1) + audio.channel_axis
