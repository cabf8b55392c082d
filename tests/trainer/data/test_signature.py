# ruff: noqa: E501 - tables of sentences
"""What the model takes is compared with what the data has, and every difference is one sentence with numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.data_problems import data_problems
from onward.trainer.data.input_columns import InputColumns
from onward.trainer.data.schema.columns import Column, ColumnType, Schema
from onward.trainer.data.schema.signature import read_signature
from onward.trainer.errors import UnsupportedModel
from tests.support import graphs


def columns(*found: Column) -> Schema:
    return {column.name: column for column in found}


IMAGE = Column(name="image", dtype="uint8", shape=(3, 8, 8), extremes=(0, 1, 254, 255))
LABEL = Column(name="label", dtype="int64", extremes=(0, 1, 2, 3))
TOKENS = Column(name="input_ids", dtype="int64", shape=(16,), extremes=(0, 31))
HIDDEN = Column(name="hidden", dtype="float32", shape=(16,))
FLOATS = [Column(name=name, dtype="float32") for name in "abcd"]
TARGET = Column(name="target", dtype="float32")


@pytest.fixture
def fit(tmp_path: Path) -> Any:
    """fit(model, schema, **settings of [model] and [data]) -> problems."""

    def fit(model: onnx.ModelProto, schema: Schema, **settings: Any) -> list[str]:
        onnx.save(model, tmp_path / "model.onnx")
        of_model = {key: settings.pop(key) for key in ModelConfig.model_fields if key in settings}
        config = RunConfig.model_construct(
            model=ModelConfig(path=tmp_path / "model.onnx", **of_model), data=DataConfig(source="x", **settings)
        )
        return data_problems(config, schema)

    return fit


def test_inputs_and_outputs_are_read_without_the_weights(tmp_path: Path) -> None:
    model = graphs.tiny_conv_net()
    weight = model.graph.initializer[0]
    model.graph.input.append(onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    signature = read_signature(tmp_path / "m.onnx")
    assert [(i.name, i.dtype, i.shape) for i in signature.inputs] == [("image", "float32", (None, 3, 8, 8))]
    assert [(o.name, o.dtype, o.shape) for o in signature.outputs] == [("logits", "float32", (None, 4))]


@pytest.mark.parametrize("content", [b"", b"no onnx at all"])
def test_a_file_that_is_not_onnx_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"m\.onnx"):
        read_signature(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("build", "schema", "settings"),
    [
        (graphs.tiny_conv_net, columns(IMAGE, LABEL), {}),
        (graphs.tiny_conv_net, columns(IMAGE, LABEL.model_copy(update={"extremes": (-100, 0, 3)})), {}),
        (graphs.tiny_conv_net, columns(IMAGE, LABEL.model_copy(update={"extremes": (0, 3, 255)})), {"ignore_index": 255}),
        (graphs.tiny_conv_net, columns(IMAGE, LABEL.model_copy(update={"shape": (1,)})), {}),
        (graphs.tiny_transformer, columns(TOKENS, TOKENS.model_copy(update={"name": "label"})), {}),
        (graphs.tiny_mlp, columns(*FLOATS, TARGET), {"inputs": {"features": tuple("abcd")}, "label": "target", "loss": "mse"}),
        (graphs.tiny_conv_net, columns(IMAGE, LABEL.model_copy(update={"extremes": (0, 99)})), {"num_classes": 100}),
        (graphs.tiny_mlp, columns(HIDDEN, LABEL), {"start": ["Relu_1"], "inputs": {"Relu_1": "hidden"}, "loss": "mse"}),
        (graphs.tiny_loss_model, columns(*FLOATS, LABEL), {"inputs": {"features": tuple("abcd"), "labels": "label"}, "loss": "output"}),
    ],
)  # fmt: skip
def test_what_fits_is_not_complained_of(fit: Any, build: Any, schema: Schema, settings: dict[str, Any]) -> None:
    assert fit(build(), schema, **settings) == []


def other(column: Column, **changes: Any) -> Column:
    return column.model_copy(update=changes)


@pytest.mark.parametrize(
    ("build", "schema", "settings", "sentence"),
    [
        (graphs.tiny_conv_net, columns(IMAGE, other(LABEL, extremes=(0, 6))), {"num_classes": 6}, "the labels in column 'label' are 0..6, but must be 0..5, because output logits is 6 wide (or model.ignore_index -100)"),
        (graphs.tiny_mlp, columns(HIDDEN, LABEL), {"start": ["Relu_1"], "loss": "mse"}, "input Relu_1 reads column 'Relu_1', which the data does not have; there is hidden, label; set data.inputs.Relu_1"),
        (graphs.tiny_mlp, columns(other(HIDDEN, shape=(8,)), LABEL), {"start": ["Relu_1"], "inputs": {"Relu_1": "hidden"}, "loss": "mse"}, "input Relu_1 takes [16] a sample, but column 'hidden' is float32 [8]"),
        (graphs.tiny_mlp, columns(*FLOATS, LABEL), {"output": "Relu_1", "inputs": {"features": tuple("abcd")}, "loss": "mse"}, "data.label must be [16] a sample to fit the output, but column 'label' is int64"),
        (graphs.tiny_conv_net, columns(other(IMAGE, name="imago"), LABEL), {}, "input image reads column 'image', which the data does not have; did you mean 'imago'?; set data.inputs.image"),
        (graphs.tiny_conv_net, columns(IMAGE), {}, "data.label reads column 'label', which the data does not have; there is image; set data.label"),
        (graphs.tiny_conv_net, columns(IMAGE, LABEL), {"inputs": {"imag": "image"}}, "data.inputs names 'imag', which is not an input of the model; did you mean 'image'?"),
        (graphs.tiny_conv_net, columns(IMAGE, LABEL), {"output": "logit"}, "model.output 'logit' is not a tensor of the model; did you mean 'logits'?"),
        (graphs.tiny_conv_net, columns(IMAGE, LABEL), {"pad_values": {"x": 1}}, "data.pad_values names 'x', which is not a column that is read; there is image, label"),
        (graphs.tiny_conv_net, columns(IMAGE, LABEL), {"evaluation_fraction": 0}, "data.evaluation_fraction is 0 and there is no data.evaluation_source: nothing to evaluate on"),
        (graphs.tiny_conv_net, columns(other(IMAGE, shape=(1, 28, 28)), LABEL), {}, "input image takes [3, 8, 8] a sample, but column 'image' is uint8 [1, 28, 28]"),
        (graphs.tiny_conv_net, columns(other(IMAGE, dtype="str", shape=()), LABEL), {}, "input image takes float32, but column 'image' holds text; a table [data.image] makes Onward decode images"),
        (graphs.tiny_conv_net, columns(IMAGE, other(LABEL, dtype="str")), {}, "data.label takes int64, but column 'label' holds text; number the classes from 0 on, in the model's order"),
        (graphs.tiny_transformer, columns(other(TOKENS, dtype="float32"), other(TOKENS, name="label")), {}, "input input_ids takes int64, but column 'input_ids' holds float32"),
        (graphs.tiny_conv_net, columns(IMAGE, other(LABEL, dtype="float64")), {}, 'data.label takes int64, but column \'label\' holds float64: the loss compares with classes 0, 1, 2, ...; to predict numbers, set model.loss = "mse" (or "l1", "huber", "quantile")'),
        (graphs.tiny_mlp, columns(*FLOATS, other(LABEL, extremes=(3, 40))), {"inputs": {"features": tuple("abcd")}}, 'model.loss is \'cross_entropy\', but output prediction has one score a sample, which cannot tell the classes of column \'label\' (3..40) apart; to predict numbers, set model.loss = "mse" (or "l1", "huber", "quantile")'),
        (graphs.tiny_mlp, columns(*FLOATS, other(LABEL, extremes=(0, 1))), {"inputs": {"features": tuple("abcd")}}, 'model.loss is \'cross_entropy\', but output prediction has one score a sample, which cannot tell the classes of column \'label\' (0..1) apart; for two classes set model.loss = "bce_with_logits"; to predict numbers, set model.loss = "mse" (or "l1", "huber", "quantile")'),
        (graphs.tiny_conv_net, columns(IMAGE, other(LABEL, extremes=(0, 1, 8, 9))), {}, "the labels in column 'label' are 0..9, but must be 0..3, because output logits is 4 wide (or model.ignore_index -100)"),
        (graphs.tiny_conv_net, columns(IMAGE, other(LABEL, extremes=(-1, 0, 3))), {}, "the labels in column 'label' are -1..3, but must be 0..3, because output logits is 4 wide (or model.ignore_index -100)"),
        (graphs.tiny_conv_net, columns(IMAGE, other(LABEL, shape=(5,))), {}, "data.label must be one number a sample to fit the output, but column 'label' is int64 [5]"),
        (graphs.tiny_mlp, columns(*FLOATS, LABEL), {"inputs": {"features": ("a", "b")}, "loss": "mse"}, "input features takes shape [4] per sample, but data.inputs stacks 2 columns"),
        (graphs.tiny_mlp, columns(*FLOATS[:3], other(FLOATS[3], shape=(2,)), LABEL), {"inputs": {"features": tuple("abcd")}, "loss": "mse"}, "input features stacks single numbers, but column 'd' is float32 [2]"),
        (graphs.tiny_mlp, columns(Column(name="features", dtype="float32", shape=(3,), variable=True), LABEL), {"loss": "mse"}, "input features takes [4] a sample, but column 'features' is float32 of varying length, 3 at most"),
    ],
)  # fmt: skip
def test_each_misfit_of_data_and_model_has_a_sentence(
    fit: Any, build: Any, schema: Schema, settings: dict[str, Any], sentence: str
) -> None:
    assert fit(build(), schema, **settings) == [sentence]


def test_everything_that_does_not_fit_is_said_at_once(fit: Any) -> None:
    schema = columns(other(IMAGE, dtype="str", shape=()), other(LABEL, extremes=(0, 9)))
    assert len(fit(graphs.tiny_conv_net(), schema, inputs={"x": "y"}, evaluation_fraction=0)) == 4


def test_a_column_that_two_read_is_kept_in_a_type_that_serves_both(tmp_path: Path) -> None:
    onnx.save(graphs.tiny_mlp(), tmp_path / "m.onnx")
    config = RunConfig(
        model=ModelConfig(path=tmp_path / "m.onnx"),
        data=DataConfig(source="x", inputs={"features": ("a", "b", "c", "d")}, label="a"),
        train={"num_steps": 1},
    )
    assert InputColumns(config.data, config.loss, config.model, read_signature(tmp_path / "m.onnx")).to_read()[
        "a"
    ] == ColumnType("float64", ())
