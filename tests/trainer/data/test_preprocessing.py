"""Text becomes numbers once, when the data is read, and ranks read what the model itself would compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from onnx import parser

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data import preprocessing
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.file_rows import FileRows
from onward.trainer.data.schema import column_computers
from onward.trainer.data.schema.signature import read_preprocessing, read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.data.storage.shards import Shards
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError, DataError, Refused
from onward.trainer.model.trainable import open_trainable
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.parallel.planning.estimate_layouts import example_batch

FOREIGN = Path(__file__).resolve().parents[2] / "support" / "foreign"
HEAD = '<ir_version: 10, opset_import: ["" : 20, "ai.onnx.ml" : 4]>\n'
SENTENCES = ["good film", "a", "the bad bad plot", "Great  music", "unknown words , they say", "awful"]


def configuration(
    tmp_path: Path, model: Path, source: Path, *, freeze: tuple[str, ...] = (), output: str = "", **data: Any
) -> RunConfig:
    settings = {
        "name": "text",
        "model": {"path": model, "freeze": freeze, "output": output},
        "data": {"source": str(source), "evaluation_fraction": 0.5, **data},
        "train": {"num_steps": 1},
    }
    return build_config(settings, check=check_files_and_data)


def sharded(tmp_path: Path, config: RunConfig) -> tuple[Shards, Shards]:
    directory, _, _ = make_training_shards(config, tmp_path / "cache")
    return open_shards(directory, "train"), open_shards(directory, "evaluation", for_file=True)


def write_csv(path: Path, sentences: list[str]) -> Path:
    lines = [f'"{text}",{row % 2}' if "," in text else f"{text},{row % 2}" for row, text in enumerate(sentences)]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return path


def write_jsonl(path: Path, sentences: list[str]) -> Path:
    rows = [{"text": text, "label": row % 2} for row, text in enumerate(sentences)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, sentences: list[str]) -> Path:
    pq.write_table(pa.table({"text": sentences, "label": [row % 2 for row in range(len(sentences))]}), path)
    return path


def in_front(config: RunConfig, **inputs: Any) -> list[Any]:
    model = read_preprocessing(config.model)
    assert model is not None
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)


# -- what is stored


@pytest.mark.parametrize("write", [write_csv, write_jsonl, write_parquet])
def test_a_batch_is_what_the_model_computes_from_the_same_rows(tmp_path: Path, write: Any) -> None:
    suffix = {write_csv: "csv", write_jsonl: "jsonl", write_parquet: "parquet"}[write]
    source = write(tmp_path / f"t.{suffix}", SENTENCES)
    config = configuration(tmp_path, FOREIGN / "text-sentences.onnx", source)
    train, evaluation = sharded(tmp_path, config)
    signature = read_training_signature(config.model)
    rows = FileRows(evaluation, config, signature)
    numbers = np.array([2, 0, 1])
    (text,) = rows.inputs(numbers).values()
    assert set(text) < set(SENTENCES)
    assert rows.batch(numbers).inputs[0].numpy().tolist() == in_front(config, text=text)[0].tolist()
    assert "text" not in train.columns
    for row, sentence in zip(rows.batch(numbers).inputs[0].numpy(), text, strict=True):
        alone = in_front(config, text=np.array([sentence], object))[0][0]
        assert row.tolist() == alone.tolist() + [0] * (len(row) - len(alone))


def test_rows_are_padded_with_the_value_that_the_model_pads_with(tmp_path: Path) -> None:
    model = onnx.load(FOREIGN / "text-sentences.onnx")
    encoder = next(node for node in model.graph.node if node.op_type == "LabelEncoder")
    (values,) = (a for a in encoder.attribute if a.name == "values_int64s")
    values.ints[0] = 7  # what "" becomes, with which StringSplit fills
    onnx.save(model, tmp_path / "m.onnx")
    # the first rows have one length, so that only later ones show it
    same = ["good film"] * preprocessing.FIRST_ROWS
    config = configuration(tmp_path, tmp_path / "m.onnx", write_jsonl(tmp_path / "t.jsonl", same + SENTENCES))
    train, _ = sharded(tmp_path, config)
    assert train.pad_values == {"ids": 7}
    batch = one_batch(train, config, read_training_signature(config.model), np.arange(train.num_rows))
    first, longest = batch.inputs[0][0].tolist(), max(len(row) for row in batch.inputs[0])
    assert first == [2, 8] + [7] * (longest - 2)
    assert longest > 2


def test_text_that_looks_like_a_number_or_like_nothing_is_text(tmp_path: Path) -> None:
    texts = ["007", "NA", "null", " x ", "1e3", "nan", "3.0", "true"]
    config = configuration(tmp_path, FOREIGN / "text-sentences.onnx", write_csv(tmp_path / "t.csv", texts))
    _, evaluation = sharded(tmp_path, config)
    stored = evaluation.read(np.arange(evaluation.num_rows))["text"].tolist()
    assert stored
    assert set(stored) <= set(texts)
    config = configuration(tmp_path, FOREIGN / "text-sentences.onnx", write_csv(tmp_path / "q.csv", [*texts, "a, b"]))
    _, evaluation = sharded(tmp_path, config)
    assert set(evaluation.read(np.arange(evaluation.num_rows))["text"]) <= {*texts, "a, b"}


def test_columns_of_text_and_numbers_feed_one_model(tmp_path: Path) -> None:
    lines = ["hue,width,height,code,label"] + [
        f"{color},{row},{row + 0.5},{code},{row % 3}"
        for row, (color, code) in enumerate([("red", "N-1"), ("blue", "O-2"), ("pink", "N-3"), ("green", "N-x")])
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    inputs = {"color": "hue", "size": ["width", "height"]}
    config = configuration(tmp_path, FOREIGN / "text-columns.onnx", tmp_path / "t.csv", inputs=inputs)
    train, evaluation = sharded(tmp_path, config)
    assert set(train.columns) == {"width", "height", "label", "encoded", "is_new"}
    assert set(evaluation.columns) == {*train.columns, "hue", "code"}
    rows = FileRows(evaluation, config, read_training_signature(config.model))
    fed = rows.inputs(np.arange(2))
    assert {name: array.shape for name, array in fed.items()} == {"color": (2, 1), "size": (2, 2), "code": (2,)}
    size, encoded, is_new = rows.batch(np.arange(2)).inputs
    assert encoded.shape == (2, 1, 3)
    assert (size.shape, is_new.dtype) == ((2, 2), torch.bool)


SEQUENCE = (
    HEAD
    + """g (seq(string[1]) words) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[3, 2] table =
    {1, 2, 3, 4, 5, 6}> {
    vectors = SequenceMap <body = each (string[1] word) => (float[1, 2] vector) {
        id = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_int64s = [1, 2], default_int64 = 0> (word)
        vector = Gather (table, id)
    }> (words)
    joined = ConcatFromSequence <axis = 0> (vectors)
    y = MatMul (joined, w)
}"""
)


def test_a_sequence_of_strings_has_one_for_each_row(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(SEQUENCE), tmp_path / "m.onnx")
    source = write_csv(tmp_path / "t.csv", ["a", "b", "c", "b"])
    inputs = {"words": "text"}
    with pytest.raises(Refused, match=r"SequenceMap 'vectors' .* weight 'table' \[3, 2\]: freeze it"):
        configuration(tmp_path, tmp_path / "m.onnx", source, inputs=inputs)
    config = configuration(tmp_path, tmp_path / "m.onnx", source, inputs=inputs, freeze=("table",))
    train, evaluation = sharded(tmp_path, config)
    rows = FileRows(evaluation, config, read_training_signature(config.model))
    numbers = np.arange(evaluation.num_rows)
    (words,) = rows.inputs(numbers).values()
    assert [word.tolist() for word in words] == [[text] for text in evaluation.read(numbers)["text"]]
    vectors = {"a": [3, 4], "b": [5, 6], "c": [1, 2]}
    assert rows.batch(numbers).inputs[0].tolist() == [vectors[word.item()] for word in words]
    assert named_weights(open_trainable(config).module).keys() == {"w"}
    assert "joined" in train.columns


NUMBERS = (
    HEAD
    + """g (seq(float[K]) signals, float[N] level) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> {
    means = SequenceMap <body = each (float[K] signal) => (float[1] mean) { mean = ReduceMean (signal) }> (signals)
    joined = ConcatFromSequence <axis = 0> (means)
    axis = Constant <value_ints = [1]> ()
    left = Unsqueeze (joined, axis)
    right = Unsqueeze (level, axis)
    both = Concat <axis = 1> (left, right)
    y = MatMul (both, w)
}"""
)


def test_a_sequence_of_numbers_is_computed_in_front_of_the_network_too(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(NUMBERS), tmp_path / "m.onnx")
    rows = [{"signals": [float(row)] * (row + 1) + [0.0], "level": row, "label": row % 2} for row in range(6)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="input signals is a sequence with one tensor a sample; it cannot be stacked"):
        configuration(tmp_path, tmp_path / "m.onnx", tmp_path / "t.jsonl", inputs={"signals": ["level", "level"]})
    config = configuration(tmp_path, tmp_path / "m.onnx", tmp_path / "t.jsonl")
    train, evaluation = sharded(tmp_path, config)
    assert set(train.columns) == {"joined", "level", "label"}
    rows_of_file = FileRows(evaluation, config, read_training_signature(config.model))
    fed = rows_of_file.inputs(np.arange(evaluation.num_rows))
    level, means = rows_of_file.batch(np.arange(evaluation.num_rows)).inputs
    wanted = [row * (row + 1) / (row + 2) for row in level.tolist()]
    assert means.tolist() == pytest.approx(wanted)
    assert [signal.shape for signal in fed["signals"]] == [(int(row) + 2,) for row in level.tolist()]
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    assert session.run(None, fed)[0] == pytest.approx(np.stack([wanted, level], 1) @ np.array([[1, 2], [3, 4]]))


def test_the_planner_sees_the_results_of_the_pre_processing(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "t.csv", SENTENCES)
    config = configuration(tmp_path, FOREIGN / "text-sentences.onnx", source)
    (ids,), (labels,) = example_batch(config)
    # the longest of the first rows
    assert (ids.shape[1], ids.dtype, labels is not None) == (5, torch.int64, True)


def test_a_column_of_numbers_feeds_an_input_of_one_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("color,size,weight,age,label\n" + "red,small,1.5,30,0\nblue,large,2.5,40,1\n" * 3)
    model = FOREIGN / "text-skl2onnx-columns.onnx"
    config = configuration(tmp_path, model, tmp_path / "t.csv", output="add_result1")
    train, _ = sharded(tmp_path, config)
    signature = read_training_signature(config.model)
    batch = one_batch(train, config, signature, np.arange(2))
    assert {info.name: tuple(tensor.shape) for info, tensor in zip(signature.inputs, batch.inputs, strict=True)} == {
        "weight": (2, 1),
        "age": (2, 1),
        "label_encoder": (2, 1),
        "color01out": (2, 1, 3),
    }
    assert [tensor.shape for tensor in example_batch(config)[0][:2]] == [(32, 1), (32, 1)]


def test_the_rehearsal_computes_only_the_rows_that_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(
        tmp_path,
        FOREIGN / "text-sentences.onnx",
        write_csv(tmp_path / "t.csv", SENTENCES * 200),
        evaluation_fraction=0.1,
    )
    calls = []
    plain = preprocessing.Preprocessor._compute
    monkeypatch.setattr(
        preprocessing.Preprocessor, "_compute", lambda self, rows: calls.append(len(rows["text"])) or plain(self, rows)
    )
    signature = read_training_signature(config.model)
    rows = read_first_rows(config, signature, 20)
    assert (rows.num_rows, rows.counts, rows.pad_values) == (20, (1080, 120), {"ids": 0})
    assert sum(calls) < 100
    batch = one_batch(rows, config, signature, np.arange(3))
    (text,) = FileRows(rows, config, signature).inputs(np.arange(3)).values()
    assert batch.inputs[0].tolist() == in_front(config, text=text)[0].tolist()


def test_wide_results_are_computed_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_computers, "BLOCK_BYTES", 5 * 14)  # 5 rows of 3 floats, a bool and the rest of a row
    calls: list[int] = []
    plain = preprocessing.Preprocessor._together

    def counting(self: Any, rows: Any, count: int) -> Any:
        calls.append(count)
        return plain(self, rows, count)

    monkeypatch.setattr(preprocessing.Preprocessor, "_together", counting)
    lines = [f"red,{row},1,N-{row},{row % 3}" for row in range(23)]
    (tmp_path / "t.csv").write_text("\n".join(["color,width,height,code,label", *lines]) + "\n")
    inputs = {"size": ["width", "height"]}
    config = configuration(tmp_path, FOREIGN / "text-columns.onnx", tmp_path / "t.csv", inputs=inputs)
    train, evaluation = sharded(tmp_path, config)
    assert max(calls) == 5
    assert train.num_rows + evaluation.num_rows == 23 == sum(calls)


def test_other_pre_processing_gives_other_shards_and_the_same_the_same(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "t.csv", SENTENCES)
    model = onnx.load(FOREIGN / "text-sentences.onnx")
    keys = []
    for change in ("nothing", "weights", "words"):
        if change == "weights":
            model.graph.initializer[0].raw_data = bytes(len(model.graph.initializer[0].raw_data))
        if change == "words":
            encoder = next(node for node in model.graph.node if node.op_type == "LabelEncoder")
            encoder.attribute[0].strings[1] = b"excellent"
        onnx.save(model, tmp_path / f"{change}.onnx")
        config = configuration(tmp_path, tmp_path / f"{change}.onnx", source)
        keys.append(make_training_shards(config, tmp_path / "cache")[1].key)
    assert keys[0] == keys[1] != keys[2]


# -- what is refused


def test_columns_that_hold_no_text_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": 5, "label": 1}\n{"text": 6, "label": 0}\n')
    with pytest.raises(ConfigError, match="input text takes strings, but column 'text' holds int64, not text"):
        configuration(tmp_path, FOREIGN / "text-sentences.onnx", tmp_path / "t.jsonl")
    (tmp_path / "t.csv").write_text("review,label\ngood,1\nbad,0\n")
    with pytest.raises(ConfigError, match="input text reads column 'text', which the data does not have"):
        configuration(tmp_path, FOREIGN / "text-sentences.onnx", tmp_path / "t.csv")
    with pytest.raises(ConfigError, match=r"column 'label' feeds input text as text and data\.label as numbers"):
        configuration(tmp_path, FOREIGN / "text-sentences.onnx", tmp_path / "t.csv", inputs={"text": "label"})


PAIRS = (
    HEAD
    + """g (string[N, 2] pair) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> {
    values = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_floats = [1.0, 2.0]> (pair)
    y = MatMul (values, w)
}"""
)


def test_several_strings_of_a_row_are_stacked_from_as_many_columns(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(PAIRS), tmp_path / "m.onnx")
    (tmp_path / "t.csv").write_text("one,two,label\n" + "a,b,1\nb,x,0\n" * 4)
    config = configuration(tmp_path, tmp_path / "m.onnx", tmp_path / "t.csv", inputs={"pair": ["one", "two"]})
    rows = [shards.read(np.arange(shards.num_rows))["values"] for shards in sharded(tmp_path, config)]
    assert {tuple(row) for row in np.concatenate(rows).tolist()} == {(1, 2), (2, 0)}
    for inputs, sentence in (
        ({"pair": ["one"]}, r"takes shape \[2\] per sample, but data\.inputs stacks 1 columns"),
        ({"pair": "one"}, r"takes \[2\] strings a sample, but column 'one' holds one; stack several columns"),
        ({"pair": ["one", "two"], "pear": "one"}, r"data\.inputs names 'pear', which is not an input of the model"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            configuration(tmp_path, tmp_path / "m.onnx", tmp_path / "t.csv", inputs=inputs)


def test_a_column_named_like_a_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("ids,label\ngood,1\nbad,0\n")
    with pytest.raises(ConfigError, match="column 'ids' has the name of a tensor that the pre-processing computes"):
        configuration(tmp_path, FOREIGN / "text-sentences.onnx", tmp_path / "t.csv", inputs={"text": "ids"})


def test_missing_text_is_a_bad_row_with_its_place(tmp_path: Path) -> None:
    lines = ['{"text": "good", "label": 1}'] * 4 + ['{"text": null, "label": 0}', '{"text": 7, "label": 0}']
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    config = configuration(tmp_path, FOREIGN / "text-sentences.onnx", tmp_path / "t.jsonl")
    with pytest.raises(DataError) as caught:
        sharded(tmp_path, config)
    assert "t.jsonl, line 5: text is missing" in str(caught.value)
    assert "t.jsonl, line 6: text holds 7, not text" in str(caught.value)
    (tmp_path / "t.csv").write_bytes(b"text,label\n" + b"good,1\n" * 4 + b"caf\xe9,0\n")
    config = configuration(tmp_path, FOREIGN / "text-sentences.onnx", tmp_path / "t.csv")
    with pytest.raises(DataError, match="line 6: text holds bytes that are not UTF-8"):
        sharded(tmp_path, config)


def test_an_empty_text_is_a_bad_row_if_nothing_can_be_computed_from_it(tmp_path: Path) -> None:
    config = configuration(
        tmp_path, FOREIGN / "text-sentences.onnx", write_csv(tmp_path / "t.csv", ["a", "", "b", "c"])
    )
    with pytest.raises(DataError, match="line 3: the pre-processing's result 'ids' is empty"):
        sharded(tmp_path, config)


def numbers_as_text(folder: Path) -> Path:
    model = (
        HEAD
        + """g (string[N, 1] text) => (float[N, 2] y) <float[1, 2] w = {1, 2}> {
        x = Cast <to = 1> (text)
        y = MatMul (x, w)
    }"""
    )
    onnx.save(parser.parse_model(model), folder / "m.onnx")
    return folder / "m.onnx"


def test_a_row_that_the_pre_processing_fails_on_is_a_bad_row(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", ["1", "2.5", "3", "4", "five", "6", "inf"])
    model = numbers_as_text(tmp_path)
    with pytest.raises(DataError) as caught:
        sharded(tmp_path, configuration(tmp_path, model, tmp_path / "t.csv"))
    assert "t.csv, line 6: the pre-processing fails" in str(caught.value)
    assert "t.csv, line 8: the pre-processing's result 'x' holds inf" in str(caught.value)
    train, evaluation = sharded(tmp_path, configuration(tmp_path, model, tmp_path / "t.csv", bad_rows="skip"))
    read = [*train.read(np.arange(train.num_rows))["x"], *evaluation.read(np.arange(evaluation.num_rows))["x"]]
    assert sorted(float(row[0]) for row in read) == [1, 2.5, 3, 4, 6]


RAGGED = (
    HEAD
    + """g (string[N] text) => (float[N, 2] y) <float[3, 2] table = {1, 2, 3, 4, 5, 6}, int64[1] one = {1},
    int64[2] both = {1, 2}> {
    words, number = StringSplit <delimiter = " "> (text)
    values = ai.onnx.ml.LabelEncoder <keys_strings = ["a"], values_int64s = [1], default_int64 = 0> (words)
    wide = Unsqueeze (words, one)
    ids = ai.onnx.ml.LabelEncoder <keys_strings = ["a"], values_int64s = [1], default_int64 = 0> (wide)
    vectors = Gather (table, ids)
    y = ReduceSum <keepdims = 0> (vectors, both)
}"""
)
WHOLE_BATCH = (
    HEAD
    + """g (string[N] text) => (float[M, 2] y) <float[3, 2] table = {1, 2, 3, 4, 5, 6}> {
    once = Unique (text)
    ids = ai.onnx.ml.LabelEncoder <keys_strings = ["a"], values_int64s = [1], default_int64 = 0> (once)
    y = Gather (table, ids)
}"""
)
FILLED_UNEVENLY = (
    HEAD
    + """g (string[N] text) => (float[N, 2] y) <float[3, 2] table = {1, 2, 3, 4, 5, 6}, int64 one = {1},
    int64[1] axis = {1}> {
    words, number = StringSplit <delimiter = " "> (text)
    lengths = Unsqueeze (number, axis)
    shape = Shape (words)
    filled = Expand (lengths, shape)
    y0 = Gather (table, filled)
    y = ReduceSum <keepdims = 0> (y0, axis)
}"""
)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (RAGGED, r"result 'ids' is ragged: \[1, 1\] to \[1, 3\] for single rows, \[4, 1, 3\] for 4 together"),
        (WHOLE_BATCH, r"result 'ids' is \[3\] for 4 rows, but must have one row for each"),
        (FILLED_UNEVENLY, r"result 'filled' is ragged: rows of different length are not filled with one value, but"),
    ],
)
def test_results_that_are_no_rows_of_one_length_or_one_padding_are_refused(
    tmp_path: Path, model: str, sentence: str
) -> None:
    onnx.save(parser.parse_model(model), tmp_path / "m.onnx")
    source = write_csv(tmp_path / "t.csv", ["a", "b a", "c d e", "a"])
    with pytest.raises(Refused, match=sentence):
        configuration(tmp_path, tmp_path / "m.onnx", source)


def test_pre_processing_that_onnxruntime_cannot_run_is_refused_with_its_reason(tmp_path: Path) -> None:
    model = onnx.load(FOREIGN / "text-sentences.onnx")
    lower = next(node for node in model.graph.node if node.op_type == "StringNormalizer")
    next(a for a in lower.attribute if a.name == "locale").s = b"nowhere"
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(Refused) as caught:
        configuration(tmp_path, tmp_path / "m.onnx", write_csv(tmp_path / "t.csv", SENTENCES))
    assert "onnxruntime cannot run the pre-processing in front of ids: " in str(caught.value)
    assert "install the locale (locale-gen en_US.UTF-8)" in str(caught.value)
