"""Raw rows of tables, images and texts are read in batches and written as CSV, Parquet or .npz; bad rows are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
from PIL import Image

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.tables import TableConfig, WindowConfig
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.export.measuring.predictions import Predictions, batch_rows, recipe_of, write_predictions
from onward.trainer.export.measuring.raw_batches import RawBatch, frame_batches, read_raw_batches
from onward.trainer.export.preprocessing.mask_files import write_masks
from onward.trainer.export.served.predictor import Predictor
from tests.support import graphs
from tests.support.exported_runs import exported_run, finished_run, two_tables
from tests.support.images import encoded, picture, write_classes

NUMBERS = dict.fromkeys("ab", "number")
CATEGORIES = {"city": "category", "age": "number"}


def read(source: Path, columns: dict[str, str], size: int = 100, **how: Any) -> list[RawBatch]:
    return list(read_raw_batches(str(source), columns, size, **how))


# -- reading


def test_a_table_is_read_in_batches_with_the_columns_that_are_taken(tmp_path: Path) -> None:
    frame = pd.DataFrame({"b": range(10), "c": ["x"] * 10, "a": np.linspace(0, 1, 10)})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    for name in ("t.csv", "t.parquet", "t.jsonl"):
        batches = read(tmp_path / name, NUMBERS, 4)
        assert [batch.ids["row"] for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert [cell for batch in batches for cell in batch.cells["b"]] == list(range(10))
        assert [set(batch.cells) for batch in batches] == [{"a", "b"}] * 3


def test_several_tables_name_the_file_as_well(tmp_path: Path) -> None:
    for name in ("one.csv", "two.csv"):
        (tmp_path / name).write_text("a,b\n1,2\n")
    batches = read(tmp_path, NUMBERS)
    assert [Path(batch.ids["file"][0]).name for batch in batches] == ["one.csv", "two.csv"]
    assert [batch.ids["row"] for batch in read(tmp_path / "*.csv", NUMBERS)] == [[0], [0]]


def test_texts_that_look_like_numbers_stay_texts_and_gaps_are_missing(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("city,age\n007,\nRome,3\n")
    (batch,) = read(tmp_path / "t.csv", CATEGORIES)
    assert batch.cells["city"] == ["007", "Rome"]
    assert np.isnan(batch.cells["age"][0])


def test_a_table_is_read_as_the_run_has_read_its_own(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a;b\n1,5;2\n")
    table = TableConfig(separator=";", decimal=",")
    (batch,) = read(tmp_path / "t.csv", NUMBERS, data=DataConfig(source="elsewhere", table=table))
    assert (batch.cells["a"], batch.cells["b"]) == ([1.5], [2.0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.csv", None, "there is no file or folder .*gone.csv"),
        ("t.csv", "a,x\n1,2\n", "t.csv has no column b; it has a, x"),
        ("t.csv", "a,b\n", "t.csv holds no rows"),
        ("t.docx", "a", r"ends in '\.docx': this model predicts rows of files that end in \.csv, \.tsv"),
    ],
)
def test_what_cannot_be_read_is_refused_before_the_first_row(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_raw_batches(str(tmp_path / name), NUMBERS, 10)


def test_a_folder_without_a_table_says_what_it_holds(tmp_path: Path) -> None:
    write_classes(tmp_path, each=2)
    with pytest.raises(DataError, match=r"but 4 \.jpg; the model takes a, b"):
        read_raw_batches(str(tmp_path), NUMBERS, 10)


def test_images_of_a_folder_a_file_and_the_cells_of_a_table(tmp_path: Path) -> None:
    write_classes(tmp_path / "photos", each=2)
    columns = {"image": "image"}
    batches = read(tmp_path / "photos", columns, 3, labels={"label": "text"})
    names = ["cat/000.jpg", "cat/001.jpg", "dog/000.jpg", "dog/001.jpg"]
    assert [name for batch in batches for name in batch.ids["file"]] == names
    assert [label for batch in batches for label in batch.cells["label"]] == ["cat", "cat", "dog", "dog"]
    (one,) = read(tmp_path / "photos" / "cat" / "001.jpg", columns)
    assert one.cells["image"] == [(tmp_path / "photos" / "cat" / "001.jpg").read_bytes()]
    (tmp_path / "t.csv").write_text("image\nphotos/cat/000.jpg\nphotos/gone.jpg\n")
    (table,) = read(tmp_path / "t.csv", columns)
    assert table.cells["image"] == [(tmp_path / "photos" / "cat" / "000.jpg").read_bytes()]
    assert list(table.bad) == [f"{tmp_path}/t.csv, line 3"]


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    write_classes(tmp_path / "photos", each=1)
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (tmp_path / "photos" / "cat" / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    with pytest.raises(DataError, match="which is outside of"):
        read_raw_batches(str(tmp_path / "photos"), {"image": "image"}, 10)


def test_texts_of_a_file_by_line_and_of_a_folder_by_file(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one\n\ntwo\n")
    (lines,) = read(tmp_path / "t.txt", {"text": "text"})
    assert lines.cells["text"] == ["one", "two"]
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("a\nb")
    (tmp_path / "more" / "b.txt").write_bytes(b"\xff")
    (files,) = read(tmp_path / "more", {"text": "text"})
    assert (files.ids["file"], files.cells["text"]) == (["a.txt"], ["a\nb"])
    assert files.bad == {str(tmp_path / "more" / "b.txt"): "cannot be read: it is not UTF-8"}
    with pytest.raises(DataError, match="files alone have one of them; give a table with all"):
        read_raw_batches(str(tmp_path / "t.txt"), {"text": "text", "age": "number"}, 10)


def test_a_frame_has_missing_cells_of_any_kind(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": pd.array([1, None], "Int64"), "b": [None, "x"], "c": [1, 2]})
    (batch,) = frame_batches(frame, {"a": "number", "b": "text"}, 10)
    assert batch.cells == {"a": [1, None], "b": [None, "x"]}
    with pytest.raises(DataError, match="the table has no column d; it has a, b, c"):
        frame_batches(frame, {"d": "number"}, 10)


# -- predicting and writing


@pytest.fixture
def predictor(tmp_path: Path) -> Predictor:
    """Of a regression that takes a and b, of which only a may be missing."""
    columns = {"a": [1.0, None, 3.0, 4.0] * 5, "b": np.arange(20.0), "label": np.arange(20.0)}
    data = two_tables(tmp_path, **columns) | {"inputs": {"features": ["a", "b"]}, "table": {"missing": {"a": "mean"}}}
    model = {"path": tmp_path / "model.onnx", "loss": "mse"}
    run = finished_run(
        exported_run(tmp_path, graphs.tiny_mlp(inputs=2), model=model, data=data), tmp_path / "model.onnx"
    )
    recipe, folder = recipe_of(run.export / "model.onnx")
    return Predictor(run.export / "model.onnx", recipe, folder)


def predictions(predictor: Predictor, source: Path, size: int = 2, **how: Any) -> Predictions:
    return Predictions(predictor, read_raw_batches(str(source), predictor.columns, size), **how)


def test_the_same_rows_in_csv_parquet_and_npz(tmp_path: Path, predictor: Predictor) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n,3\n4,5\n")
    for suffix in (".csv", ".parquet", ".npz"):
        write_predictions(tmp_path / f"out{suffix}", predictions(predictor, tmp_path / "t.csv"))
    csv, parquet = pd.read_csv(tmp_path / "out.csv"), pd.read_parquet(tmp_path / "out.parquet")
    assert list(csv) == list(parquet) == ["row", "predicted_label"]
    assert csv["row"].tolist() == [0, 1, 2]
    with np.load(tmp_path / "out.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["prediction"][:, 0], parquet["predicted_label"])
    assert (csv["predicted_label"].astype(np.float32) == parquet["predicted_label"]).all(), "to the last bit"


def test_bad_rows_fail_together_or_are_left_out(tmp_path: Path, predictor: Predictor) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n1,\n1,4\n1,5\n1,\n")
    with pytest.raises(DataError) as caught:
        write_predictions(tmp_path / "out.csv", predictions(predictor, tmp_path / "t.csv"))
    where = [problem.partition(": ")[0].rpartition("/")[2] for problem in caught.value.problems]
    assert where == ["t.csv, line 3", "t.csv, line 6"]
    assert "b is missing" in caught.value.problems[0]
    assert not (tmp_path / "out.csv").exists()
    found = predictions(predictor, tmp_path / "t.csv", skips=True)
    write_predictions(tmp_path / "out.csv", found)
    assert pd.read_csv(tmp_path / "out.csv")["row"].tolist() == [0, 2, 3]
    assert (found.num_rows, len(found.bad)) == (3, 2)


def test_many_bad_rows_are_counted_and_rows_that_are_all_bad_leave_nothing(
    tmp_path: Path, predictor: Predictor
) -> None:
    (tmp_path / "t.csv").write_text("a,b\n" + "1,\n" * 60)
    with pytest.raises(DataError) as caught:
        list(predictions(predictor, tmp_path / "t.csv", 50).tables())
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1] == "... and 30 more"
    with pytest.raises(DataError, match="no row can be predicted"):
        list(predictions(predictor, tmp_path / "t.csv", skips=True).tables())


def test_an_output_that_exists_or_has_another_suffix_is_refused(tmp_path: Path, predictor: Predictor) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    (tmp_path / "out.csv").write_text("mine")
    found = predictions(predictor, tmp_path / "t.csv")
    with pytest.raises(ConfigError, match="exists already; name another file, or add --overwrite"):
        write_predictions(tmp_path / "out.csv", found)
    with pytest.raises(ConfigError, match=r"ends in '\.xlsx'; predictions are written into \.csv, \.parquet, \.npz"):
        write_predictions(tmp_path / "out.xlsx", found)
    assert (tmp_path / "out.csv").read_text() == "mine"
    write_predictions(tmp_path / "out.csv", found, overwrite=True)
    assert (tmp_path / "out.csv").read_text().startswith("row,predicted_label\n0,")


def segmentation(folder: Path) -> Predictor:
    """A file with scores for each pixel of 16 x 16, of the tensors of a classifier."""
    data = two_tables(folder, image=[encoded(picture(at)) for at in range(4)], label=[0, 1, 2, 3]) | {"image": {}}
    run = exported_run(folder, graphs.tiny_conv_net(image_size=16), data=data)
    run = finished_run(run, folder / "model.onnx")
    recipe, place = recipe_of(run.export / "model.onnx")
    assert recipe is not None
    nodes = onnx.load(folder / "model.onnx").graph.node
    recipe["outputs"][0]["name"] = next(node.output[0] for node in nodes if node.op_type == "Relu")
    return Predictor(run.export / "model.onnx", recipe, place)


def test_masks_are_refused_as_columns_and_written_as_they_are(tmp_path: Path) -> None:
    predictor, source = segmentation(tmp_path), tmp_path / "b.parquet"
    with pytest.raises(DataError, match=r"are no columns; write masks into a folder, or the output into"):
        list(predictions(predictor, source).tables())
    write_predictions(tmp_path / "out.npz", predictions(predictor, source))
    (meaning,) = predictor.meanings
    with np.load(tmp_path / "out.npz", allow_pickle=False) as arrays:
        assert arrays["row"].tolist() == [0, 1, 2, 3]
        assert arrays[meaning["name"]].ndim == 4
    write_classes(tmp_path / "photos", each=1)
    # rows of a folder have a column `file`
    write_predictions(tmp_path / "images.npz", predictions(predictor, tmp_path / "photos"))
    with np.load(tmp_path / "images.npz", allow_pickle=False) as arrays:
        assert arrays["file"].tolist() == ["cat/000.jpg", "dog/000.jpg"]


def test_masks_become_images_with_the_class_of_each_pixel(tmp_path: Path) -> None:
    predictor = segmentation(tmp_path)
    write_classes(tmp_path / "photos", each=2)
    (tmp_path / "photos" / "cat" / "000.png").write_bytes(encoded(picture(1), "PNG"))
    write_masks(tmp_path / "masks", predictions(predictor, tmp_path / "photos"))
    written = sorted(str(path.relative_to(tmp_path / "masks")) for path in (tmp_path / "masks").rglob("*.png"))
    assert written == ["cat/000.png", "cat/000.png.png", "cat/001.png", "dog/000.png", "dog/001.png"]
    scores = predictor.outputs({"image": [(tmp_path / "photos" / "dog" / "001.jpg").read_bytes()]})
    (one,) = scores.values()
    with Image.open(tmp_path / "masks" / "dog" / "001.png") as mask:
        np.testing.assert_array_equal(np.asarray(mask), one[0].argmax(axis=0))
    with pytest.raises(ConfigError, match="masks exists already; name another folder, or add --overwrite"):
        write_masks(tmp_path / "masks", predictions(predictor, tmp_path / "photos"))


def test_images_that_are_damaged_are_named_by_file(tmp_path: Path) -> None:
    predictor = segmentation(tmp_path)
    write_classes(tmp_path / "photos", each=2)
    content = (tmp_path / "photos" / "cat" / "000.jpg").read_bytes()
    (tmp_path / "photos" / "cat" / "cut.jpg").write_bytes(content[: len(content) // 2])
    (tmp_path / "photos" / "dog" / "empty.png").touch()
    with pytest.raises(DataError) as caught:
        list(predictions(predictor, tmp_path / "photos", 4).outputs())
    reason = "image: it is no image that can be decoded"
    for problem, name in zip(caught.value.problems, ("cat/cut.jpg", "dog/empty.png"), strict=True):
        assert problem.startswith(f"{tmp_path}/photos/{name}: {reason}")
    found = predictions(predictor, tmp_path / "photos", 4, skips=True)
    assert sum(len(batch.names) for batch, _ in found.outputs()) == 4


def test_an_output_that_is_no_mask_is_not_written_as_one(tmp_path: Path, predictor: Predictor) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"a row of the output is \[1\], no mask"):
        write_masks(tmp_path / "masks", predictions(predictor, tmp_path / "t.csv"))


def test_rows_at_a_time_suit_the_data(predictor: Predictor) -> None:
    assert (batch_rows(predictor, 0), batch_rows(predictor, 7)) == (1024, 7)


def test_the_preprocessing_of_a_copy_and_of_its_variants_is_found(tmp_path: Path, predictor: Predictor) -> None:
    folder = tmp_path / "digits.preprocessing"
    folder.mkdir()
    recipe, _ = recipe_of(tmp_path / "run" / "export" / "model.onnx")
    (folder / "preprocessing.json").write_text(json.dumps(recipe))
    assert recipe_of(tmp_path / "digits.onnx")[1] == folder
    assert recipe_of(tmp_path / "digits.int8_static.onnx")[1] == folder
    assert recipe_of(tmp_path / "other.onnx") == (None, tmp_path)
    # beside the file: that of a file with another name is taken only if it is this very file, as MLflow renames it
    beside = tmp_path / "run" / "export"
    (beside / "renamed.onnx").write_bytes((beside / "model.onnx").read_bytes())
    assert recipe_of(beside / "renamed.onnx")[1] == beside
    onnx.save(graphs.tiny_mlp(inputs=2, seed=9), beside / "another.onnx")
    with pytest.raises(ConfigError, match=r"preprocessing\.json is that of model\.onnx, not of another\.onnx"):
        recipe_of(beside / "another.onnx")


def test_time_series_are_cut_into_windows_up_to_the_last_row_as_the_run_cut_its_own(tmp_path: Path) -> None:
    values = np.arange(12.0)
    pd.DataFrame({"load": values}).to_csv(tmp_path / "t.csv", index=False)
    window = WindowConfig(length=5, horizon=2)
    data = DataConfig(source="elsewhere", table=TableConfig(window=window))
    (batch,) = read(tmp_path / "t.csv", {"load": "number"}, data=data)
    assert batch.ids == {"window": list(range(8))}
    assert np.asarray(batch.cells["load"]).tolist() == [values[at : at + 5].tolist() for at in range(8)]
    # with the future as labels there are two windows less
    (labelled,) = read(tmp_path / "t.csv", {"load": "number"}, data=data, labels={"load_ahead": "number"})
    assert np.asarray(labelled.cells["load_ahead"]).tolist() == [values[at + 5 : at + 7].tolist() for at in range(6)]
