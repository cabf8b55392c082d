"""Whole runs on raw text: masked language models, classes of words, pairs, and bits per byte of a causal model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, read_record
from tests.support.text_paths import write_text_path
from tests.support.workshop import Workshop

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path_factory.mktemp("workshop"))
    yield workshop
    workshop.close()


def whole_run(workshop: Workshop, name: str, *overrides: str, **sections: Any) -> tuple[dict[str, Any], RunDir]:
    """`onward run` on one of the ways in which text becomes samples; return what it prints, and the run."""
    folder = workshop.root / name
    path = write_text_path(name, folder, rows=240)
    onnx.save(path.proto, folder / "model.onnx")
    settings: dict[str, Any] = {
        "model": {"path": str(folder / "model.onnx")},
        "data": path.data,
        "train": {"global_batch_size": 16, "num_steps": 240, "evaluation_period": 80},
        "optimizer": {"learning_rate": 1e-2},
        "parallel": {"data": 2},
        "launch": {"device": "cpu", "threads_per_rank": 1},
        **sections,
    }
    (folder / "config.toml").write_text("".join(f"{key} = {_toml(value)}\n" for key, value in settings.items()))
    facts = workshop.onward("run", str(folder / "config.toml"), *overrides, limit_s=600)
    run = RunDir(Path(facts["directory"]))
    assert facts["state"] == "exported"
    assert facts["parity"] < 1e-3
    assert read_record(run.exported, ExportedModel).after == facts["after"]
    status = workshop.onward("status", run.root.name)
    assert status["data"] == facts["data"]
    return facts, run


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(each)}' for key, each in value.items())} }}"
    return json.dumps(value)


@pytest.mark.parametrize("name", ["masked", "masked, whole words, joined"])
def test_a_masked_language_model_ends_with_its_report(workshop: Workshop, name: str) -> None:
    facts, _ = whole_run(workshop, name, metrics=["perplexity", "accuracy"])
    assert facts["after"]["evaluation/perplexity"] < facts["before"]["evaluation/perplexity"] / 10
    assert facts["bits_per_byte"] == {}
    words = " (whole words)" if "whole words" in name else ""
    assert (
        f"15 % of the tokens{words} are predicted: 8 of 10 of them become [MASK], 1 another token, 1 stays; "
        "never [PAD], [UNK], [CLS], [SEP], [MASK]"
    ) in facts["data"]


@pytest.mark.parametrize("name", ["words", "words, divided"])
def test_classes_of_words_are_learned_and_named(workshop: Workshop, name: str) -> None:
    schedule = {"mode": "cosine", "warmup_ratio": 0.1}  # at a constant rate the last steps are too noisy
    facts, run = whole_run(workshop, name, metrics=["f1_macro", "accuracy"], schedule=schedule)
    assert facts["after"]["evaluation/f1_macro"] > 0.95
    classes = json.loads((run.classes / "classes.json").read_text())["classes"]
    assert [each["name"] for each in classes] == ["bad", "good", "neutral"]
    served = json.loads((run.exported.parent / "preprocessing.json").read_text())
    assert served["text"]["stride"] == (4 if "divided" in name else None)
    assert ("metrics are over windows, not over texts" in facts["data"]) == ("divided" in name)


@pytest.mark.parametrize("name", ["pairs", "classification, divided"])
def test_pairs_and_windows_of_texts_are_classified(workshop: Workshop, name: str) -> None:
    train = {"global_batch_size": 16, "num_steps": 400, "evaluation_period": 100}
    facts, run = whole_run(workshop, name, train=train)
    assert facts["after"]["evaluation/loss"] < 0.9 * facts["before"]["evaluation/loss"]
    if name == "pairs":  # a window of a text need not have the word that tells the class
        assert facts["after"]["evaluation/accuracy"] > 0.9
    served = run.exported.parent
    assert (served / "tokenizer.json").read_bytes() == (workshop.root / name / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["causal, joined", "causal, single, padded on the left"])
def test_bits_per_byte_of_the_exported_file_are_those_of_the_text(workshop: Workshop, name: str) -> None:
    facts, run = whole_run(workshop, name, metrics=["bits_per_byte"])
    shards = open_shards(run.shards, "evaluation")
    rows = shards.read(np.arange(shards.num_rows))
    session = onnxruntime.InferenceSession(facts["model"], providers=["CPUExecutionProvider"])
    bits = 0.0
    for row, ids in enumerate(rows["input_ids"]):
        tokens = np.asarray(ids, np.int64)[None]
        fed = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        fed["position_ids"] = np.arange(tokens.shape[1])[None]
        logits = session.run(None, {each.name: fed[each.name] for each in session.get_inputs()})[0][0].astype(
            np.float64
        )
        logits -= np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) + logits.max(
            -1, keepdims=True
        )
        labels = np.asarray(rows["label"][row])
        counted = np.flatnonzero(labels != -100)
        bits -= logits[counted, labels[counted]].sum() / math.log(2)
    assert facts["after"]["evaluation/bits_per_byte"] == pytest.approx(bits / np.sum(rows["input_ids/bytes"]), rel=1e-4)
    assert facts["after"]["evaluation/bits_per_byte"] < facts["before"]["evaluation/bits_per_byte"] / 3
    assert ("padded on the left" in facts["data"]) == ("left" in name)
