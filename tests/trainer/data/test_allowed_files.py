"""Which files a data source may read: those in its folder, in data.files_from, and Onward's own links to downloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.schema.allowed_files import AllowedFiles, allowed_files, folder_of, named_path, refuse_outside
from onward.trainer.errors import DataError
from onward.trainer.run.remote.remote_files import joined_directory
from onward.trainer.run.remote.stores import RemoteFile


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("data/img/a.png", "data-2/b.png", "elsewhere/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "data" / "out.png").symlink_to("../elsewhere/c.png")
    (tmp_path / "data" / "in.png").symlink_to("img/a.png")
    (tmp_path / "data" / "folder").symlink_to("../elsewhere")
    (tmp_path / "way").symlink_to("data")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [
        ("img/a.png", True),
        ("img/../img/a.png", True),
        ("absent.png", True),
        ("in.png", True),
        ("out.png", False),
        ("folder/c.png", False),
        ("folder/../data/img/a.png", True),
        ("../data-2/b.png", False),
        ("../elsewhere/c.png", False),
        ("..", False),
        ("img/..", True),
        ("/etc/passwd", False),
        ("", True),
    ],
)
@pytest.mark.parametrize("root", ["data", "way"])
def test_links_are_followed_before_a_file_is_found_inside(name: str, is_allowed: bool, root: str, place: Path) -> None:
    refusal = AllowedFiles([place / root]).refusal(place / root / name)
    assert (refusal == "") == is_allowed, refusal
    assert is_allowed or f"which is outside of {place}/data; put the file there" in refusal


@pytest.mark.parametrize("name", ["a\0/b", "x" * 300, "\ud800/y", "x/" * 3000])
def test_a_cell_that_no_file_can_have_as_its_name_is_a_bad_cell(name: str, place: Path) -> None:
    assert AllowedFiles([place / "data"]).refusal_of_cell(place / "data", name).endswith("which is no path of a file")


def test_another_folder_is_allowed_by_files_from(place: Path) -> None:
    (place / "data" / "t.csv").touch()
    for files_from in (str(place / "elsewhere"), [str(place / "elsewhere")]):
        data = DataConfig(source=str(place / "data" / "t.csv"), files_from=files_from)  # type: ignore[arg-type]
        allowed = allowed_files(data.source, data)
        assert allowed.refusal(place / "data" / "out.png") == ""
        assert f"outside of {place}/data, {place}/elsewhere;" in allowed.refusal(place / "data-2" / "b.png")
    assert DataConfig(source="x", files_from="").files_from == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "folder"),
    [("data", "data"), ("data/in.png", "data"), ("data/*/a.png", "data"), ("data/**", "data"), ("absent/x", "absent")],
)
def test_the_folder_of_a_source_is_itself_or_what_it_is_in(source: str, folder: str, place: Path) -> None:
    assert folder_of(str(place / source)) == place / folder


def test_links_of_a_pattern_are_counted(place: Path) -> None:
    for number in range(25):
        (place / "data" / f"{number:02d}.png").symlink_to("/etc/hostname")
    data = DataConfig(source=str(place / "data"))
    files = [(path.name, path) for path in sorted((place / "data").glob("[0-9]*.png"))]
    with pytest.raises(DataError) as caught:
        refuse_outside(data.source, files, data)
    *named, more = caught.value.problems
    assert len(named) == 20
    assert named[3].startswith(f"{place}/data: 03.png leads to /etc/hostname, which is outside of {place}/data; put")
    assert more == f"{place}/data: ... and 5 more"


def test_the_links_of_a_downloaded_folder_are_onwards_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(place / "home"))
    cache = place / "home" / "downloads"
    files = []
    for name in ("t.csv", "img/a.png"):
        local = cache / f"key-of-{name.replace('/', '-')}" / name.rpartition("/")[2]
        local.parent.mkdir(parents=True)
        local.touch()
        files.append((RemoteFile(url=f"s3://b/d/{name}", name=name, size=0, version={"ETag": name}), local))
    folder = joined_directory(files, cache, "d", links=True)
    data = DataConfig(source=str(folder))
    refuse_outside(data.source, [("t.csv", folder / "t.csv"), ("img/a.png", folder / "img" / "a.png")], data)
    allowed = allowed_files(data.source, data)
    assert allowed.refusal(folder / "img" / "a.png") == ""
    for name in ("../../key-of-img-a.png/a.png", "/etc/passwd", "../../../login", "img/../../x"):
        assert "which is outside of" in allowed.refusal(folder / name)


def test_the_path_of_a_cell_is_a_text_or_that_of_a_struct_without_content() -> None:
    cells = ["a.png", {"bytes": None, "path": "a.png"}, {"bytes": b"x", "path": "a.png"}, b"x", None, 3, ""]
    assert [named_path(cell) for cell in cells] == ["a.png", "a.png", "", "", "", "", ""]
