"""What a registered model says of the raw rows that it takes: columns, packages, an example that is no row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.infra.mlflow.model_package import RawColumn
from onward.tasks.shown.raw_prediction import raw_prediction
from tests.support import graphs
from tests.support.exported_runs import exported_run, finished_run, two_tables
from tests.support.images import encoded, picture
from tests.support.texts import bert_tokenizer


def documents(folder: Path, proto: Any, data: dict[str, Any], **sections: Any) -> list[Path]:
    run = finished_run(exported_run(folder, proto, data=data, **sections), folder / "model.onnx")
    return [run.export / "preprocessing.json"]


def test_a_table_has_an_example_of_means_and_names(tmp_path: Path) -> None:
    raw = {"city": ["Rome", "Oslo"] * 10, "size": [3, 40] * 10, "age": [30.0, 50.0] * 10, "label": [0, 1] * 10}
    data = two_tables(tmp_path, **raw) | {"inputs": {"places": ["city", "size"], "age": "age"}}
    data["table"] = {"categories": ["city", "size"], "standardise": {"age": "standard"}}
    found = raw_prediction(
        documents(tmp_path, graphs.tiny_cities(), data), ["places", "age"], {"logits": (None, 3)}, {"logits"}
    )
    assert found is not None
    assert found.columns == (RawColumn("city", "text"), RawColumn("size", "number"), RawColumn("age", "number"))
    assert found.example == {"city": ["Oslo"], "size": [3], "age": [40.0]}
    assert found.requirements == ("pandas",)
    assert [column.name for column in found.predicted][:2] == ["class", "probability"]
    assert (found.code / "mlflow_model.py").exists()


def test_columns_that_cannot_be_made_up_have_no_example(tmp_path: Path) -> None:
    data = two_tables(tmp_path, **{name: np.arange(20.0) for name in "abcd"}, label=np.zeros(20))
    data |= {"inputs": {"features": list("abcd")}}
    model = {"path": tmp_path / "model.onnx", "loss": "mse"}
    made = documents(tmp_path, graphs.tiny_mlp(), data, model=model)
    found = raw_prediction(made, ["features"], {"prediction": (None, 1)}, {"prediction"})
    assert found is not None
    assert found.example == {}
    assert found.predicted == (RawColumn("predicted_label", "number"),)
    # an output whose shape only the run of the file shows
    unknown = raw_prediction(made, ["features"], {"prediction": (None, None)}, {"prediction"})
    assert unknown is not None
    assert unknown.predicted == ()


@pytest.mark.parametrize("kind", ["image", "text"])
def test_images_are_contents_and_texts_texts_and_both_name_their_package(tmp_path: Path, kind: str) -> None:
    if kind == "image":
        raw: dict[str, Any] = {"image": [encoded(picture(at)) for at in range(8)]}
        data = two_tables(tmp_path, **raw, label=[0, 1, 2, 3] * 2) | {"image": {}}
        made, inputs = documents(tmp_path, graphs.tiny_conv_net(image_size=16), data), ["image"]
    else:
        bert_tokenizer(tmp_path / "tokenizer.json")
        raw = {"text": ["a good film", "bad"] * 4}
        data = two_tables(tmp_path, **raw, label=[0, 1] * 4)
        data |= {"text": {"tokenizer": tmp_path / "tokenizer.json", "columns": "text", "max_length": 12}}
        proto = graphs.tiny_bert(vocab_size=400, positions=64, num_types=2, num_classes=3)
        made, inputs = documents(tmp_path, proto, data), ["input_ids", "attention_mask", "token_type_ids"]
    found = raw_prediction(made, inputs, {}, {"logits"})
    assert found is not None
    assert found.columns == (RawColumn(kind, "content" if kind == "image" else "text"),)
    assert found.requirements == ("pandas", "pillow" if kind == "image" else "tokenizers")


def test_a_file_that_takes_or_gives_more_than_is_described_is_registered_for_tensors(tmp_path: Path) -> None:
    raw = {"a": [1.0, 2.0] * 10, "b": [1.0, 2.0] * 10, "label": [0.0, 1.0] * 10}
    data = two_tables(tmp_path, **raw) | {"inputs": {"features": ["a", "b"]}}
    model = {"path": tmp_path / "model.onnx", "loss": "mse"}
    made = documents(tmp_path, graphs.tiny_mlp(inputs=2), data, model=model)
    assert raw_prediction(made, ["features", "state"], {}, {"prediction"}) is None
    assert raw_prediction([], ["features"], {}, {"prediction"}) is None
    assert raw_prediction(made, ["features"], {}, {"elsewhere"}) is None, "an output that only training computes"
    assert raw_prediction(made, ["features"], {}, {"prediction"}) is not None
