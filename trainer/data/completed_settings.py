"""Complete a configuration with what its files say: columns in place of patterns, the input of audio, the scores that
losses read."""

from __future__ import annotations

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.audio.audio_input import with_audio_input
from onward.trainer.data.scores_read import with_scores
from onward.trainer.data.tables.chosen_columns import with_columns


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
