"""The class of an ending, where only the error's text decides."""

from __future__ import annotations

import pytest

from onward.tasks.classification import Evidence, classify
from onward.trainer.run.records import RankError


@pytest.mark.parametrize("what", ["CheckpointError: step 7 could not be saved", "RuntimeUnavailable"])
@pytest.mark.parametrize("why", ["No space left on device", "File too large", "Read-only file system"])
def test_what_cannot_be_written_is_a_matter_of_the_storage_and_not_of_the_user(what: str, why: str) -> None:
    known = {"attempt": 1, "rank": 0, "host": "h0", "step": 7, "traceback": "", "at_ms": 0}
    error = RankError.model_validate(known | {"cause": f"{what}: {why}: /r/c"})
    left = {"result": None, "reason": "exited", "returncode": 4, "oom_kills": 0, "output": "", "ending": ""}
    assert classify(Evidence(**left, error=error)) == "storage"  # type: ignore[arg-type]
