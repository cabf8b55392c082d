"""The examples of `onward example` on two ranks: the samples of one rank, bit for bit, and the same training.

The promise is that of docs/reference/promises.md: two replicas equal one replica with twice the batch, to rounding.
Micro-batches are the same ones on both layouts, because BatchNormalization sees one micro-batch at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onward.flows.examples.folders import write_example
from onward.trainer.config.loading import load_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.schema.signature import model_digest, read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import RunIdentity, write_record
from tests.equivalence.layouts import TOLERANCE
from tests.support.ranks import run_ranks
from tests.support.runs import assert_close, final_tensors, losses

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
STEPS = 8


def example_run(folder: Path, name: str, replicas: int) -> RunDir:
    """A run of an example with its own settings, in which a step has two micro-batches on all ranks together."""
    config = load_config(
        folder.parent / name / f"{name}.toml",
        [
            ("train.num_epochs", 0),
            ("train.num_steps", STEPS),
            ("train.gradient_accumulation_steps", 2 // replicas),
            ("parallel.data", replicas),
            ("launch.device", "cpu"),
            ("launch.threads_per_rank", 1),
            ("checkpoint.period", STEPS),
        ],
    )
    run = RunDir(folder / "run")
    write_record(run.config, config)
    digest = model_digest(config.model.path)
    write_record(run.identity, RunIdentity(run_id="run", name=name, created_at="2026-01-01", model_sha256=digest))
    shards, _, _ = make_training_shards(config, folder.parent / "shards")
    run.shards.symlink_to(shards, target_is_directory=True)
    return run


def samples(run: RunDir, config: RunConfig, replicas: int) -> list[list[torch.Tensor]]:
    """Each micro-batch of the run in the order of the stream: its inputs and labels."""
    signature, size, found = read_training_signature(config.model), config.train.global_batch_size, []
    device = torch.device("cpu")
    ranks = [
        Batches(open_shards(run.shards, "train"), config, signature, replica=each, num_replicas=replicas, device=device)
        for each in range(replicas)
    ]
    for step in range(STEPS):
        for rank in ranks:
            for batch in rank.take(step * size, size):
                found.append([*batch.inputs, *(each for each in batch.labels if each is not None)])
    for rank in ranks:
        rank.close()
    return found


@pytest.mark.parametrize("name", ["images", "reviews"])
def test_an_example_on_two_ranks_reads_the_bits_that_one_reads_and_trains_the_same_weights(
    name: str, tmp_path: Path
) -> None:
    write_example(name, tmp_path / name)
    seen: dict[int, Any] = {}
    runs = {replicas: example_run(tmp_path / str(replicas), name, replicas) for replicas in (1, 2)}
    for replicas, run in runs.items():
        seen[replicas] = samples(run, read_config(run), replicas)
        run_ranks(replicas, "tests.equivalence.layouts:train_all", [str(run.root)], timeout_s=300)
    assert len(seen[1]) == len(seen[2]) == 2 * STEPS
    for one, two in zip(seen[1], seen[2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for step, loss in losses(runs[1]).items():
        assert losses(runs[2])[step] == pytest.approx(loss, rel=TOLERANCE), step
    assert_close(final_tensors(runs[2]), final_tensors(runs[1]), TOLERANCE)
