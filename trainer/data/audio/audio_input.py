"""Find the input of the model that [data.audio] feeds, where no setting names it.

[data.audio] log_mel, inputs mel [B, 1, 40, 101], speaker [B]      data.inputs = { mel = "audio" }
"""

from __future__ import annotations

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.audio import AudioConfig
from onward.trainer.data.schema.signature import read_training_signature


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
