"""Each way in which text becomes samples gives the same bits on any number of ranks, from any position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.shards import Shards
from tests.support.text_paths import PATHS, write_text_path
from tests.trainer.data.text.test_tokenized_rows import configured, problems, sharded

STEP = 8


def samples(config: RunConfig, shards: Shards, replicas: int, first: int, last: int) -> list[Any]:
    """(row, inputs, labels) of the samples at positions first .. last, each row without what the batch adds to it."""
    signature = read_training_signature(config.model)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": replicas})})
    found = []
    for position in range(first, last, STEP):
        for replica in range(replicas):
            batches = Batches(
                shards, config, signature, replica=replica, num_replicas=replicas, device=torch.device("cpu")
            )
            for batch in batches.take(position, min(STEP, last - position)):
                values = [*batch.inputs, *(each for each in batch.labels if each is not None)]
                lengths = [len(row) for row in shards.read(batch.rows)["input_ids"]]
                for at in range(0 if batch.is_padding else batch.size):
                    mask = batch.inputs[1][at] > 0 if len(batch.inputs) > 1 else None
                    kept = mask if mask is not None and mask.ndim == 1 else torch.arange(lengths[at])
                    tokens = [(value[at][kept] if value[at].ndim == 1 else value[at]).tolist() for value in values]
                    found.append((int(batch.rows[at]), *tokens))
            batches.close()
    return found


@pytest.mark.parametrize("name", PATHS)
def test_samples_are_the_same_for_any_number_of_replicas_and_from_any_position(tmp_path: Path, name: str) -> None:
    path = write_text_path(name, tmp_path, rows=60)
    train = {"num_epochs": 2, "global_batch_size": STEP, "gradient_accumulation_steps": 2, "seed": 3}
    config = configured(tmp_path, path.proto, dict(path.data), train=train)
    assert problems(config) == []
    shards = open_shards(sharded(config, tmp_path)[0], "train")
    last = min(5 * STEP, 2 * shards.num_rows)
    alone = samples(config, shards, 1, 0, last)
    assert len(alone) == last
    assert samples(config, shards, 2, 0, last) == alone
    for first in range(STEP, last, STEP):  # what a run sees that was resumed there
        assert samples(config, shards, 2, first, min(first + STEP, last)) == alone[first : first + STEP]
