"""Masked tokens are a function of seed and position: the same for any layout, never special ones, 80 / 10 / 10."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batches, evaluation_batches, one_batch
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.text.masking import describe_masks
from onward.trainer.data.text.text_checks import open_tokenized_rows
from tests.support.graphs import tiny_token_classifier
from tests.support.texts import bert_tokenizer, gpt2_tokenizer, sentences, write_csv
from tests.trainer.data.text.test_tokenized_rows import configured, problems, sharded

Rows = dict[tuple[int, int], tuple[tuple[int, ...], ...]]


def masked(folder: Path, **changes: Any) -> RunConfig:
    """A masked language model over sentences in a CSV file, without a column of labels."""
    if not (folder / "tokenizer.json").exists():
        bert_tokenizer(folder / "tokenizer.json")
        write_csv(folder / "data.csv", ["text"], [[text] for text in sentences(120)])
    text = {"task": "masked", "mask_probability": 0.4} | changes.pop("text", {})
    train = {"num_epochs": 2, "global_batch_size": 8, "gradient_accumulation_steps": 2}
    return configured(folder, tiny_token_classifier(vocab_size=400), {"text": text}, train=train, **changes)


def stream(config: RunConfig, directory: Path, replicas: int, num_samples: int = 150) -> list[tuple[Any, ...]]:
    """(row, ids, labels) of each sample of a stream in order, without padding."""
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": replicas})})
    shards, signature = open_shards(directory, "train"), read_training_signature(config.model)
    found = []
    for position in range(0, num_samples, 8):
        for replica in range(replicas):
            batches = Batches(
                shards, config, signature, replica=replica, num_replicas=replicas, device=torch.device("cpu")
            )
            for batch in batches.take(position, min(8, num_samples - position)):
                ids, labels = batch.inputs[0], batch.labels
                labels = labels[0] if isinstance(labels, tuple) else labels
                assert labels is not None
                for at in range(0 if batch.is_padding else batch.size):
                    length = int(batch.inputs[1][at].sum())
                    sample = (ids[at, :length].tolist(), labels[at, :length].tolist())
                    assert (labels[at, length:] == -100).all()
                    found.append((int(batch.rows[at]), *sample))
            batches.close()
    return found


@pytest.mark.parametrize("text", [{}, {"task": "masked_words"}, {"packing": "joined", "max_length": 16}])
def test_masks_are_the_same_for_any_number_of_replicas_and_new_in_each_epoch(
    tmp_path: Path, text: dict[str, Any]
) -> None:
    config = masked(tmp_path, text=text)
    assert problems(config) == []
    directory, manifest = sharded(config, tmp_path)
    alone = stream(config, directory, 1)
    assert stream(config, directory, 2) == alone
    # position by position, from anywhere: what a resumed run sees
    assert stream(config, directory, 1, 24) == alone[:24]
    rows = manifest.rows("train")
    epochs = [sorted(alone[first : first + rows]) for first in (0, rows) if first + rows <= len(alone)]
    if len(epochs) == 2:
        assert [row for row, *_ in epochs[0]] == [row for row, *_ in epochs[1]]
        assert [ids for _, ids, _ in epochs[0]] != [ids for _, ids, _ in epochs[1]]
    other = config.model_copy(update={"train": config.train.model_copy(update={"seed": 1, "shuffle": False})})
    base = config.model_copy(update={"train": config.train.model_copy(update={"shuffle": False})})
    assert stream(other, directory, 1, 24) != stream(base, directory, 1, 24)


def test_special_tokens_stay_and_labels_are_the_tokens_that_were_masked(tmp_path: Path) -> None:
    config = masked(tmp_path)
    directory, manifest = sharded(config, tmp_path)
    shards = open_shards(directory, "train")
    stored = shards.read(np.arange(shards.num_rows))["input_ids"]
    assert manifest.fitted["input_ids"].token_vocabulary is not None
    kinds = {"masked": 0, "replaced": 0, "kept": 0, "not chosen": 0}
    for row, ids, labels in stream(config, directory, 1):
        for now, label, original in zip(ids, labels, stored[row].tolist(), strict=True):
            if label == -100:
                assert now == original
                kinds["not chosen"] += original >= 5
            else:
                assert label == original
                assert label >= 5  # the five special tokens have the first ids
                assert now >= 4
                kinds["masked" if now == 4 else "kept" if now == original else "replaced"] += 1
    chosen = kinds["masked"] + kinds["replaced"] + kinds["kept"]
    assert abs(chosen / (chosen + kinds["not chosen"]) - 0.4) < 0.04
    assert abs(kinds["masked"] / chosen - 0.8) < 0.05
    assert abs(kinds["replaced"] / chosen - 0.1) < 0.04


def test_whole_words_are_masked_together(tmp_path: Path) -> None:
    config = masked(tmp_path, text={"task": "masked_words"})
    directory, _ = sharded(config, tmp_path)
    shards = open_shards(directory, "train")
    words = shards.read(np.arange(shards.num_rows))["input_ids/words"]
    several = 0
    for row, _, labels in stream(config, directory, 1):
        for word in np.unique(words[row][words[row] >= 0]):
            predicted = (np.array(labels) != -100)[words[row] == word]
            several += len(predicted) > 1
            assert predicted.all() or not predicted.any()
    assert several > 50


@pytest.mark.parametrize("task", ["masked", "masked_words"])
def test_the_key_of_the_shards_has_the_settings_of_earlier_versions(task: str, tmp_path: Path) -> None:
    config = masked(tmp_path, text={"task": task})
    rows = open_tokenized_rows(config, read_training_signature(config.model))
    assert rows is not None
    settings = json.loads(rows.digest)[1]
    assert settings["task"] == "masked"
    assert [*settings.items()][-1] == ("whole_words", task == "masked_words")


def test_evaluation_masks_the_same_tokens_whatever_the_seed_and_the_batch(tmp_path: Path) -> None:
    config = masked(tmp_path)
    directory, _ = sharded(config, tmp_path)
    shards, signature = open_shards(directory, "evaluation"), read_training_signature(config.model)

    def found(size: int, seed: int) -> list[list[int]]:
        train = config.train.model_copy(update={"evaluation_batch_size": size, "seed": seed})
        now = config.model_copy(update={"train": train})
        batches = evaluation_batches(shards, now, signature, replica=0, num_replicas=1, device=torch.device("cpu"))
        return [row[mask.bool()].tolist() for batch in batches for row, mask in zip(*batch.inputs[:2], strict=True)]

    assert found(4, 0) == found(7, 1)
    alone = one_batch(shards, config, signature, np.array([3])).inputs[0][0].tolist()
    assert alone == found(4, 0)[3]
    assert any(4 in ids for ids in found(4, 0))


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    config = masked(tmp_path)
    gpt2_tokenizer(tmp_path / "tokenizer.json")
    assert any(
        "has no mask token; name one of its tokens in data.text.tokens.mask" in each for each in problems(config)
    )


def test_the_line_about_the_masks_names_their_share_and_the_tokens_that_are_never_masked(tmp_path: Path) -> None:
    config = masked(tmp_path)
    directory, manifest = sharded(config, tmp_path)
    line = describe_masks(config.data, manifest.fitted)
    assert line == (
        "40 % of the tokens are predicted: 8 of 10 of them become [MASK], 1 another token, 1 stays; "
        "never [PAD], [UNK], [CLS], [SEP], [MASK]"
    )
    # another share needs no other shards, and has its own line
    other = masked(tmp_path, text={"mask_probability": 0.125})
    assert sharded(other, tmp_path)[0] == directory
    assert describe_masks(other.data, manifest.fitted).startswith("12.5 % of the tokens are predicted")
    whole = masked(tmp_path, text={"task": "masked_words"})
    assert describe_masks(whole.data, manifest.fitted).startswith("40 % of the tokens (whole words) are predicted")
    assert describe_masks(configured(tmp_path, tiny_token_classifier(), {"text": {}}).data, manifest.fitted) == ""
