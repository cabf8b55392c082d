"""One small model with its tokenizer and data for each way in which text becomes samples.

path = write_text_path("pairs", folder)        # folder/tokenizer.json and the data
path.proto, path.data                          # the model, and the section [data]
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from tests.support.graphs import tiny_bert, tiny_decoder, tiny_transformer
from tests.support.texts import BAD, GOOD, bert_tokenizer, gpt2_tokenizer, reviews, sentences, write_csv
from tests.trainer.data.text.test_separate_packing import masked_attention

CAUSAL: dict[str, dict[str, Any]] = {
    "causal, joined": {"max_length": 16, "documents": "line"},
    "causal, separate": {"max_length": 24, "documents": "line", "packing": "separate"},
    "causal, single": {"max_length": 24, "documents": "line", "packing": "none"},
    "causal, single, padded on the left": {
        "max_length": 24,
        "documents": "line",
        "packing": "none",
        "pad_side": "left",
    },
}
MASKED: dict[str, dict[str, Any]] = {
    "masked": {},
    "masked, whole words, joined": {"task": "masked_words", "packing": "joined", "max_length": 16},
    "masked, divided": {"max_length": 12, "stride": 4},
}
LABELLED: dict[str, dict[str, Any]] = {
    "classification": {},
    "classification, divided": {"max_length": 12, "stride": 4},
    "pairs": {"columns": ["text", "other"]},
    "words": {"task": "tokens", "columns": "words"},
    "words, divided": {"task": "tokens", "columns": "words", "max_length": 12, "stride": 4},
}
PATHS = (*CAUSAL, *MASKED, *LABELLED)
ENCODER: dict[str, Any] = {"vocab_size": 400, "positions": 64}


@dataclass(frozen=True)
class TextPath:
    """A model and the section [data]."""

    proto: onnx.ModelProto
    data: dict[str, Any]


def write_text_path(name: str, folder: Path, *, rows: int = 80) -> TextPath:
    """Write tokenizer and data of one of PATHS into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer.json"
    (gpt2_tokenizer if name in CAUSAL else bert_tokenizer)(tokenizer)
    settings = {"tokenizer": str(tokenizer), **{**CAUSAL, **MASKED, **LABELLED}[name]}
    if name not in LABELLED:
        (folder / "texts.txt").write_text("\n".join(sentences(rows)))
        settings.setdefault("task", "causal" if name in CAUSAL else "masked")
        data = {"source": str(folder / "texts.txt"), "text": settings | {"documents": "line"}}
        return TextPath(_language_model(name), data)
    if name.startswith("words"):
        lines = [{"words": text.split(), "tags": [_tag(word) for word in text.split()]} for text, _ in reviews(rows)]
        (folder / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = {"source": str(folder / "words.jsonl"), "label": "tags", "text": settings}
        return TextPath(tiny_bert(**ENCODER, num_classes=3, of_tokens=True), data)
    table = [
        (text, other, label * 2 + other_label if name == "pairs" else label)
        for (text, label), (other, other_label) in zip(reviews(rows), reviews(rows, seed=1), strict=True)
    ]
    write_csv(folder / "texts.csv", ["text", "other", "label"], table)
    proto = tiny_bert(**ENCODER, num_classes=4, num_types=2 if name == "pairs" else 0)
    return TextPath(proto, {"source": str(folder / "texts.csv"), "text": settings})


def _language_model(name: str) -> onnx.ModelProto:
    if name in MASKED:
        return tiny_bert(**ENCODER, num_classes=400, of_tokens=True)
    if "left" in name:
        return tiny_decoder()
    return masked_attention() if "separate" in name else tiny_transformer(vocab_size=400, sequence_length=24)


def _tag(word: str) -> str:
    return "good" if word in GOOD else "bad" if word in BAD else "neutral"
