"""`onward run` on damaged images and masks: status 2 with every name and nothing cached, or left out and counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import read_record
from tests.support.graphs import tiny_conv_net
from tests.support.images import encoded, picture, write_classes
from tests.support.workshop import Workshop
from tests.trainer.data.images.test_masks import mask_of, segmenter, write_pairs

pytestmark = [
    pytest.mark.usefixtures("only_servers"),
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

CONFIG = """
[model]
path = "model.onnx"
[data]
source = "images"
{data}
[data.image]
{image}
[train]
global_batch_size = 8
num_steps = 3
[launch]
device = "cpu"
threads_per_rank = 1
"""


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.close()


def refused(workshop: Workshop) -> list[str]:
    """What `onward run` says before it ends with exit status 2; it leaves no shards."""
    found = workshop.onward("run", str(workshop.root / "config.toml"), status=2, limit_s=600)
    problems: list[str] = found["problems"]
    cache = workshop.home / "shards"
    assert not cache.exists() or list(cache.iterdir()) == [], "something is cached"
    return problems


def trained_without(workshop: Workshop) -> tuple[dict[str, Any], ShardManifest]:
    """The facts of a whole run that leaves bad rows out, and what its shards hold."""
    facts = workshop.onward("run", str(workshop.root / "config.toml"), "data.bad_rows=skip", limit_s=600)
    assert facts["state"] == "exported"
    return facts, read_record(RunDir(Path(facts["directory"])).shards / "manifest.json", ShardManifest)


def test_damaged_files_are_all_named_and_nothing_is_cached_or_they_are_left_out_and_counted(
    workshop: Workshop,
) -> None:
    onnx.save(tiny_conv_net(image_size=16), workshop.root / "model.onnx")
    (workshop.root / "config.toml").write_text(CONFIG.format(data="", image='cache = "encoded"'))
    images = write_classes(workshop.root / "images", ("cat", "dog", "eel"), 14)
    whole = (images / "cat" / "000.jpg").read_bytes()
    bad = {
        "cat/corrupt.jpg": (whole[:20] + bytes(200), "image "),
        "cat/truncated.jpg": (whole[:-60], "image cannot be decoded: image file is truncated"),
        "dog/empty.jpg": (b"", "image names an empty file"),
        "eel/text.jpg": (b"this is a text file", "image is no image that can be read (19 bytes)"),
    }
    good = {
        "cat/deep.png": encoded(Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20) * 150), "PNG"),
        "dog/print.jpg": encoded(picture(1).convert("CMYK")),
        "eel/turned.jpg": encoded(picture(2), exif=turned()),
    }
    for name, content in {**{name: content for name, (content, _) in bad.items()}, **good}.items():
        (images / name).write_bytes(content)
    *problems, total = refused(workshop)
    assert len(problems) == len(bad)
    for name, (_, reason) in bad.items():
        (found,) = [each for each in problems if f"{images / name}: " in each]
        assert found.partition(": ")[2].startswith(reason)
    assert total == "4 bad rows: correct them, or set data.bad_rows = 'skip' to leave such rows out"
    _, manifest = trained_without(workshop)
    assert (manifest.skipped, manifest.rows("train") + manifest.rows("evaluation")) == (4, 3 * 14 + len(good))


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def test_masks_that_do_not_fit_are_named_and_nothing_is_cached_or_they_are_left_out_and_counted(
    workshop: Workshop,
) -> None:
    onnx.save(segmenter(), workshop.root / "model.onnx")
    (workshop.root / "config.toml").write_text(CONFIG.format(data='label = "mask"', image='masks = "../masks"'))
    write_pairs(workshop.root, 40)
    masks = workshop.root / "masks"
    (masks / "21.png").unlink()
    (problem,) = refused(workshop)
    assert problem == f"1 of 40 images have no mask in {masks}: 21.jpg"
    Image.fromarray(mask_of(1, 9, 8)).save(masks / "21.png")
    void = mask_of(22, 20, 21)
    void[:2] = 255
    Image.fromarray(void).save(masks / "22.png")
    *problems, total = refused(workshop)
    assert "21.jpg: mask is a mask of 9 x 8 pixels, but its image is 19 x 20" in problems[0]
    assert "22.jpg: mask holds class 255, but the output has 3 of them, 0..2" in problems[1]
    assert total.startswith("2 bad rows")
    (masks / "23.png").unlink()
    _, manifest = trained_without(workshop)
    assert (manifest.skipped, manifest.rows("train") + manifest.rows("evaluation")) == (3, 37)
