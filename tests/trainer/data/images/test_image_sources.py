"""Folders of classes, tables of paths or bytes and tar files are read alike; what is wrong with them has its name."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.data.images.geometry import fitted_image
from onward.trainer.data.images.image_decoding import decode_image
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.data.storage.shards import ShardManifest, Split
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError, DataError
from tests.support import graphs
from tests.support.images import encoded, picture, write_classes

CONTENTS = [encoded(picture(at, 18 + at % 9, 20 + at % 7)) for at in range(40)]


class Sharded:
    """What sharding makes of a source, after the checks of `onward run`."""

    def __init__(self, folder: Path, source: Path, **data: Any) -> None:
        onnx.save(graphs.tiny_conv_net(image_size=16), folder / "model.onnx")
        raw = {
            "model": {"path": folder / "model.onnx"},
            "data": {"source": str(source), "image": {}, "evaluation_fraction": 0.25} | data,
            "train": {"global_batch_size": 4, "num_steps": 1},
        }
        self.config = build_config(raw, check=check_files_and_data)
        self.cache = folder / "cache"
        self.directory, self.manifest, _ = make_training_shards(self.config, self.cache)

    def rows(self) -> list[tuple[bytes, int]]:
        """(pixels, label) of all rows of both splits."""
        found = []
        for split in ("train", "evaluation"):
            found += rows_of(self.directory, self.manifest, split)
        return sorted(found)


def rows_of(directory: Path, manifest: ShardManifest, split: Split) -> list[tuple[bytes, int]]:
    values = open_shards(directory, split).read(np.arange(manifest.rows(split)))
    return [(image.tobytes(), int(label)) for image, label in zip(values["image"], values["label"], strict=True)]


def expected(contents: dict[bytes, int]) -> list[tuple[bytes, int]]:
    """(pixels, label) of encoded images, as torchvision's transforms make them (test_geometry.py)."""
    from onward.trainer.config.sections.images import ImageConfig

    fitted = {content: fitted_image(decode_image(content, grey=False), (16, 16), ImageConfig()) for content in contents}
    return sorted((np.asarray(fitted[content]).tobytes(), label) for content, label in contents.items())


# -- folders


def test_a_folder_of_classes_is_read_with_the_folders_sorted_as_classes(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "images", ("dog", "cat", "eel"), 12)
    (source / "eel" / "deeper").mkdir()
    (source / "eel" / "000.jpg").rename(source / "eel" / "deeper" / "000.jpg")
    (source / "README.txt").write_text("no image")
    (source / ".hidden").mkdir()
    found = Sharded(tmp_path, source)
    assert found.manifest.fitted["label"].classes == ("cat", "dog", "eel")
    paths = list(source.rglob("*.jpg"))
    files = {path.read_bytes(): ("cat", "dog", "eel").index(path.relative_to(source).parts[0]) for path in paths}
    assert found.rows() == expected(files)
    assert 0 < found.manifest.rows("evaluation") < 20
    assert "[3, 16, 16] RGB NCHW" in found.manifest.preprocessing
    assert "mean and std" in found.manifest.preprocessing


def test_no_image_changes_sides_when_others_are_added(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "images", each=20)
    before = Sharded(tmp_path, source)
    held_out = rows_of(before.directory, before.manifest, "evaluation")
    for at in range(5):
        (source / "cat" / f"0{at}a.jpg").write_bytes(CONTENTS[30 + at])
    after = Sharded(tmp_path, source)
    assert set(held_out) <= set(rows_of(after.directory, after.manifest, "evaluation"))
    train = rows_of(before.directory, before.manifest, "train")
    assert set(train) <= set(rows_of(after.directory, after.manifest, "train"))


def test_a_folder_to_evaluate_on_has_the_same_classes(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "train", each=4)
    held_out = write_classes(tmp_path / "val", each=3, first=50)
    found = Sharded(tmp_path, source, evaluation_source=str(held_out))
    assert (found.manifest.rows("train"), found.manifest.rows("evaluation")) == (8, 6)
    (held_out / "dog").rename(held_out / "eel")
    with pytest.raises(ConfigError, match=r"1 class folders that data.source lacks: eel; data.source has 2"):
        Sharded(tmp_path, source, evaluation_source=str(held_out))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("empty", r"1 class folders hold no image: eel; remove or fill them"),
        ("beside", r"1 image files are beside the class folders: stray.jpg; .* as the other 8"),
        ("none", r"of 1 files none are images: 1 .doc: documents; save their text as .txt"),
    ],
)
def test_folders_that_are_no_classes_are_refused_before_anything_starts(
    change: str, message: str, tmp_path: Path
) -> None:
    source = tmp_path / "images"
    if change == "none":
        source.mkdir()
        (source / "notes.doc").write_text("x")
    else:
        write_classes(source, each=4)
    if change == "empty":
        (source / "eel").mkdir()
    if change == "beside":
        (source / "stray.jpg").write_bytes(CONTENTS[0])
    with pytest.raises(ConfigError, match=message):
        Sharded(tmp_path, source, **({"format": "images"} if change == "none" else {}))


def test_images_without_a_table_data_image_are_refused_with_the_hint(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "images", each=4)
    with pytest.raises(ConfigError, match=r"8 \.jpg: images; a table \[data.image\] makes Onward decode images"):
        Sharded(tmp_path, source, image=None)


# -- tables


def test_tables_of_paths_bytes_and_structs_give_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for at, content in enumerate(CONTENTS):
        (tmp_path / "files" / f"{at}.jpg").write_bytes(content)
    paths, labels = [f"files/{at}.jpg" for at in range(40)], [at % 4 for at in range(40)]
    pd.DataFrame({"image": paths, "label": labels}).to_csv(tmp_path / "paths.csv", index=False)
    pq.write_table(pa.table({"image": CONTENTS, "label": labels}), tmp_path / "bytes.parquet")
    structs = [{"bytes": content, "path": f"{at}.jpg"} for at, content in enumerate(CONTENTS)]
    pq.write_table(pa.table({"image": structs, "label": labels}), tmp_path / "structs.parquet")
    wanted = expected(dict(zip(CONTENTS, labels, strict=True)))
    for name in ("paths.csv", "bytes.parquet", "structs.parquet"):
        assert Sharded(tmp_path, tmp_path / name).rows() == wanted


def test_another_file_under_the_same_path_makes_other_shards(tmp_path: Path) -> None:
    for at in range(8):
        (tmp_path / f"{at}.jpg").write_bytes(CONTENTS[at])
    pd.DataFrame({"image": [f"{at}.jpg" for at in range(8)], "label": [0, 1] * 4}).to_csv(
        tmp_path / "t.csv", index=False
    )
    before = Sharded(tmp_path, tmp_path / "t.csv")
    (tmp_path / "3.jpg").write_bytes(CONTENTS[20])
    after = Sharded(tmp_path, tmp_path / "t.csv")
    assert before.manifest.key != after.manifest.key
    assert after.rows() == expected({CONTENTS[20 if at == 3 else at]: at % 2 for at in range(8)})


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([0.5] * 8, r"image takes encoded images or paths, but column 'image' holds float64; leave \[data.image\] out"),
        (["absent.jpg"] * 8, r"row 1: image names a file that cannot be read"),
        ([b"no image at all"] * 8, r"image is no image that can be read .15 bytes"),
    ],
)
def test_columns_that_hold_no_images_are_refused_before_anything_starts(
    column: Any, message: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"image": column, "label": [0, 1] * 4}), tmp_path / "t.parquet")
    with pytest.raises((ConfigError, DataError), match=message):
        Sharded(tmp_path, tmp_path / "t.parquet")


# -- corrupt files


@pytest.mark.parametrize("cache", ["decoded", "encoded"])
def test_a_corrupt_file_stops_sharding_with_its_name_and_leaves_nothing_behind(cache: str, tmp_path: Path) -> None:
    source = write_classes(tmp_path / "images", each=8)
    whole = (source / "dog" / "003.jpg").read_bytes()
    (source / "dog" / "003.jpg").write_bytes(whole[:-60])
    (source / "cat" / "001.jpg").write_bytes(b"")
    with pytest.raises(DataError) as refused:
        Sharded(tmp_path, source, image={"cache": cache})
    assert f"{source}/cat/001.jpg: image names an empty file" in str(refused.value)
    assert f"{source}/dog/003.jpg: image cannot be decoded: image file is truncated" in str(refused.value)
    assert "2 bad rows" in str(refused.value)
    assert list((tmp_path / "cache").iterdir()) == []
    skipping = Sharded(tmp_path, source, image={"cache": cache}, bad_rows="skip")
    assert skipping.manifest.skipped == 2
    assert skipping.manifest.rows("train") + skipping.manifest.rows("evaluation") == 14


# -- tar files


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_tar_files_of_webdataset_are_read_as_a_stream(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    for number in range(2):
        members = {}
        for at in range(20 * number, 20 * number + 20):
            members[f"set.a/{at:04d}.jpg"] = CONTENTS[at]
            members[f"set.a/{at:04d}.cls"] = str(at % 4).encode()
            members[f"set.a/{at:04d}.json"] = json.dumps({"kind": at % 3}).encode()
        write_tar(tmp_path / "tars" / f"{number}.tar", members)
    by_number = Sharded(tmp_path, tmp_path / "tars")
    assert by_number.rows() == expected({content: at % 4 for at, content in enumerate(CONTENTS)})
    by_key = Sharded(tmp_path, tmp_path / "tars", label="kind")
    assert by_key.manifest.table["kind"].extremes == (0, 1, 2)


def test_samples_of_a_tar_file_that_lack_something_are_bad_rows_and_a_cut_file_is_refused(tmp_path: Path) -> None:
    members = {f"{at}.{kind}": content for at in range(8) for kind, content in (("jpg", CONTENTS[at]), ("cls", b"1"))}
    del members["2.cls"]
    members["5.cls"] = b"five"
    members["6.jpg"] = CONTENTS[6][:-50]
    source = write_tar(tmp_path / "t.tar", members)
    with pytest.raises(DataError) as refused:
        Sharded(tmp_path, source)
    for line in ("2: label is missing", "5: cls is b'five', not a class number", "6: image cannot be decoded"):
        assert f"t.tar, sample {line}" in str(refused.value)
    whole = source.read_bytes()
    source.write_bytes(whole[: len(whole) // 2 + 100])
    with pytest.raises((ConfigError, DataError), match=r"t\.tar cannot be read as a tar file"):
        Sharded(tmp_path, source)
    source.write_bytes(b"")
    with pytest.raises((ConfigError, DataError), match=r"t\.tar is empty \(0 bytes\)"):
        Sharded(tmp_path, source)
