"""Raw text trains alike whoever computes it: killed and resumed to the bit, and on two ranks as on one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.flows.run_state.run_status import held_out_text
from onward.tasks.shard_data import shard_data
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir
from tests.support.graphs import tiny_token_classifier, tiny_transformer
from tests.support.runs import (
    assert_close,
    assert_equal_bits,
    events,
    final_tensors,
    losses,
    make_run,
    train_run,
    train_until,
)
from tests.support.text_paths import PATHS, write_text_path
from tests.support.texts import bert_tokenizer, gpt2_tokenizer, sentences

SETTINGS: dict[str, Any] = {
    "train": {"global_batch_size": 8, "num_steps": 9, "evaluation_period": 4, "seed": 3},
    "optimizer": {"learning_rate": 3e-3},
    "checkpoint": {"period": 2},
}


def text_run(folder: Path, task: str, **sections: Any) -> RunDir:
    """A run on sentences in a text file: a masked or a causal language model."""
    folder.mkdir()
    (folder / "sentences.txt").write_text("\n".join(sentences(80)))
    text = {"tokenizer": str(folder / "tokenizer.json"), "task": task, "documents": "line", "max_length": 16}
    (bert_tokenizer if task == "masked" else gpt2_tokenizer)(folder / "tokenizer.json")
    graph = tiny_token_classifier(vocab_size=400) if task == "masked" else tiny_transformer(vocab_size=400, dropout=0.1)
    return make_run(
        folder, graph, {}, **SETTINGS | sections, data={"source": str(folder / "sentences.txt"), "text": text}
    )


def assert_kills_change_nothing(killed: RunDir, undisturbed: RunDir, *, at: tuple[int, ...]) -> None:
    """Kill a rank of two at each of the steps, train on to the end, and compare with the undisturbed run."""
    for step in at:
        train_until(killed, lambda event, step=step: event.step >= step and event.kind == "scalars", rank=step % 2)
        assert not killed.result(killed.current_attempt).exists()
    assert train_run(killed).step == 9
    assert_equal_bits(final_tensors(killed), final_tensors(undisturbed))
    assert losses(killed) == losses(undisturbed)


@pytest.mark.mpi
@pytest.mark.parametrize("task", ["masked", pytest.param("causal", marks=pytest.mark.slow)])
def test_masks_and_windows_are_those_of_an_undisturbed_run_after_any_kill(tmp_path: Path, task: str) -> None:
    undisturbed = text_run(tmp_path / "undisturbed", task, parallel={"data": 2})
    train_run(undisturbed)
    killed = text_run(tmp_path / "killed", task, parallel={"data": 2})
    assert_kills_change_nothing(killed, undisturbed, at=(1, 4))


@pytest.mark.slow
@pytest.mark.mpi
def test_two_ranks_mask_what_one_rank_masks(tmp_path: Path) -> None:
    alone = text_run(tmp_path / "alone", "masked")
    train_run(alone)
    both = text_run(tmp_path / "both", "masked", parallel={"data": 2})
    train_run(both)
    assert_close(final_tensors(both), final_tensors(alone), 2e-5)


def path_run(folder: Path, name: str, **sections: Any) -> RunDir:
    """A run on one of the ways in which text becomes samples, ragged: 8 samples in micro-batches of 2 and less."""
    path = write_text_path(name, folder)
    # Adam would divide the gradients of biases of keys, which are zero but for rounding, by their own size
    settings = SETTINGS | {"optimizer": {"name": "sgd", "learning_rate": 0.05}} | sections
    return make_run(folder, path.proto, {}, **settings, data=path.data)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_each_way_from_text_to_samples_trains_alike_on_one_rank_on_two_and_after_kills(
    tmp_path: Path, name: str
) -> None:
    alone = path_run(tmp_path / "alone", name)
    train_run(alone)
    both = path_run(tmp_path / "both", name, parallel={"data": 2})
    train_run(both)
    assert_close(final_tensors(both), final_tensors(alone), 2e-5)
    killed = path_run(tmp_path / "killed", name, parallel={"data": 2})
    assert_kills_change_nothing(killed, both, at=(1, 5))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("packing", ["causal, joined", "causal, separate", "causal, single"])
def test_bits_per_byte_are_the_bits_of_all_targets_over_the_bytes_of_their_text_on_any_ranks(
    tmp_path: Path, packing: str
) -> None:
    found = []
    for ranks in (1, 2):
        metrics = ["bits_per_byte", "perplexity"]
        train = SETTINGS["train"] | {"evaluation_batch_size": 3}
        run = path_run(tmp_path / f"{ranks}", packing, parallel={"data": ranks}, metrics=metrics, train=train)
        train_run(run)
        shards = open_shards(run.shards, "evaluation")
        rows = shards.read(np.arange(shards.num_rows))
        num_bytes = int(np.sum(rows["input_ids/bytes"]))
        num_targets = sum(int((np.asarray(row) != -100).sum()) for row in rows["label"])
        for event in events(run, "evaluation"):
            values = event.values
            bits = values["evaluation/loss"] / math.log(2) * num_targets
            assert values["evaluation/bits_per_byte"] == pytest.approx(bits / num_bytes, rel=1e-9)
        found.append([event.values["evaluation/bits_per_byte"] for event in events(run, "evaluation")])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][-1] < found[0][0]


def test_tokens_are_no_bytes_of_text_that_a_report_could_compress(tmp_path: Path) -> None:
    assert held_out_text(text_run(tmp_path / "run", "masked")) == b""
    assert held_out_text(text_run(tmp_path / "other", "causal")) == b""


def test_another_tokenizer_is_noticed_when_a_run_goes_on(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", "masked")
    run.begin_attempt()
    bert_tokenizer(tmp_path / "run" / "tokenizer.json", size=300)
    with pytest.raises(ConfigError, match="the data changed since the run began"):
        shard_data.fn(run)
