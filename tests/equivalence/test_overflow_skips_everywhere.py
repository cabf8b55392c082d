"""Promise 9: an fp16 overflow on one rank skips the update on all ranks, and no sample, step or rate is lost by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.run.directory import RunDir, read_config
from tests.support import graphs
from tests.support.runs import Array, events, losses, make_run, tiny_images, tiny_text, train_run

BATCH, NUM_STEPS = 8, 6


def with_planted_rows(columns: dict[str, Array], shape: tuple[int, ...], planted: Array) -> dict[str, Array]:
    """Targets for a regression; those of the planted rows are so far off that their fp16 gradients overflow."""
    labels = np.random.default_rng(1).normal(0, 1, (len(columns["label"]), *shape)).astype(np.float32)
    labels[planted] = 3e4
    return columns | {"label": labels}


MODELS: dict[str, Callable[[Array], tuple[onnx.ModelProto, dict[str, Array]]]] = {
    "conv net": lambda planted: (graphs.tiny_conv_net(), with_planted_rows(tiny_images(80), (4,), planted)),
    "transformer": lambda planted: (graphs.tiny_transformer(), with_planted_rows(tiny_text(80), (12, 32), planted)),
}


def first_meeting(run: RunDir, seed: int) -> tuple[int, int]:
    """(step, replica) that meet a planted row first when the order is drawn from `seed`; (0, 0) if none does."""
    shards, config = open_shards(run.shards, "train"), read_config(run)
    config = config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})})
    met = []
    for replica in (0, 1):
        batches = Batches(
            shards,
            config,
            read_training_signature(config.model),
            replica=replica,
            num_replicas=2,
            device=torch.device("cpu"),
        )
        for step in range(1, NUM_STEPS + 1):
            for batch in batches.take((step - 1) * BATCH, BATCH):
                assert batch.labels[0] is not None
                if batch.labels[0].max() > 1e4:
                    met.append((step, replica))
        batches.close()
    return min(met, default=(0, 0))


@pytest.mark.mpi
@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_an_overflow_on_one_rank_skips_the_update_on_all(model: str, replica: int, tmp_path: Path) -> None:
    proto, columns = MODELS[model](np.array([5, 60]))
    run = make_run(
        tmp_path,
        proto,
        columns,
        model={"loss": "mse"},
        train={"global_batch_size": BATCH, "num_steps": NUM_STEPS},
        precision={"compute": "fp16", "loss_scale": ("dynamic", 4096.0)},
        parallel={"data": 2},
        checkpoint={"period": 1, "keep_newest": 100},
    )
    meetings = {seed: first_meeting(run, seed) for seed in range(20)}
    seed, step = next((seed, step) for seed, (step, where) in meetings.items() if where == replica and step > 1)
    run.config.write_text(run.config.read_text().replace('"seed": 0', f'"seed": {seed}'))

    # every step ends with a checkpoint, which compares the bits of all weights and moments over the ranks
    result = train_run(run)
    assert (result.status, result.step, result.samples_seen) == ("done", NUM_STEPS, NUM_STEPS * BATCH)

    skipped = [e for e in events(run, "scalars") if e.values.get("train/skipped")]
    assert skipped
    assert skipped[0].step == step, "only the planted row overflows, on the one rank that has it"
    scales = [event.values["train/loss_scale"] for event in skipped]
    assert scales == [4096.0 / 2**n for n in range(1, len(scales) + 1)], "each overflow halves the scale, once"
    assert sorted(losses(run)) == list(range(1, NUM_STEPS + 1)), "an overflow takes no step's number: it is tried again"
