"""The jobs of new users by the pages alone, beside the same model trained by hand: the file is not worse.

Each job exports a small model, lets `onward init` propose a configuration, trains it with `onward run`, and scores the
trained file on rows that neither has seen. The other model is a loop of some thirty lines of plain PyTorch or
scikit-learn on the same rows: as many updates, of as many rows, at the same learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from onward.trainer.run.directory import RunDir, read_config
from tests.stories.pictures import PICTURES
from tests.stories.sounds import SOUNDS
from tests.stories.story import Recipe, Story, Trained
from tests.stories.tables import TABLES
from tests.stories.words import WORDS
from tests.support.workshop import Workshop

pytestmark = [
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

STORIES: dict[str, Story] = {**PICTURES, **TABLES, **WORDS, **SOUNDS}
MOST_STANDARD_ERRORS = 3.0
"""By how many standard errors of the mean score by hand the file may lie below it. Both are trained once, on another
order of rows, and measured on a few hundred rows."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """One home for all jobs, as one user has, whose Prefect server keeps running."""
    workshop = Workshop(tmp_path_factory.mktemp("stories"))
    with workshop.server():
        yield workshop
    workshop.close()


@pytest.mark.parametrize("name", STORIES)
def test_a_job_of_a_new_user_is_not_worse_than_the_same_model_trained_by_hand(
    name: str, workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    story, folder = STORIES[name], workshop.root / name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    story.write(folder)
    config = folder / f"{folder.name}.toml"
    if story.config:
        config.write_text(story.config)
    else:
        words = [str(folder / "model.onnx"), str(folder / story.data), *story.given, "-o", str(config)]
        written = workshop.onward("init", *words)
        assert written["questions"] == []
    facts = workshop.onward("run", str(config), "launch.device=cpu", limit_s=800)
    assert facts["state"] == "exported"

    settings = read_config(RunDir(Path(facts["directory"])))
    assert isinstance(settings.optimizer.learning_rate, float)
    recipe = Recipe(facts["step"], settings.train.global_batch_size, settings.optimizer.learning_rate)
    model = Path(facts["model"])
    scores, others = story.scores(Trained(workshop, folder, model)), story.by_hand(folder, recipe)
    assert len(scores) == len(others)
    error = float(np.std(others) / np.sqrt(len(others)))
    with capsys.disabled():
        print(f"\n{name}: {scores.mean():.4f}, by hand {others.mean():.4f} +- {error:.4f}, {recipe}")
    assert others.mean() > story.at_least, "the loop by hand has learned"
    assert scores.mean() >= others.mean() - MOST_STANDARD_ERRORS * error
    for kind in story.variants:
        smaller = story.scores(Trained(workshop, folder, model.with_suffix(f".{kind}.onnx")))
        assert smaller.mean() >= scores.mean() - MOST_STANDARD_ERRORS * error, kind
