"""The mistakes of the first hour: one message before anything starts, with the setting or the way out.

Each is a small folder as a new user has it, with one thing wrong, and the command that the user types.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
from PIL import Image
from safetensors.numpy import save_file

from onward.flows import cli
from onward.flows.running import local_run
from onward.trainer.onnx_graph.examples.small_models import build_unet
from tests.support import graphs
from tests.support.foreign_files import FOLDER
from tests.support.images import write_classes
from tests.support.texts import bert_tokenizer, reviews, write_csv
from tests.support.unseen import UNSEEN

MOST_S = 3.0
"""Processor time until the answer, without the import of the packages."""

CONFIG = """
[model]
path = "model.onnx"
{model}
[data]
{data}
[train]
global_batch_size = 8
num_steps = 4
[launch]
device = "cpu"
"""
COLUMNS = '["bill", "depth", "flipper", "mass"]'


# -- folders in which nothing is wrong


def _configure(folder: Path, data: str, model: str = "") -> None:
    (folder / "config.toml").write_text(CONFIG.format(model=model, data=data))


def birds() -> pd.DataFrame:
    random, rows = np.random.default_rng(0), 60
    kinds = random.integers(0, 3, rows)
    columns: dict[str, Any] = {
        "bill": (random.normal(0, 1, rows) + kinds).round(2),
        "depth": random.normal(0, 1, rows).round(2),
        "flipper": (200 + 10 * kinds + random.normal(0, 3, rows)).round(1),
        "mass": (4000 + random.normal(0, 100, rows)).round(0),
        "species": np.array(["Adelie", "Chinstrap", "Gentoo"])[kinds],
    }
    return pd.DataFrame(columns)


def classes(folder: Path) -> None:
    """A table, and a model with three scores."""
    onnx.save(graphs.tiny_mlp(outputs=3), folder / "model.onnx")
    birds().to_csv(folder / "data.csv", index=False)
    _configure(folder, f'source = "data.csv"\nlabel = "species"\ninputs = {{ features = {COLUMNS} }}')


def numbers(folder: Path) -> None:
    """A table, and a model with one number."""
    onnx.save(graphs.tiny_mlp(), folder / "model.onnx")
    birds().drop(columns="species").assign(price=np.arange(60.0)).to_csv(folder / "data.csv", index=False)
    _configure(folder, f'source = "data.csv"\nlabel = "price"\ninputs = {{ features = {COLUMNS} }}', 'loss = "mse"')


def images(folder: Path) -> None:
    onnx.save(graphs.tiny_conv_net(num_classes=3, image_size=16), folder / "model.onnx")
    write_classes(folder / "photos", ("cat", "dog", "eel"), 10)
    _configure(folder, 'source = "photos"\n[data.image]')


def texts(folder: Path) -> None:
    onnx.save(graphs.tiny_bert(vocab_size=400, positions=32, num_classes=2), folder / "model.onnx")
    bert_tokenizer(folder / "tokenizer.json")
    write_csv(folder / "data.csv", ["text", "label"], reviews(40))
    _configure(folder, 'source = "data.csv"\n[data.text]\ntokenizer = "tokenizer.json"')


def masks(folder: Path) -> None:
    onnx.save(build_unet(num_classes=3, image_size=16, width=4), folder / "model.onnx")
    random = np.random.default_rng(0)
    for name, shape, most in (("images", (16, 16, 3), 255), ("masks", (16, 16), 3)):
        (folder / "scans" / name).mkdir(parents=True)
        for at in range(20):
            pixels = random.integers(0, most, shape).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "scans" / name / f"{at}.png")
    _configure(folder, 'source = "scans/images"\nlabel = "mask"\n[data.image]\nmasks = "../masks"')


AUDIO = '[data.audio]\nfeatures = "log_mel"\nmel_bins = 40\naxes = "channel"\nseconds = 1.0'


def sounds(folder: Path) -> None:
    UNSEEN["audio folder"](folder)
    _configure(
        folder,
        'source = "tones"\n[data.audio]\nfeatures = "log_mel"\nmel_bins = 40\naxes = "channel"\nseconds = 1.0',
    )


# -- what goes wrong

Change = Callable[[Path], object]
RUN, INIT = ("run", "config.toml"), ("init", "model.onnx", "data.csv", "--no-try", "-o", "new.toml")


@dataclass(frozen=True)
class Mistake:
    """A folder, what is wrong with it, the command, and what the answer has to name."""

    folder: Change
    named: tuple[str, ...]
    change: Change = lambda folder: None
    words: tuple[str, ...] = RUN
    status: int = 2


def setting(folder: Change, *words: str, says: tuple[str, ...], status: int = 2) -> Mistake:
    """A wrong setting on the command line of `onward run`."""
    return Mistake(folder, says, words=(*RUN, *words), status=status)


def edited(old: str, new: str) -> Change:
    """A part of the configuration is replaced."""

    def change(folder: Path) -> None:
        path = folder / "config.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


def table(new: Callable[[pd.DataFrame], pd.DataFrame], **how: Any) -> Change:
    """The table is another one, or written in another way."""

    def change(folder: Path) -> None:
        new(pd.read_csv(folder / "data.csv")).to_csv(folder / "data.csv", index=False, **how)

    return change


def written(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def gaps(column: str) -> Change:
    return table(lambda rows: rows.assign(**{column: rows[column].where(rows.index % 9 != 0)}))


def _external(folder: Path) -> None:
    proto = graphs.tiny_mlp(outputs=3)
    onnx.save(proto, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    (folder / "model.onnx.data").unlink()


def _torch_weights(folder: Path) -> None:
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", "weights")


def _duplicated(folder: Path) -> None:
    path = folder / "data.csv"
    path.write_text(path.read_text().replace("depth", "bill", 1))


def _coco(folder: Path) -> None:
    boxes = [{"bbox": [1, 2, 3, 4], "image_id": 1, "category_id": 1}]
    (folder / "annotations.json").write_text(json.dumps({"images": [], "annotations": boxes, "categories": []}))


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder / "photos")
    (folder / "photos").mkdir()


def _mask(pixels: Any) -> Change:
    return lambda folder: Image.fromarray(pixels).save(folder / "scans" / "masks" / "3.png")


SECTIONS = f'source = "data.csv"\nlabel = "species"\ninputs = {{ features = {COLUMNS} }}'
ISLANDS = (
    'source = "birds.csv"\nlabel = "species"\ninputs = { measures = ["bill", "depth", "tail"], island = "island" }'
)
SERIES = 'source = "days.csv"\nlabel = "load"\ninputs = { past = "load" }'

MISTAKES: dict[str, Mistake] = {
    # those of the new users of November
    "a label in another case": Mistake(
        classes, ("data.label", "did you mean 'species'"), edited('label = "species"', 'label = "Species"')
    ),
    "a setting by another library's name": setting(
        classes, "optimizer.lr=0.1", says=("optimizer.lr; did you mean optimizer.learning_rate",)
    ),
    "a loss by another library's name": setting(
        classes, "model.loss=crossentropy", says=("model.loss", "did you mean 'cross_entropy'")
    ),
    "a batch that does not divide": setting(
        classes, "train.global_batch_size=15", "parallel.data=2", says=("train.global_batch_size 15", "14 and 16")
    ),
    "a head for other classes": Mistake(
        classes,
        ("3 class names", "has 2 classes", "model.num_classes"),
        lambda folder: onnx.save(graphs.tiny_mlp(outputs=2), folder / "model.onnx"),
    ),
    "a GPU that is not there": setting(classes, "launch.device=cuda", says=("set launch.device = 'cpu'",), status=3),
    "no model": setting(classes, "model.path=modle.onnx", says=("model.path: there is no file", "modle.onnx")),
    "no data": setting(classes, "data.source=dta.csv", says=("data.source: there is no file", "dta.csv")),
    "an override without a value": setting(
        classes, "optimizer.learning_rate", says=("'optimizer.learning_rate'", "SECTION.KEY=VALUE")
    ),
    "a word as a number": setting(
        classes, 'optimizer.learning_rate="fast"', says=("optimizer.learning_rate", "not 'fast'")
    ),
    "no tokenizer in the configuration": Mistake(
        texts,
        ("input input_ids", '[data.text] tokenizer = "tokenizer.json"'),
        edited('[data.text]\ntokenizer = "tokenizer.json"', ""),
    ),
    "no tokenizer beside the model": Mistake(
        texts, ("data.text.tokenizer: ",), lambda folder: (folder / "tokenizer.json").unlink(), INIT
    ),
    "words for an embedding": Mistake(
        classes,
        ("input island takes int64", 'data.table.categories = ["island"]'),
        both(UNSEEN["categories"], edited(SECTIONS, ISLANDS)),
    ),
    "a setting as an option": Mistake(
        classes,
        ("No such option: --epochs. Settings are written without", "train.num_epochs=3"),
        words=(*RUN, "--epochs", "3"),
    ),
    "a setting as an option with its value": Mistake(
        classes, ("optimizer.learning_rate=3e-4",), words=(*RUN, "--lr=3e-4")
    ),
    "missing cells": Mistake(classes, ("line 2: bill is missing", 'data.table.missing = "mean"'), gaps("bill")),
    "missing labels": Mistake(numbers, ("line 2: price is missing", "data.bad_rows = 'skip'"), gaps("price")),
    "sounds without a table": Mistake(
        sounds,
        ("60 .wav: audio", "[data.audio]"),
        edited(AUDIO, ""),
    ),
    "images without a table": Mistake(images, ("30 .jpg: images", "[data.image]"), edited("[data.image]", "")),
    "boxes of COCO": Mistake(
        images,
        ("boxes of object detection (COCO)", "detect-objects.md"),
        _coco,
        ("init", "model.onnx", "annotations.json", "--no-try", "-o", "new.toml"),
    ),
    "boxes of YOLO": Mistake(
        images,
        ("boxes of object detection (YOLO)", "detect-objects.md"),
        written("data.yaml", b"train: images/train\nnc: 2\nnames: [a, b]\n"),
        ("init", "model.onnx", "data.yaml", "--no-try", "-o", "new.toml"),
    ),
    "texts longer than the positions": setting(
        texts, "data.text.max_length=500", says=("data.text.max_length 500", "set it to 32 or less")
    ),
    "several columns as one class": Mistake(
        numbers,
        ("data.label", 'model.loss = "bce_with_logits"'),
        both(edited('label = "price"', 'label = ["bill", "mass"]'), edited('loss = "mse"', 'loss = "cross_entropy"')),
    ),
    "an MLflow server that is down": setting(
        classes, "monitor.tracking_uri=http://127.0.0.1:9", says=("does not answer", "monitor.tracking_uri"), status=3
    ),
    "an image that is none": Mistake(
        images, ("bad.jpg: image is no image", "data.bad_rows = 'skip'"), written("photos/cat/bad.jpg", b"no image")
    ),
    "a series without a window": Mistake(
        classes,
        ("input past takes [24]", "[data.table.window] length = 24"),
        both(UNSEEN["series"], edited(SECTIONS, SERIES)),
    ),
    "a file that is not TOML": Mistake(
        classes, ("config.toml is not TOML", "line"), edited("num_steps = 4", "num_steps = four")
    ),
    "video": Mistake(
        images,
        ("1 .mp4: video", "save frames as images"),
        both(_emptied, written("photos/a.mp4", bytes(100))),
        ("init", "model.onnx", "photos", "--no-try", "-o", "new.toml"),
    ),
    "trees": Mistake(
        classes,
        ("TreeEnsembleClassifier", "what-it-does-not-train.md"),
        lambda folder: shutil.copyfile(FOLDER / "sklearn-forest.onnx", folder / "model.onnx"),
        INIT,
    ),
    "an output for a label of words": Mistake(
        classes,
        ("data.label takes float32", 'model.loss = "cross_entropy"'),
        both(
            lambda folder: onnx.save(graphs.tiny_mlp(), folder / "model.onnx"),
            edited('path = "model.onnx"', 'path = "model.onnx"\nloss = "mse"'),
        ),
    ),
    # more: the table
    "spaces between the columns": Mistake(
        classes, ("a single column", "data.table.separator"), table(lambda rows: rows, sep=" ")
    ),
    "another separator in the settings": setting(
        classes, "data.table.separator=;", says=("a single column", "data.table.separator")
    ),
    "decimal commas": Mistake(
        classes, ("data.table.decimal = ','",), table(lambda rows: rows, sep=";", decimal=","), INIT
    ),
    "a table in latin-1": Mistake(
        classes,
        ("bytes that are not UTF-8", "data.table.encoding = 'latin-1'"),
        table(lambda rows: rows.replace("Adelie", "Adélie"), encoding="latin-1"),
    ),
    "a table in UTF-16": Mistake(
        classes, ("data.table.encoding = 'utf-16'",), table(lambda rows: rows, encoding="utf-16")
    ),
    "a column that is there twice": Mistake(classes, ("column 'bill' is there more than once",), _duplicated),
    "dates among the numbers": Mistake(
        classes, ("column 'depth' holds text", "dates"), table(lambda rows: rows.assign(depth="2024-01-31"))
    ),
    "the label among the inputs": Mistake(
        classes, ("column 'species', the label", "data.inputs"), edited('"mass"]', '"species"]')
    ),
    "all columns, and so the label": Mistake(
        numbers,
        ("matches price, the label", "add '!price'"),
        both(
            lambda folder: onnx.save(graphs.tiny_mlp(inputs=5), folder / "model.onnx"),
            edited(COLUMNS, '"*"'),
        ),
    ),
    "one class": Mistake(
        classes, ("every row has the class 'Adelie'", "data.label"), table(lambda rows: rows.assign(species="Adelie"))
    ),
    "classes from 1 on": Mistake(
        classes,
        ("labels in column 'species' are 1..3", "0..2"),
        table(lambda rows: rows.assign(species=np.arange(len(rows)) % 3 + 1)),
    ),
    "numbers as classes": Mistake(
        numbers,
        ("data.label takes int64", 'model.loss = "mse"'),
        both(edited('loss = "mse"', 'loss = "cross_entropy"'), table(lambda rows: rows.assign(price=rows.price + 0.5))),
    ),
    "a word in a column of numbers": Mistake(
        classes,
        ("line 9: bill is 'n.a.?', not a number", "data.bad_rows = 'skip'"),
        table(lambda rows: rows.assign(bill=["n.a.?" if at == 7 else cell for at, cell in enumerate(rows.bill)])),
    ),
    "a spreadsheet": Mistake(
        classes, ("spreadsheets", "CSV"), written("data.xlsx", b"PK"), (*RUN, "data.source=data.xlsx")
    ),
    "one row": Mistake(classes, ("1 rows to train on", "data.evaluation_fraction"), table(lambda rows: rows[:1])),
    "a percentage as a fraction": setting(
        classes, "data.evaluation_fraction=20", says=("data.evaluation_fraction", "less than 1")
    ),
    # the model
    "an input by a wrong name": Mistake(
        classes,
        ("did you mean 'features'", "data.inputs.features to a list of 4 columns of numbers (bill, depth"),
        edited("features =", "feature ="),
    ),
    "too few columns": Mistake(classes, ("takes shape [4]", "data.inputs stacks 3 columns"), edited(', "mass"]', "]")),
    "weights that are not beside the model": Mistake(
        classes, ("there is no file", "model.onnx.data", "weights of model.onnx"), _external
    ),
    "safetensors": Mistake(
        classes,
        ("safetensors, which hold weights without a network", "prepare-a-model.md"),
        lambda folder: save_file({"w": np.zeros(3, np.float32)}, folder / "model.safetensors"),
        (*RUN, "model.path=model.safetensors"),
    ),
    "weights of torch.save": Mistake(
        classes,
        ("a zip archive, as torch.save", "prepare-a-model.md"),
        _torch_weights,
        ("init", "model.pt", "data.csv", "--no-try", "-o", "new.toml"),
    ),
    "a pointer of Git LFS": Mistake(
        classes, ("Git LFS", "git lfs pull"), written("model.onnx", b"version https://git-lfs.github.com/spec/v1\n")
    ),
    "a page in place of the model": Mistake(
        classes, ("a page of HTML", "download"), written("model.onnx", b"<!DOCTYPE html><html>404</html>")
    ),
    "an empty model": Mistake(classes, ("model.onnx is an empty file",), written("model.onnx", b"")),
    "a folder as the model": setting(classes, "model.path=.", says=("model.path", "is a folder")),
    "the tokenizer of another model": Mistake(
        texts,
        ("ids up to 399", "300 rows", "tokenizer of another model"),
        lambda folder: onnx.save(graphs.tiny_bert(vocab_size=300, positions=32, num_classes=2), folder / "model.onnx"),
    ),
    "a vocabulary as the tokenizer": Mistake(
        texts,
        ("data.text.tokenizer", "not a tokenizer.json", "save_pretrained"),
        written("vocab.txt", b"[PAD]\n[UNK]\n"),
        (*RUN, "data.text.tokenizer=vocab.txt"),
    ),
    # images and masks
    "an empty folder": Mistake(images, ("photos is a folder without files", "data.source"), _emptied),
    "an empty class": Mistake(
        images, ("1 class folders hold no image: owl",), lambda folder: (folder / "photos" / "owl").mkdir()
    ),
    "more classes than outputs": Mistake(
        images,
        ("4 class names", "model.num_classes"),
        lambda folder: write_classes(folder / "photos", ("owl",), 10),
    ),
    "another size of images": setting(images, "data.image.size=64", says=("data.image.size 64 x 64", "[16, 16]")),
    "a mask of another size": Mistake(
        masks, ("3.png: mask is a mask of 8 x 8", "its image is 16 x 16"), _mask(np.zeros((8, 8), np.uint8))
    ),
    "a mask of 0 and 255": Mistake(
        masks, ("3.png: mask holds class 255", "data.image.mask_values"), _mask(np.full((16, 16), 255, np.uint8))
    ),
    "a mask that is missing": Mistake(
        masks, ("1 of 20 images have no mask", "3.png"), lambda folder: (folder / "scans/masks/3.png").unlink()
    ),
    # the run
    "a learning rate of 0": setting(
        classes, "optimizer.learning_rate=0", says=("optimizer.learning_rate", "greater than 0")
    ),
    "a negative learning rate": setting(
        classes, "optimizer.learning_rate=-0.1", says=("optimizer.learning_rate", "greater than 0")
    ),
    "no epochs": Mistake(classes, ("train.num_epochs",), edited("num_steps = 4", "num_epochs = 0")),
    "steps and epochs": setting(
        classes, "train.num_epochs=3", says=("train.num_steps is 4 and train.num_epochs is 3", "exactly one")
    ),
    "a precision by another name": setting(
        classes, "precision.compute=half", says=("precision.compute", "did you mean 'fp16'")
    ),
    "a metric of another loss": setting(classes, 'metrics=["r2"]', says=("r2 needs numbers", "these fit: accuracy")),
    "a folder to write into": setting(classes, "export.path=.", says=("export.path", "name the file")),
    "a model as the configuration": Mistake(
        classes, ("model.onnx is not TOML", "onward init MODEL.onnx DATA"), words=("run", "model.onnx")
    ),
    "a table as the configuration": Mistake(
        classes, ("data.csv is not TOML", "onward init MODEL.onnx DATA"), words=("run", "data.csv")
    ),
    "a folder as the configuration": Mistake(classes, ("is a folder", "TOML file"), words=("run", ".")),
    "results of a run that there is not": Mistake(
        classes, ("no run has the name or id 'last'",), words=("predict", "last", "data.csv")
    ),
}


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that goes on to start a server fails at once."""

    @contextlib.contextmanager
    def started(**_: object) -> Iterator[str]:
        raise AssertionError("the mistake was not found: a server would be started")
        yield ""

    monkeypatch.setattr(local_run, "prefect_server", started)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_setting_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    mistake.folder(tmp_path)
    mistake.change(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["onward", *mistake.words])
    before_s = time.process_time()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    used_s = time.process_time() - before_s
    shown = capsys.readouterr()
    text = " ".join((shown.out + shown.err).split())
    assert ended.value.code == mistake.status, text
    for part in mistake.named:
        assert part in text
    assert "Traceback" not in text
    assert not (tmp_path / "home").exists(), "something was started or written"
    assert used_s < MOST_S


FOLDERS = (classes, numbers, images, texts, masks, sounds)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("folder", [classes, *(pytest.param(each, marks=pytest.mark.slow) for each in FOLDERS[1:])])
def test_without_the_mistake_the_same_folder_is_accepted(
    folder: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["onward", *RUN])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "a server would be started" in capsys.readouterr().err
