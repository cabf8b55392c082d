"""Bits per byte are those of the original text: the bytes of the tokens that are targets, however texts are packed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.resolve import resolve
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.shards import Split
from onward.trainer.data.text.byte_counts import bytes_of_tokens
from onward.trainer.diagnostics.config_check import check_files_and_data
from tests.support.graphs import tiny_transformer
from tests.support.texts import END, bert_tokenizer, gpt2_tokenizer, sentences, write_csv
from tests.trainer.data.text.test_separate_packing import masked_attention
from tests.trainer.data.text.test_tokenized_rows import configured, sharded

ODD = [
    "naïve café 漢字 🙂👩‍👩‍👧 x\n\n  end  ",
    "   ",
    "ＦＵＬＬ ﬁ Å e\u0301",
    "a\tb\r\nc\u00a0d\u200b",
    "plain",
]


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_the_bytes_of_all_tokens_add_up_to_those_of_the_text(tmp_path: Path, kind: str) -> None:
    library = (gpt2_tokenizer if kind == "bytes" else bert_tokenizer)(tmp_path / "tokenizer.json")
    chooser = random.Random(0)
    drawn = ["".join(chooser.choices("aé漢🙂 .\n", k=chooser.randint(1, 40))) for _ in range(200)]
    for text in (*ODD, *drawn):
        encoding = library.encode(text)
        for length in (len(encoding) + 1, len(encoding)):
            if length:
                found = bytes_of_tokens(text, encoding, length)
                assert found.shape == (length,)
                assert (found >= 0).all()
                assert found.sum() == len(text.encode())
    of_ascii = library.encode("the film was good")
    found = bytes_of_tokens("the film was good", of_ascii, len(of_ascii) + 1)
    if kind == "bytes":  # each character of a token is a byte
        assert found.tolist() == [*map(len, of_ascii.tokens), 0]


def causal(folder: Path, packing: str, **sections: Any) -> RunConfig:
    gpt2_tokenizer(folder / "tokenizer.json")
    write_csv(folder / "data.csv", ["text"], [[text] for text in (*sentences(60), *ODD, *sentences(9, seed=3))])
    proto = masked_attention() if packing == "separate" else tiny_transformer(vocab_size=400, sequence_length=24)
    text = {"task": "causal", "packing": packing, "max_length": 24}
    data = {"text": text} | sections.pop("data", {})
    return configured(folder, proto, data, **{"metrics": ["bits_per_byte"], **sections})


@pytest.mark.parametrize("packing", ["joined", "separate", "none"])
@pytest.mark.parametrize("few", [0, 5])
def test_the_targets_of_a_row_stand_for_the_bytes_that_are_stored_with_it(
    tmp_path: Path, packing: str, few: int
) -> None:
    config = causal(tmp_path, packing, data={"evaluation_rows": few})
    assert check_files_and_data(dict(config)) == []
    directory, _ = sharded(config, tmp_path)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    of_token = {number: 0 if token == END else len(token) for token, number in library.get_vocab().items()}
    splits: tuple[Split, ...] = ("train", "evaluation")
    for split in splits:
        shards = open_shards(directory, split, most=few if split == "evaluation" else 0)
        rows = shards.read(np.arange(shards.num_rows))
        # tokens of this tokenizer are bytes, so their lengths say the same where no character is divided by a window
        wanted = [sum(of_token[int(label)] for label in row if label != -100) for row in rows["label"]]
        stored = np.asarray(rows["input_ids/bytes"]).tolist()
        assert sum(abs(one - other) > 3 for one, other in zip(stored, wanted, strict=True)) == 0
        assert np.mean([one == other for one, other in zip(stored, wanted, strict=True)]) > 0.8
        signature = read_training_signature(config.model)
        resolved = resolve(config, shards, signature, evaluated=shards).metrics[0]
        targets = sum(int((np.asarray(row) != -100).sum()) for row in rows["label"])
        assert resolved.bytes_per_target == sum(stored) / targets


def test_a_value_that_is_given_wins_and_needs_no_count(tmp_path: Path) -> None:
    config = causal(tmp_path, "joined", metrics=[{"name": "bits_per_byte", "bytes_per_target": 3.5}])
    directory, manifest = sharded(config, tmp_path)
    assert "input_ids/bytes" not in manifest.table
    shards = open_shards(directory, "evaluation")
    assert resolve(config, shards, read_training_signature(config.model), evaluated=shards) is config
    without = causal(tmp_path, "joined", metrics=["perplexity"])
    assert sharded(without, tmp_path)[1].key == manifest.key
    assert sharded(causal(tmp_path, "joined"), tmp_path)[1].key != manifest.key
