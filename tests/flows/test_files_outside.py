"""Data from a stranger brings no other file of the user's into the training: the whole command refuses it at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.flows.test_refusals import run_refused
from tests.support.graphs import tiny_conv_net
from tests.support.images import encoded, picture, write_classes

SECRET = b"s3cr3t-of-the-user"
CONFIG = """
[model]
path = "model.onnx"
[data]
source = "stranger/{source}"
[data.image]
[train]
global_batch_size = 8
num_steps = 4
"""
REMEDY = "put the file there, or name its folder in data.files_from"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model, a folder of a stranger's with images, and beside it files of the user: a secret, and an image."""
    onnx.save_model(tiny_conv_net(num_classes=4, image_size=16), tmp_path / "model.onnx")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret").write_bytes(SECRET)
    (tmp_path / "private" / "photo.png").write_bytes(encoded(picture(1), "PNG"))
    (tmp_path / "stranger" / "img").mkdir(parents=True)
    for number in range(40):
        (tmp_path / "stranger" / "img" / f"{number}.png").write_bytes(encoded(picture(number), "PNG"))
    os.mkfifo(tmp_path / "stranger" / "img" / "fifo.png")
    (tmp_path / "stranger" / "img" / "link.png").symlink_to(tmp_path / "private" / "photo.png")
    (tmp_path / "stranger" / "img" / "inside.png").symlink_to("1.png")
    return tmp_path


def write_table(place: Path, rows: dict[int, str], kind: str) -> str:
    """Write a table of 40 rows in which some name other files; return its name."""
    cells = [rows.get(at, f"img/{at}.png") for at in range(40)]
    labels = [at % 4 for at in range(40)]
    if kind == "csv":
        lines = ["image,label", *(f"{cell},{label}" for cell, label in zip(cells, labels, strict=True))]
        (place / "stranger" / "t.csv").write_text("\n".join(lines) + "\n")
    elif kind == "jsonl":
        lines = [json.dumps({"image": cell, "label": label}) for cell, label in zip(cells, labels, strict=True)]
        (place / "stranger" / "t.jsonl").write_text("\n".join(lines) + "\n")
    else:
        structs = [{"bytes": None, "path": cell} for cell in cells]
        pq.write_table(pa.table({"image": structs, "label": labels}), place / "stranger" / "t.parquet")
    return f"t.{kind}"


def command_refuses(place: Path, source: str, *overrides: str) -> list[str]:
    (place / "config.toml").write_text(CONFIG.format(source=source))
    problems, lines = run_refused(place, *overrides)
    assert SECRET.decode()[:4] not in "".join([*problems, *lines]), "a refusal quotes the file"
    return problems


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("bad_rows", ["fail", "skip"])
def test_cells_that_name_files_elsewhere_are_refused_with_their_rows(kind: str, bad_rows: str, place: Path) -> None:
    private = place / "private"
    attacks = {
        3: (str(private / "photo.png"), private / "photo.png"),
        5: ("../private/secret", private / "secret"),
        17: ("img/link.png", private / "photo.png"),
        23: ("/proc/self/environ", Path(f"/proc/{os.getpid()}/environ")),
        38: ("img/../../private/photo.png", private / "photo.png"),
    }
    source = write_table(place, {row: cell for row, (cell, _) in attacks.items()}, kind)
    problems = command_refuses(place, source, f"data.bad_rows={bad_rows}")
    assert len(problems) == len(attacks)
    for problem, (row, (_, real)) in zip(problems, attacks.items(), strict=True):
        unit, first = ("row", 1) if kind == "parquet" else ("line", 2 if kind == "csv" else 1)
        where = f"{place}/stranger/{source}, {unit} {row + first}: image names "
        assert problem.startswith(where)
        shown = problem.removeprefix(where)
        if row != 23:  # the process of the command has another number
            assert shown == f"{real}, which is outside of {place}/stranger; {REMEDY}"
        assert shown.endswith(REMEDY)


def test_a_url_in_a_cell_is_refused_and_never_fetched(place: Path) -> None:
    rows = {1: "file:///etc/passwd", 2: "s3://other-bucket/a.png", 30: "http://127.0.0.1:9/a.png"}
    problems = command_refuses(place, write_table(place, rows, "csv"))
    why = "a URL: cells name files of this machine; name URLs in data.source"
    assert problems == [
        f"{place}/stranger/t.csv, line {row + 2}: image names {url}, {why}" for row, url in rows.items()
    ]


def link_of_an_image(place: Path) -> str:
    images = write_classes(place / "stranger" / "classes", ("a", "b", "c", "d"), 10)
    (images / "a" / "photo.jpg").symlink_to(place / "private" / "photo.png")
    return "classes"


def link_of_a_text(place: Path) -> str:
    folder = place / "stranger" / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("good")
    (folder / "b.txt").symlink_to(place / "private" / "secret")
    return "texts/*.txt"


def link_of_a_table(place: Path) -> str:
    folder = place / "stranger" / "tables"
    folder.mkdir()
    (folder / "a.csv").write_text("image,label\n../img/1.png,0\n")
    (folder / "b.csv").symlink_to(place / "private" / "secret")
    return "tables"


@pytest.mark.parametrize("make", [link_of_an_image, link_of_a_text, link_of_a_table])
def test_links_in_a_folder_that_lead_out_of_it_are_refused(make: Callable[[Path], str], place: Path) -> None:
    (problem,) = command_refuses(place, make(place))
    assert f"leads to {place}/private/" in problem
    assert problem.endswith(REMEDY)


@pytest.mark.slow
def test_another_root_is_allowed_by_name_alone(place: Path) -> None:
    source = write_table(place, {3: str(place / "private" / "photo.png"), 5: "/elsewhere/x.png"}, "csv")
    (problem,) = command_refuses(place, source, "data.files_from='private'")
    assert problem.startswith(f"{place}/stranger/t.csv, line 7: image names /elsewhere/x.png, which is outside of ")
    assert problem.endswith(f"{place}/stranger, {place}/private; {REMEDY}")
    (problem,) = command_refuses(place, source, "data.files_from=['absent', 'private', '/elsewhere']")[:1]
    assert problem == f"data.files_from: there is no directory {place}/absent"
    (problem,) = command_refuses(place, source, "data.files_from='s3://bucket/private'")
    assert "data.files_from: names directories of this machine, not s3://bucket/private" in problem
