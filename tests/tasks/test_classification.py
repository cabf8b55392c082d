"""The class of an ending, where only the error's text decides: from its record, or from what the rank printed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from onward.infra.job.job import Outcome
from onward.infra.job.launcher import LauncherEnding
from onward.tasks.attempt import Attempt
from onward.tasks.classification import Evidence, classify
from onward.trainer.run.directory import read_config
from onward.trainer.run.records import RankError, write_record
from tests.support.graphs import tiny_conv_net
from tests.support.runs import make_run, tiny_images


@pytest.mark.parametrize("what", ["CheckpointError: step 7 could not be saved", "StorageUnavailable"])
@pytest.mark.parametrize("why", ["No space left on device", "File too large", "Read-only file system"])
def test_what_cannot_be_written_is_a_matter_of_the_storage_and_not_of_the_user(what: str, why: str) -> None:
    known = {"attempt": 1, "rank": 0, "host": "h0", "step": 7, "traceback": "", "at_ms": 0}
    error = RankError.model_validate(known | {"cause": f"{what}: {why}: /r/c"})
    said = LauncherEnding("mpirun")
    left = {"result": None, "reason": "exited", "returncode": 4, "oom_kills": 0, "said": said, "ending": ""}
    assert classify(Evidence(**left, error=error)) == "storage"  # type: ignore[arg-type]


FULL = "OSError: [Errno 27] File too large"
LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"


CHAINED = (
    "\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n"
)
"""What follows the first error of a chain, which has no traceback if it was only remembered."""


def printed(rank: int, cause: str) -> str:
    """What the exception hook of a rank prints."""
    return f'rank {rank}: Traceback (most recent call last):\n  File "loop.py", line 7, in train\n    save()\n{cause}\n'


@pytest.mark.parametrize(
    ("output", "recorded", "kind", "rank"),
    [
        (printed(0, FULL), {}, "storage", 0),
        (printed(0, LOST) + printed(1, FULL), {}, "storage", 1),
        (f"rank 0: {FULL}\n{CHAINED}  File ...\n{FULL}\n", {}, "storage", 0),
        (f"rank 0: done\nrank 0: epoch: 3\n{printed(1, FULL)}", {}, "storage", 1),
        (printed(1, FULL) + printed(0, LOST), {0: LOST}, "storage", 1),
        (printed(1, FULL), {0: "DataError: row 7"}, "data_error", 0),
        (printed(1, LOST), {}, "rank_lost", 1),
        (printed(0, "onward.trainer.errors.DataError: row 7"), {}, "data_error", 0),
    ],
)
def test_a_rank_that_could_not_write_its_error_is_known_by_what_it_printed(
    output: str, recorded: dict[int, str], kind: str, rank: int, tmp_path: Path
) -> None:
    train = {"global_batch_size": 8, "num_steps": 1}
    run = make_run(tmp_path, tiny_conv_net(), tiny_images(16), parallel={"data": 2}, train=train)
    config = read_config(run)
    attempt = Attempt.begin(run, config)
    for each, cause in recorded.items():
        known = {"attempt": 1, "rank": each, "host": "h0", "step": 5, "traceback": "", "at_ms": 1}
        write_record(run.rank_error(1, each), RankError(**known, cause=cause, secondary=cause == LOST))
    run.log(1).write_text(output)
    ending = attempt.end(Outcome(70, "exited", 9.0, time.time_ns() // 1_000_000), config)
    assert (ending.kind, ending.rank) == (kind, rank), ending.sentence
