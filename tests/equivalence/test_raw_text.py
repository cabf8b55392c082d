"""Raw text trains alike whoever computes it: killed and resumed to the bit, and on two ranks as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onward.flows.run_status import held_out_text
from onward.tasks.shard_data import shard_data
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir
from tests.support.graphs import tiny_token_classifier, tiny_transformer
from tests.support.runs import (
    assert_close,
    assert_equal_bits,
    final_tensors,
    losses,
    make_run,
    train_run,
    train_until,
)
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


@pytest.mark.mpi
@pytest.mark.parametrize("task", ["masked", pytest.param("causal", marks=pytest.mark.slow)])
def test_masks_and_windows_are_those_of_an_undisturbed_run_after_any_kill(tmp_path: Path, task: str) -> None:
    undisturbed = text_run(tmp_path / "undisturbed", task, parallel={"data": 2})
    train_run(undisturbed)
    killed = text_run(tmp_path / "killed", task, parallel={"data": 2})
    for step in (1, 4):
        train_until(killed, lambda event, step=step: event.step >= step and event.kind == "scalars", rank=step % 2)
        assert not killed.result(killed.current_attempt).exists()
    assert train_run(killed).step == 9
    assert_equal_bits(final_tensors(killed), final_tensors(undisturbed))
    assert losses(killed) == losses(undisturbed)


@pytest.mark.mpi
def test_two_ranks_mask_what_one_rank_masks(tmp_path: Path) -> None:
    alone = text_run(tmp_path / "alone", "masked")
    train_run(alone)
    both = text_run(tmp_path / "both", "masked", parallel={"data": 2})
    train_run(both)
    assert_close(final_tensors(both), final_tensors(alone), 2e-5)


def test_tokens_are_no_bytes_of_text_that_a_report_could_compress(tmp_path: Path) -> None:
    assert held_out_text(text_run(tmp_path / "run", "masked")) == b""
    assert held_out_text(text_run(tmp_path / "other", "causal")) == b""


def test_another_tokenizer_is_noticed_when_a_run_goes_on(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", "masked")
    run.begin_attempt()
    bert_tokenizer(tmp_path / "run" / "tokenizer.json", size=300)
    with pytest.raises(ConfigError, match="the data changed since the run began"):
        shard_data.fn(run)
