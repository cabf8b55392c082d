"""The tokens of a batch are those of its texts: padding is not among them, wherever it was added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.trainer.data.storage.opened_shards import open_shards
from tests.support.graphs import tiny_bert, tiny_decoder, tiny_token_classifier, tiny_transformer
from tests.support.texts import bert_tokenizer, gpt2_tokenizer, reviews, sentences, write_csv
from tests.trainer.data.text.test_tokenized_rows import configured, sharded, training_batch


def fixed_length(model: onnx.ModelProto, length: int) -> onnx.ModelProto:
    """The same with a length that the file declares."""
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = length
    return model


def counted(folder: Path, model: onnx.ModelProto, text: dict[str, Any], **sections: Any) -> tuple[int, dict[str, Any]]:
    """The tokens of all training rows as one batch, and what the shards store."""
    config = configured(folder, model, {"text": text}, **sections)
    directory, _ = sharded(config, folder)
    batch, shards = training_batch(config, directory), open_shards(directory, "train")
    assert batch.size == shards.num_rows > 5
    return batch.num_tokens, shards.read(np.arange(shards.num_rows))


@pytest.mark.parametrize("length", [0, 24])
def test_of_classified_texts_they_are_what_the_graph_reads(tmp_path: Path, length: int) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    write_csv(tmp_path / "data.csv", ("text", "label"), reviews(40))
    model = tiny_bert(vocab_size=400, positions=64)
    found, stored = counted(tmp_path, fixed_length(model, length) if length else model, {})
    assert found == sum(int(np.sum(row)) for row in stored["attention_mask"])
    if length:
        assert found < 24 * len(stored["attention_mask"])


def test_of_a_language_model_they_are_the_targets(tmp_path: Path) -> None:
    gpt2_tokenizer(tmp_path / "tokenizer.json")
    write_csv(tmp_path / "data.csv", ("text",), [(text,) for text in sentences(60)])
    model = tiny_transformer(vocab_size=400, sequence_length=32)
    packed, stored = counted(tmp_path, model, {"task": "causal"})
    assert packed == np.asarray(stored["input_ids"]).size == 32 * len(stored["input_ids"])
    # texts of their own: the last token of each is no input whose next token is known
    single, stored = counted(tmp_path, tiny_decoder(), {"task": "causal", "packing": "none"})
    assert single == sum(len(row) - 1 for row in stored["input_ids"])


def test_of_masked_texts_they_are_what_the_graph_reads_and_not_the_few_that_are_masked(tmp_path: Path) -> None:
    bert_tokenizer(tmp_path / "tokenizer.json")
    write_csv(tmp_path / "data.csv", ("text",), [(text,) for text in sentences(60)])
    model = tiny_token_classifier(vocab_size=400)
    found, stored = counted(tmp_path, model, {"task": "masked"})
    assert found == sum(len(row) for row in stored["input_ids"])
