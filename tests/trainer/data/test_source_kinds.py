"""Files that are no data as they are, are named by their kinds, each with the setting or the way out."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

import onward
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.formats.format_table import suffixes
from onward.trainer.data.reading.source_kinds import KINDS
from onward.trainer.data.reading.sources import locate
from onward.trainer.errors import ConfigError, DataError
from tests.support import graphs
from tests.support.images import encoded, picture, write_classes

COCO = {
    "images": [{"id": 1, "file_name": "0.png"}],
    "annotations": [{"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4]}],
    "categories": [{"id": 2, "name": "cat"}],
}
VOC = "<annotation><object><name>cat</name><bndbox><xmin>1</xmin></bndbox></object></annotation>"


def test_no_format_that_is_read_is_said_not_to_be() -> None:
    named = {suffix for kind in KINDS for suffix in kind.suffixes}
    assert named & suffixes().keys() == set()


def sounds(folder: Path) -> Path:
    for name in ("de", "fr"):
        (folder / "clips" / name).mkdir(parents=True)
        for at in range(3):
            with wave.open(str(folder / "clips" / name / f"{at}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(8000)
                file.writeframes(bytes(1600))
    return folder / "clips"


def files(folder: Path, **contents: str) -> Path:
    for name, content in contents.items():
        path = folder / "data" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder / "data"


def yolo(folder: Path) -> Path:
    data = files(folder, data_dot_yaml="train: images\nval: images\nnames: [cat, dog]\n")
    (data / "images").mkdir()
    (data / "labels").mkdir()
    for at in range(3):
        (data / "images" / f"{at}.png").write_bytes(encoded(picture(at, 8, 8), "PNG"))
        (data / "labels" / f"{at}.txt").write_text("0 0.5 0.5 0.25 0.25\n1 0.2 0.2 0.3 0.4\n")
    return data


BOXES = "data.source is the folder of images"
UNKNOWN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "sounds": (sounds, "of 6 files none can be read as they are: 6 .wav: audio; a table [data.audio] makes"),
    "images": (
        lambda folder: write_classes(folder / "photos", each=2),
        ": images; a table [data.image] makes Onward decode images",
    ),
    "notes": (lambda folder: files(folder, a_dot_md="hello"), '1 .md: text; data.source = "FOLDER/**/*.md" reads them'),
    "video": (lambda folder: files(folder, a_dot_mp4="x"), "1 .mp4: video; Onward does not read video: save frames as"),
    "a JSON list": (lambda folder: files(folder, a_dot_json="[{}]"), "write a table as JSON Lines: one object on each"),
    "pickles": (lambda folder: files(folder, a_dot_pkl="x"), "does not load them, because loading runs their code"),
    "no ending": (lambda folder: files(folder, README="x"), "1 without an ending: no format that Onward knows"),
    "two kinds": (
        lambda folder: files(folder, a_dot_xlsx="x", b_dot_xlsx="x", c_dot_npy="x"),
        "2 .xlsx: spreadsheets; save the sheet as CSV. 1 .npy: arrays of numpy; write one .npz",
    ),
    "COCO": (lambda folder: files(folder, a_dot_json=json.dumps(COCO)), f"boxes of object detection (COCO): {BOXES}"),
    "Pascal VOC": (lambda folder: files(folder, a_dot_xml=VOC), f"boxes of object detection (Pascal VOC): {BOXES}"),
    "YOLO": (yolo, f"boxes of object detection (YOLO): {BOXES}"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_cannot_be_read_is_named_by_its_kind_with_what_to_do(case: str, tmp_path: Path) -> None:
    write, sentence = UNKNOWN[case]
    with pytest.raises(DataError) as refused:
        locate(str(write(tmp_path)), DataConfig(source="x"))
    assert sentence in str(refused.value)
    assert "*.py" not in str(refused.value)


def test_files_that_the_given_pattern_or_format_leaves_out_are_named(tmp_path: Path) -> None:
    data = files(tmp_path, a_dot_md="hello", b_dot_md="world")
    with pytest.raises(DataError, match=r"of 2 files none can be read as they are: 2 \.md: text"):
        locate(str(data), DataConfig(source="x"))
    assert [name for name, _ in locate(str(data / "**" / "*.md"), DataConfig(source="x")).files] == ["a.md", "b.md"]
    with pytest.raises(DataError, match=r"of 2 files none are csv: 2 \.md: text"):
        locate(str(data), DataConfig(source="x", format="csv"))


def test_an_ending_belongs_to_one_kind() -> None:
    endings = [suffix for kind in KINDS for suffix in kind.suffixes]
    assert len(endings) == len(set(endings))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("data/data.yaml", r"boxes of object detection \(YOLO\).*data\.label=\.\.\. leaves the boxes aside"),
        # the boxes beside a folder of images are found, and the model is none that learns them
        ("data", "boxes are learned by class scores .* The outputs are"),
        ("data/images", "boxes are learned by class scores .* The outputs are"),
    ],
)
def test_init_says_which_boxes_are_not_learned_before_it_proposes_anything(
    place: str, said: str, tmp_path: Path
) -> None:
    onnx.save(graphs.tiny_conv_net(), tmp_path / "model.onnx")
    yolo(tmp_path)
    with pytest.raises((ConfigError, DataError), match=said):
        onward.init(tmp_path / "model.onnx", tmp_path / place, output=tmp_path / "config.toml", steps=0)
    assert not (tmp_path / "config.toml").exists()


def test_init_says_of_sounds_what_a_model_would_have_to_take(tmp_path: Path) -> None:
    onnx.save(graphs.tiny_mlp(), tmp_path / "model.onnx")
    message = r"the data is audio \(6 files .* not one input alone can take a clip .*: features float32 \[\?, 4\]"
    with pytest.raises(ConfigError, match=message):
        onward.init(tmp_path / "model.onnx", sounds(tmp_path), output=tmp_path / "config.toml", steps=0)
