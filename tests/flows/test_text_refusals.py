"""Bad text data and tokenizers: `onward run` names what is wrong, exits with status 2 and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from tokenizers import Tokenizer

from tests.flows.test_refusals import run_refused
from tests.support.graphs import tiny_bert, tiny_decoder, tiny_transformer
from tests.support.texts import bert_tokenizer, gpt2_tokenizer, reviews, write_csv

CONFIG = """
[model]
path = "model.onnx"
[data]
source = "data.csv"
[data.text]
tokenizer = "tokenizer.json"
[train]
global_batch_size = 8
num_steps = 4
"""


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    """A directory with a classifier, its tokenizer, texts, and a valid configuration."""
    onnx.save_model(tiny_bert(vocab_size=400, positions=32), tmp_path / "model.onnx")
    bert_tokenizer(tmp_path / "tokenizer.json")
    write_csv(tmp_path / "data.csv", ["text", "label"], reviews(40))
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def refused(workshop: Path, *overrides: str) -> list[str]:
    """Return the problems that `onward run` reports."""
    return run_refused(workshop, *overrides)[0]


def without(token: str, folder: Path) -> None:
    """Take a special token out of the tokenizer."""
    settings: Any = json.loads((folder / "tokenizer.json").read_text())
    settings["added_tokens"] = [each for each in settings["added_tokens"] if each["content"] != token]
    del settings["model"]["vocab"][token]
    (folder / "tokenizer.json").write_text(json.dumps(settings))


def tags(folder: Path, rows: list[Mapping[str, Any]]) -> None:
    proto = tiny_bert(vocab_size=400, positions=32, num_classes=3, of_tokens=True)
    onnx.save_model(proto, folder / "model.onnx")
    good = {"text": ["a", "good", "film"], "label": [0, 1, 2]}
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [good] * 20 + rows))


def causal(folder: Path, proto: onnx.ModelProto) -> None:
    onnx.save_model(proto, folder / "model.onnx")
    gpt2_tokenizer(folder / "tokenizer.json")


WRITE = Callable[[Path], object]
BAD: dict[str, tuple[WRITE, tuple[str, ...], tuple[str, ...]]] = {
    "a tokenizer with more tokens than the embedding": (
        lambda folder: onnx.save_model(tiny_bert(vocab_size=300, positions=32), folder / "model.onnx"),
        (),
        ("has ids up to 399, but the embedding embeddings.word.weight of the model has 300 rows",),
    ),
    "no padding token": (lambda folder: without("[PAD]", folder), (), ("has no padding token; name one",)),
    "no mask token": (
        lambda folder: (
            without("[MASK]", folder),
            onnx.save_model(
                tiny_bert(vocab_size=400, positions=32, num_classes=400, of_tokens=True), folder / "model.onnx"
            ),
        ),
        ("data.text.task=masked",),
        ("has no mask token; name one of its tokens in data.text.tokens.mask",),
    ),
    "no end token": (
        lambda folder: onnx.save_model(tiny_transformer(vocab_size=400), folder / "model.onnx"),
        ("data.text.task=causal",),
        ("has no token that ends a text; name one of its tokens in data.text.tokens.end",),
    ),
    "a tokenizer that is not JSON": (
        lambda folder: (folder / "tokenizer.json").write_bytes(b"\x0a\x0eSentencePiece\xff\xfe"),
        (),
        ("tokenizer.json is not a tokenizer.json of Hugging Face's tokenizers library", "give the file that"),
    ),
    "half a tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:5000]),
        (),
        ("tokenizer.json is not a tokenizer.json of Hugging Face's tokenizers library",),
    ),
    "a JSON file of another library": (
        lambda folder: (folder / "tokenizer.json").write_text('{"class_name": "Tokenizer", "config": {}}'),
        (),
        ("tokenizer.json is not a tokenizer.json of Hugging Face's tokenizers library: it has no key 'model'",),
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), (), ("tokenizer.json cannot be read",)),
    "another column": (lambda folder: None, ("data.text.columns=review",), ("'review', which the data does not have",)),
    "a column of numbers": (
        lambda folder: (folder / "data.jsonl").write_text('{"text": 1.5, "label": 0}\n{"text": 2, "label": 1}\n' * 20),
        ("data.source=data.jsonl",),
        ("data.text.columns names 'text', which holds float64, not text",),
    ),
    "padding in front of a model without masks": (
        lambda folder: causal(folder, tiny_transformer(vocab_size=400)),
        ("data.text.task=causal", "data.text.packing=none", "data.text.pad_side=left"),
        ("data.text.pad_side 'left': the model has no input attention_mask",),
    ),
    "windows that do not move on": (
        lambda folder: None,
        ("data.text.max_length=8", "data.text.stride=6"),
        ("data.text.stride 6: windows of 8 tokens, 2 of them special, would not move on; set it below 6",),
    ),
    "windows of a causal model": (
        lambda folder: causal(folder, tiny_decoder()),
        ("data.text.task=causal", "data.text.stride=6"),
        ("data.text.stride: the windows of a causal model follow each other",),
    ),
    "bits per byte of classes": (
        lambda folder: None,
        ('metrics=["bits_per_byte"]',),
        ("the targets of data.text.task 'classification' are no text",),
    ),
}
QUICK = "a tokenizer that is not JSON"


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BAD]
)
def test_what_does_not_fit_is_refused_before_anything_is_started(workshop: Path, name: str) -> None:
    write, overrides, wanted = BAD[name]
    write(workshop)
    (problem,) = refused(workshop, *overrides)
    for part in wanted:
        assert part in problem


BAD_ROWS: dict[str, tuple[WRITE, tuple[str, ...], tuple[str, ...]]] = {
    "empty texts": (
        lambda folder: write_csv(folder / "data.csv", ["text", "label"], [*reviews(40), ("", 1), ("  ", 0)]),
        (),
        ("line 42: text is empty", "line 43: text has no token", "2 bad rows: correct them, or set data.bad_rows"),
    ),
    "numbers among the texts": (
        lambda folder: (folder / "data.jsonl").write_text(
            "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in [*reviews(40), (7, 1)])
        ),
        ("data.source=FOLDER/data.jsonl",),
        ("line 41: text holds 7, not text",),
    ),
    "fewer labels than words": (
        lambda folder: tags(folder, [{"text": ["a", "bad", "film"], "label": [0, 1]}]),
        ("data.source=FOLDER/data.jsonl", "data.text.task=tokens"),
        ("line 21: label has 2 labels for 3 words",),
    ),
    "a lone surrogate": (
        lambda folder: (
            causal(folder, tiny_decoder()),
            (folder / "data.jsonl").write_text(
                "".join(json.dumps({"text": text}) + "\n" for text in [*["good film"] * 40, "bad \ud800 film"])
            ),
        ),
        ("data.source=FOLDER/data.jsonl", "data.text.task=causal", "data.text.packing=none"),
        ("line 41: text holds half of a surrogate pair, which is no character of Unicode",),
    ),
}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("only_servers")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_named_by_their_line_and_no_shards_are_left(workshop: Path, name: str) -> None:
    from tests.support.workshop import Workshop, finished

    write, overrides, wanted = BAD_ROWS[name]
    write(workshop)
    whole = Workshop(workshop)
    try:
        words = [word.replace("FOLDER", str(workshop)) for word in overrides]
        process = whole.start("run", str(workshop / "config.toml"), "launch.device=cpu", *words)
        found = json.dumps(finished(process, status=2, limit_s=800), ensure_ascii=False)
        for part in wanted:
            assert part in found
        assert not list((whole.home / "shards").glob("*"))
        assert not list((whole.home / "shards").glob(".*"))
    finally:
        whole.close()


def test_the_tokenizer_of_these_tests_is_one(workshop: Path) -> None:
    assert Tokenizer.from_file(str(workshop / "tokenizer.json")).get_vocab_size() == 400
