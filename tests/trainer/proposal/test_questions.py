"""What the shapes, names and values decide is proposed with its reason; what they leave open is asked in the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto
from PIL import Image

import onward
from onward.trainer.config.loading import load_config
from onward.trainer.data.reading.sources import locate
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.proposal.initialise import Proposed
from tests.support import graphs
from tests.support.images import encoded, picture
from tests.support.texts import bert_tokenizer, reviews, sentences, write_csv

Random = np.random.default_rng
Shape = tuple[int | str, ...]


def linear(folder: Path, inputs: dict[str, Shape], outputs: dict[str, Shape], ending: str = "") -> Path:
    """A model whose outputs are the sum of all inputs, a number a row, times a weight of the output's shape."""
    g = GraphWriter("linear")
    sums = []
    for name, shape in inputs.items():
        x = g.op("Flatten", g.input(name, ("batch", *shape)))
        sums.append(g.op("ReduceMean", x, g.weight(f"{name}.axes", [1])))
    total = sums[0]
    for other in sums[1:]:
        total = g.op("Add", total, other)
    for name, shape in outputs.items():
        sizes = [each if isinstance(each, int) else 3 for each in shape]
        weight = g.weight(f"{name}.weight", g.normal(0.5, *sizes))
        x = g.op("Reshape", total, g.weight(f"{name}.rank", [-1, *[1] * len(shape)])) if len(shape) != 1 else total
        x = g.op("Mul", x, weight, outputs="" if ending else name)
        if ending:
            g.op(ending, x, outputs=name)
        g.output(name, ("batch", *shape))
    onnx.save(g.model(), folder / "model.onnx")
    return folder / "model.onnx"


def table(folder: Path, **columns: Any) -> Path:
    pq.write_table(
        pa.table({name: pa.array(list(values)) for name, values in columns.items()}), folder / "data.parquet"
    )
    return folder / "data.parquet"


def arrays(folder: Path, **columns: Any) -> Path:
    np.savez(folder / "data.npz", **columns)
    return folder / "data.npz"


def files(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    """Images of these sizes, in turn, in two folders of classes."""
    for at in range(12):
        path = folder / "photos" / ("cat", "dog")[at % 2] / f"{at}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(at, *sizes[at % len(sizes)]), "PNG"))
    return folder / "photos"


def initialised(folder: Path, data: Path, *given: str, steps: int = 0) -> Proposed:
    return onward.init(folder / "model.onnx", data, given, output=folder / "config.toml", steps=steps)


def numbers(rows: int = 60, seed: int = 0) -> Any:
    return Random(seed).normal(size=rows).astype(np.float32)


# -- questions


def _two_labels(folder: Path) -> Path:
    onnx.save(graphs.tiny_mlp(inputs=2), folder / "model.onnx")
    return table(folder, width=numbers(), depth=numbers(seed=1), price=numbers(seed=2))


def _two_labels_beside_an_input(folder: Path) -> Path:
    linear(folder, {"x": (4,)}, {"y": (1,)})
    return arrays(folder, x=Random(0).normal(size=(60, 4)).astype(np.float32), low=numbers(), high=numbers(seed=1))


def _losses_of_two_labels(folder: Path) -> Path:
    linear(folder, {"x": (4,)}, {"y": (1,)})
    return arrays(folder, x=Random(0).normal(size=(60, 4)).astype(np.float32), low=numbers(), sold=np.arange(60) % 2)


def _two_outputs(folder: Path) -> Path:
    linear(folder, {"x": (4,)}, {"one": (1,), "other": (1,)})
    return arrays(folder, x=Random(0).normal(size=(60, 4)).astype(np.float32), low=numbers(), high=numbers(seed=1))


def _two_inputs(folder: Path) -> Path:
    linear(folder, {"a": (3,), "b": (3,)}, {"y": (1,)})
    x = Random(0).normal(size=(2, 60, 3)).astype(np.float32)
    return arrays(folder, first=x[0], second=x[1], y=numbers())


def _class_axis(folder: Path) -> Path:
    linear(folder, {"x": (4,)}, {"scores": (5, 5, 5)})
    x = Random(0).normal(size=(60, 4)).astype(np.float32)
    return arrays(folder, x=x, label=Random(1).integers(0, 5, (60, 5, 5)))


def _image_size(folder: Path) -> Path:
    linear(folder, {"image": (3, "height", "width")}, {"logits": (2,)})
    return files(folder, [(40, 50), (64, 70)])


def _layout_and_channels(folder: Path) -> Path:
    linear(folder, {"image": ("a", 16, "b")}, {"logits": (2,)})
    return files(folder, [(16, 16)])


def _image_column(folder: Path) -> Path:
    linear(folder, {"x": (3, 8, 8)}, {"logits": (2,)})
    photos = [encoded(picture(at, 8, 8)) for at in range(24)]
    return table(folder, front=photos, back=photos[::-1], label=np.arange(24) % 2)


def _tokenizer(folder: Path) -> Path:
    onnx.save(graphs.tiny_bert(num_classes=2), folder / "model.onnx")
    return write_csv(folder / "data.csv", ("text", "label"), reviews(60))


def _text_column(folder: Path) -> Path:
    size = bert_tokenizer(folder / "tokenizer.json").get_vocab_size()
    onnx.save(graphs.tiny_bert(vocab_size=size, num_classes=2), folder / "model.onnx")
    rows = [(f"{text} {at}", f"{at} {text}", label) for at, (text, label) in enumerate(reviews(60))]
    return write_csv(folder / "data.csv", ("title", "abstract", "label"), rows)


def _task(folder: Path) -> Path:
    tokenizer = bert_tokenizer(folder / "tokenizer.json")
    tokenizer.add_special_tokens(["</s>"])  # beside [MASK]
    tokenizer.save(str(folder / "tokenizer.json"))
    model = graphs.tiny_token_classifier(vocab_size=tokenizer.get_vocab_size())
    # of a second input nothing is known, so the file is not run
    model.graph.input.append(onnx.helper.make_tensor_value_info("bias", TensorProto.FLOAT, ["batch", 1]))
    onnx.save(model, folder / "model.onnx")
    return write_csv(folder / "data.csv", ("text", "bias"), [(text, 0.5) for text in sentences(60)])


def _end_token(folder: Path) -> Path:
    size = bert_tokenizer(folder / "tokenizer.json").get_vocab_size()
    onnx.save(graphs.tiny_transformer(vocab_size=size), folder / "model.onnx")
    return write_csv(folder / "data.csv", ("text",), [(text,) for text in sentences(60)])


ASKED: dict[str, tuple[Callable[[Path], Path], dict[str, list[str]]]] = {
    "the label of a table": (
        _two_labels,
        {"data.label": ['"width" (mse)', '"price" (mse)'], "data.inputs.features": ['["*", "!price"] (if the label']},
    ),
    "one of two labels": (_two_labels_beside_an_input, {"data.label": ['"low" (mse) or "high" (mse)']}),
    "a label that decides the loss": (
        _losses_of_two_labels,
        {"data.label": ['"low" (mse)', '"sold" (bce_with_logits)'], "model.loss": ['"bce_with_logits" (for sold)']},
    ),
    "labels of two outputs": (
        _two_outputs,
        {"loss.0.label": ["one predicts", '"low" (mse)'], "loss.1.label": ["other predicts", '"high" (mse)']},
    ),
    "columns of two inputs": (_two_inputs, {"data.inputs.a": ['"first" or "second"'], "data.inputs.b": ['"second"']}),
    "the axis of the classes": (_class_axis, {"loss.class_axis": ["float32 [?, 5, 5, 5]", "1 or 2 or 3"]}),
    "the size of images": (_image_size, {"data.image.size": ["leaves height and width open", "64 (near", "or 224"]}),
    "layout and channels": (
        _layout_and_channels,
        {"data.image.layout": ['"nchw" (channels before', '"nhwc"'], "data.image.color": ['"rgb" or "bgr"']},
    ),
    "the column of images": (_image_column, {"data.image.column": ['"front" or "back"']}),
    "the tokenizer": (_tokenizer, {"data.text.tokenizer": ["the path of the model's own tokenizer.json"]}),
    "the column of texts": (_text_column, {"data.text.columns": ['"title" or "abstract"']}),
    "the token that ends a text": (_end_token, {"data.text.tokens.end": ["the token that ends a text", '"[SEP]"']}),
    "causal or masked": (_task, {"data.text.task": ['"causal" (each next', '"masked" (masked tokens']}),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_two_answers_fit_is_asked_and_such_a_file_is_refused_with_line_and_choices(
    case: str, tmp_path: Path
) -> None:
    write, asked = ASKED[case]
    found = initialised(tmp_path, write(tmp_path), steps=20)
    assert found.proof is None, "nothing is trained while a question is open"
    questions = {each.setting: each.what for each in found.questions}
    assert questions.keys() == asked.keys()
    text = (tmp_path / "config.toml").read_text()
    lines = text.splitlines()
    assert len(lines) <= 40
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "config.toml")
    assert len(refused.value.problems) == len(asked)
    for (key, choices), problem in zip(
        asked.items(), sorted(refused.value.problems, key=_place(list(asked))), strict=True
    ):
        assert all(choice in questions[key] for choice in choices), questions[key]
        assert all(choice in problem for choice in choices), problem
        number = int(problem.split("line ")[1].split(":")[0])
        assert f'{key.rpartition(".")[2]} = "?"' in lines[number - 1]


def _place(keys: list[str]) -> Callable[[str], int]:
    return lambda problem: next(at for at, key in enumerate(keys) if f" {key} is open" in problem)


def test_answers_on_the_command_line_close_the_questions(tmp_path: Path) -> None:
    data = _two_labels(tmp_path)
    found = initialised(tmp_path, data, "data.label=price")
    assert not found.questions
    config = load_config(tmp_path / "config.toml")
    assert config.data.inputs == {"features": ("width", "depth")}
    assert 'label = "price"  # given on the command line' in (tmp_path / "config.toml").read_text()


def test_answers_in_the_file_or_as_overrides_of_a_run_close_the_questions(tmp_path: Path) -> None:
    initialised(tmp_path, _two_labels_beside_an_input(tmp_path))
    path = tmp_path / "config.toml"
    assert onward.config(path, ["data.label=low"]).data.label == "low"
    path.write_text(path.read_text().replace('label = "?"', 'label = "high"'))
    assert load_config(path).data.label == "high"


# -- decisions


def _config(folder: Path, data: Path, *given: str) -> Any:
    found = initialised(folder, data, *given)
    assert not found.questions, found.questions
    return load_config(folder / "config.toml")


X = Random(0).normal(size=(120, 4)).astype(np.float32)


def test_the_axis_that_is_long_enough_for_the_greatest_label_has_the_classes(tmp_path: Path) -> None:
    linear(tmp_path, {"x": (4,)}, {"scores": ("n", 3)})
    few = _config(tmp_path, arrays(tmp_path, x=X, label=Random(1).integers(0, 3, (120, 3))))
    assert few.losses[0].class_axis is None, "the file declares one fixed length, as training finds by itself"
    onward.init(
        tmp_path / "model.onnx",
        arrays(tmp_path, x=X, label=Random(1).integers(0, 9, (120, 3))),
        output=tmp_path / "other.toml",
        steps=0,
    )
    assert load_config(tmp_path / "other.toml").losses[0].class_axis == 1


@pytest.mark.parametrize(
    ("scores", "labels", "loss", "settings"),
    [
        ((1,), np.arange(120) % 2, "bce_with_logits", {}),
        ((1,), np.arange(120) % 7, "mse", {}),
        ((4,), np.arange(120) % 4, "cross_entropy", {}),
        ((4,), np.arange(120) % 4 + 1, "cross_entropy", {"data.classes": "sorted"}),
        ((4,), np.arange(120) % 6, "cross_entropy", {"model.num_classes": 6}),
        ((1000,), np.arange(120) % 5, "cross_entropy", {"model.num_classes": 5}),
        ((1000,), np.arange(120) * 8, "cross_entropy", {"model.num_classes": 0}),
        ((4,), np.array([3, 5, 90])[np.arange(120) % 3], "cross_entropy", {"model.num_classes": 3}),
        ((4,), np.eye(4, dtype=np.float32)[np.arange(120) % 4], "cross_entropy", {"loss.0.label_type": "float32"}),
        ((4,), (X > 0).astype(np.int64), "bce_with_logits", {}),
        ((4,), X, "mse", {}),
        ((3, 4), Random(0).integers(0, 3, (120, 4)), "cross_entropy", {}),
    ],
)
def test_values_and_shapes_decide_loss_and_head(
    scores: tuple[int, ...], labels: Any, loss: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    g = GraphWriter("mlp")
    size = int(np.prod(scores))
    x = g.op(
        "Gemm",
        g.input("x", ("batch", 4)),
        g.weight("w", g.normal(0.5, 4, size)),
        g.weight("b", np.zeros(size, np.float32)),
    )
    if len(scores) > 1:
        x = g.op("Reshape", x, g.weight("shape", [-1, *scores]))
    g.op("Identity", x, outputs="y")
    g.output("y", ("batch", *scores))
    onnx.save(g.model(), tmp_path / "model.onnx")
    config = _config(tmp_path, arrays(tmp_path, x=X, label=labels))
    assert config.losses[0].name == loss
    found = config.model_dump(mode="json")
    for key, value in settings.items():
        part = found
        for name in key.split("."):
            part = part[int(name)] if isinstance(part, list) else part[name]
        assert part == value, (tmp_path / "config.toml").read_text()
    if "model.num_classes" not in settings:
        assert config.model.num_classes == 0


@pytest.mark.parametrize(
    ("ending", "labels", "loss"), [("Softmax", 3, "cross_entropy"), ("Sigmoid", 2, "bce_with_logits")]
)
def test_the_loss_reads_the_scores_before_a_softmax_or_sigmoid(
    ending: str, labels: int, loss: str, tmp_path: Path
) -> None:
    path = linear(tmp_path, {"x": (4,)}, {"p": (3,) if labels == 3 else (1,)}, ending)
    config = _config(tmp_path, arrays(tmp_path, x=X, label=np.arange(120) % labels))
    scores = next(node.input[0] for node in onnx.load(path).graph.node if node.op_type == ending)
    assert (config.losses[0].name, config.model.output) == (loss, scores)


def test_an_output_without_labels_is_not_trained_and_named(tmp_path: Path) -> None:
    linear(tmp_path, {"x": (4,)}, {"embedding": (7,), "logits": (3,)})
    found = initialised(tmp_path, arrays(tmp_path, x=X, label=np.arange(120) % 3))
    assert "not trained, for want of labels: output embedding" in found.notes
    assert load_config(tmp_path / "config.toml").model.output == "logits"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_words_and_their_labels_are_the_columns_with_as_many_words_in_each_row(kind: str, tmp_path: Path) -> None:
    size = bert_tokenizer(tmp_path / "tokenizer.json").get_vocab_size()
    onnx.save(graphs.tiny_token_classifier(vocab_size=size, num_classes=3), tmp_path / "model.onnx")
    words, tags = ["Anna", "lives", "in", "Berlin"], ["PER", "O", "O", "LOC"]
    rows = [(words[: 2 + at % 3], tags[: 2 + at % 3]) for at in range(60)]
    data = tmp_path / f"data.{kind}"
    if kind == "csv":
        write_csv(data, ("sentence", "classes"), [(" ".join(row), " ".join(own)) for row, own in rows])
    else:
        data.write_text("\n".join(json.dumps({"sentence": row, "classes": own}) for row, own in rows))
    found = initialised(tmp_path, data, steps=5)
    assert found.proof is not None, found.refused
    config = load_config(tmp_path / "config.toml")
    assert config.data.text is not None
    assert (config.data.text.task, config.data.text.columns, config.data.label) == ("tokens", "sentence", "classes")


def test_files_named_train_val_and_test_are_the_splits(tmp_path: Path) -> None:
    onnx.save(graphs.tiny_mlp(), tmp_path / "model.onnx")
    (tmp_path / "data").mkdir()
    for name in ("train", "val", "test"):
        write_csv(tmp_path / "data" / f"{name}.csv", (*"abcd", "target"), np.column_stack([X, X.sum(1)]).tolist())
    config = _config(tmp_path, tmp_path / "data")
    sources = config.data.source, config.data.evaluation_source, config.data.test_source
    assert [Path(each).name for each in sources] == ["train.csv", "val.csv", "test.csv"]


def test_texts_for_an_embedding_of_256_rows_are_bytes_in_windows_that_the_positions_allow(tmp_path: Path) -> None:
    onnx.save(graphs.tiny_transformer(vocab_size=256), tmp_path / "model.onnx")
    (tmp_path / "notes").mkdir()
    for name in ("a", "b"):
        (tmp_path / "notes" / f"{name}.md").write_text(f"hello {name} " * 200)
    found = initialised(tmp_path, tmp_path / "notes", steps=5)
    assert found.proof is not None, found.refused
    config = load_config(tmp_path / "config.toml")
    assert (config.data.format, config.data.sequence_length) == ("text", 16)
    assert config.data.source.endswith("notes/**/*.md")


def test_of_texts_of_several_kinds_the_most_frequent_are_named_by_a_glob_in_every_split(tmp_path: Path) -> None:
    onnx.save(graphs.tiny_transformer(vocab_size=256), tmp_path / "model.onnx")
    for part in ("train", "val"):
        folder = tmp_path / "notes" / part
        folder.mkdir(parents=True)
        for name in ("a.md", "b.md", "c.rst", ".hidden.md"):
            (folder / name).write_text(f"hello {name} " * 200)
    found = initialised(tmp_path, tmp_path / "notes", steps=5)
    assert found.proof is not None, found.refused
    config = load_config(tmp_path / "config.toml")
    assert config.data.source.endswith("notes/train/**/*.md")
    assert config.data.evaluation_source.endswith("notes/val/**/*.md")
    assert [name for name, _ in locate(config.data.source, config.data).files] == ["a.md", "b.md"]


def test_a_batch_that_the_file_declares_and_needs_is_the_batch(tmp_path: Path) -> None:
    g = GraphWriter("joint")
    x = g.input("x", (6, 4))
    x = g.op("Sub", x, g.op("ReduceMean", x, g.weight("axes", [0])))
    g.op("MatMul", x, g.weight("w", g.normal(0.5, 4, 3)), outputs="y")
    g.output("y", (6, 3))
    onnx.save(g.model(), tmp_path / "model.onnx")
    config = _config(tmp_path, arrays(tmp_path, x=X, label=np.arange(120) % 3))
    assert config.train.global_batch_size == 6
    assert "the file declares it" in (tmp_path / "config.toml").read_text()


def test_masks_of_255_mean_the_second_class_or_no_label(tmp_path: Path) -> None:
    from onward.trainer.onnx_graph.examples.small_models import build_unet

    for classes, values, wanted in (
        (2, (0, 255), ((0, 255), -100)),
        (3, (0, 1, 2, 255), ((), 255)),
        (2, (0, 1, 2), ((), -100)),
    ):
        folder = tmp_path / f"{classes}-{len(values)}"
        for name in ("images", "masks"):
            (folder / name).mkdir(parents=True)
        onnx.save(build_unet(num_classes=classes, image_size=8, width=2), folder / "model.onnx")
        for at in range(12):
            (folder / "images" / f"{at}.png").write_bytes(encoded(picture(at, 8, 8), "PNG"))
            mask = np.array(values, np.uint8)[Random(at).integers(0, len(values), (8, 8))]
            (folder / "masks" / f"{at}.png").write_bytes(encoded(Image.fromarray(mask), "PNG"))
        config = _config(folder, folder / "images")
        assert config.data.image.mask_folder == "../masks"
        assert (config.data.image.mask_values, config.model.ignore_index) == wanted
        assert config.model.num_classes == (3 if classes == 2 and len(values) == 3 else 0)
    for file in (tmp_path / "3-4" / "masks").iterdir():
        file.write_bytes(encoded(Image.fromarray(np.full((8, 8), 255, np.uint8)), "PNG"))
    (tmp_path / "3-4" / "config.toml").unlink()
    with pytest.raises(ConfigError, match="hold nothing but 255, by which pixels are not labelled"):
        _config(tmp_path / "3-4", tmp_path / "3-4" / "images")


@pytest.mark.parametrize(
    ("folder", "mask_folder"),
    [("scans/{part}/{name}", "../masks"), ("scans/{name}/{part}", "../../masks/{source}")],
    ids=["train/images", "images/train"],
)
def test_masks_and_images_in_folders_of_splits_are_found(folder: str, mask_folder: str, tmp_path: Path) -> None:
    from onward.trainer.onnx_graph.examples.small_models import build_unet

    onnx.save(build_unet(num_classes=2, image_size=8, width=2), tmp_path / "model.onnx")
    for part in ("train", "val"):
        images = tmp_path / folder.format(part=part, name="images")
        masks = tmp_path / folder.format(part=part, name="masks")
        images.mkdir(parents=True)
        masks.mkdir(parents=True)
        for at in range(12):
            (images / f"{at}.png").write_bytes(encoded(picture(at, 8, 8), "PNG"))
            mask = Random(at).integers(0, 2, (8, 8)).astype(np.uint8)
            (masks / f"{at}.png").write_bytes(encoded(Image.fromarray(mask), "PNG"))
    config = _config(tmp_path, tmp_path / "scans")
    assert config.data.image
    assert (config.data.label, config.data.image.mask_folder) == ("mask", mask_folder)
    sources = config.data.source, config.data.evaluation_source
    wanted = [Path(folder.format(part=part, name="images")) for part in ("train", "val")]
    assert [Path(each).relative_to(tmp_path) for each in sources] == wanted


def test_a_range_test_chooses_the_rate_and_says_from_what(tmp_path: Path) -> None:
    onnx.save(graphs.tiny_mlp(), tmp_path / "model.onnx")
    x = X.astype(np.float32)
    data = arrays(tmp_path, features=x, label=x.sum(axis=1))
    found = onward.init(tmp_path / "model.onnx", data, output=tmp_path / "config.toml", range_test=True)
    assert found.range_test is not None
    assert found.range_test.rates[0] == 1e-6
    assert 1e-4 < found.range_test.chosen < 0.3
    config = load_config(tmp_path / "config.toml")
    assert config.optimizer.learning_rate == found.range_test.chosen
    assert "range test: " in (tmp_path / "config.toml").read_text()
    assert found.proof is not None
    assert found.proof.loss_after < found.proof.loss_before


# -- what cannot be proposed


def test_what_fits_nothing_is_refused_with_inputs_and_columns_and_nothing_is_written(tmp_path: Path) -> None:
    linear(tmp_path, {"x": (4,)}, {"y": (3,)})
    with pytest.raises(
        ConfigError, match=r"input x takes float32 \[\?, 4\], which no column .* fits: a \(float32 \[7\]\)"
    ):
        initialised(tmp_path, arrays(tmp_path, a=np.zeros((9, 7), np.float32), label=np.arange(9) % 3))
    with pytest.raises(ConfigError, match=r"no column of .* can be the labels of an output: .* y float32 \[\?, 3\]"):
        initialised(tmp_path, arrays(tmp_path, x=X))
    assert not (tmp_path / "config.toml").exists()


def test_unreadable_and_absent_files_and_empty_data_are_refused(tmp_path: Path) -> None:
    model = linear(tmp_path, {"x": (4,)}, {"y": (3,)})
    empty = write_csv(tmp_path / "empty.csv", ("x", "label"), [])
    with pytest.raises(DataError, match=r"empty\.csv"):
        initialised(tmp_path, empty)
    with pytest.raises(DataError, match=r"nowhere\.csv"):
        initialised(tmp_path, tmp_path / "nowhere.csv")
    data = arrays(tmp_path, x=X, label=np.arange(120) % 3)
    model.write_bytes(b"no model")
    with pytest.raises(onward.UnsupportedModel, match=r"model\.onnx"):
        initialised(tmp_path, data)
    model.unlink()
    with pytest.raises(onward.OnwardError, match=r"model\.onnx"):
        initialised(tmp_path, data)
    assert not (tmp_path / "config.toml").exists()


def test_a_file_that_exists_is_replaced_with_force_only(tmp_path: Path) -> None:
    linear(tmp_path, {"x": (4,)}, {"y": (3,)})
    data = arrays(tmp_path, x=X, label=np.arange(120) % 3)
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(ConfigError, match=r"exists already; name another file with -o, or replace it with --force"):
        initialised(tmp_path, data)
    assert (tmp_path / "config.toml").read_text() == "mine"
    onward.init(tmp_path / "model.onnx", data, output=tmp_path / "config.toml", steps=0, force=True)
    assert load_config(tmp_path / "config.toml").data.label == "label"
    with pytest.raises(ConfigError, match="is a directory"):
        onward.init(tmp_path / "model.onnx", data, output=tmp_path, steps=0)


def test_the_size_of_images_is_that_of_the_metadata_where_the_model_leaves_it_open(tmp_path: Path) -> None:
    data = _image_size(tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    model.metadata_props.add(key="imgsz", value="[48, 64]")
    onnx.save(model, tmp_path / "model.onnx")
    onward.init(tmp_path / "model.onnx", data, output=tmp_path / "config.toml", steps=0)
    assert "size = [48, 64]  # as the file's metadata says (imgsz)" in (tmp_path / "config.toml").read_text()


def test_the_bundled_digits_get_the_size_and_the_channels_of_the_model(tmp_path: Path) -> None:
    model = linear(tmp_path, {"image": (1, 16, 16)}, {"logits": (10,)})
    proposed = onward.init(model, "digits", output=tmp_path / "config.toml", steps=2)
    assert proposed.proof is not None
    config = load_config(tmp_path / "config.toml")
    assert config.data.image_size == (1, 16)
    with pytest.raises(ConfigError, match=r"takes \[1, 16, 16\] a sample, but column 'image' is float32 \[3, 24, 24\]"):
        onward.init(model, "digits", {"data.image_size": 24}, output=tmp_path / "other.toml", steps=0)
