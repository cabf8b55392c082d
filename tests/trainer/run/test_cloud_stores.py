"""gs://, az:// and hf://: read, written, cut in the middle, refused, against servers on 127.0.0.1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.trainer.errors import DataError, Refused, RuntimeUnavailable
from onward.trainer.run.remote import remote_files
from onward.trainer.run.remote.remote_files import download, joined_directory
from onward.trainer.run.remote.stores import list_files, refuse_unwritable, upload
from tests.support.cloud_stores import STORES, CloudStore, hugging_face, without_pauses
from tests.support.remote_servers import cutting_proxy

pytestmark = [
    pytest.mark.slow,
    # these libraries leave files and connections to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

CONTENT = os.urandom(3_000_000)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudStore]:
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(remote_files, "BLOCK_BYTES", 1_000_000)
    without_pauses(monkeypatch)
    with STORES[request.param](monkeypatch) as found:
        yield found


def complete_files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() and not path.name.startswith(".")]


def test_files_are_listed_read_once_for_each_version_and_written(store: CloudStore, tmp_path: Path) -> None:
    for name in ("train/a.csv", "train/sub/b.csv", "train/c.txt", "other.csv"):
        store.put(name, name.encode())
    assert [file.name for file in list_files(f"{store.url}/train")] == ["a.csv", "c.txt", "sub/b.csv"]
    assert [file.name for file in list_files(f"{store.url}/train/*.csv")] == ["a.csv"]
    fetched = download(list_files(f"{store.url}/train"), tmp_path / "cache", "train")
    directory = joined_directory(fetched, tmp_path / "cache", "train", links=True)
    assert (directory / "sub" / "b.csv").read_text() == "train/sub/b.csv"

    (tmp_path / "model.onnx").write_bytes(CONTENT)
    refuse_unwritable(f"{store.url}/out/model.onnx")
    upload(tmp_path / "model.onnx", f"{store.url}/out/model.onnx")
    assert store.get("out/model.onnx") == CONTENT
    [(_, path)] = download(list_files(f"{store.url}/out/model.onnx"), tmp_path / "cache", "model")
    assert path.read_bytes() == CONTENT
    (tmp_path / "model.onnx").write_bytes(CONTENT[::-1])
    upload(tmp_path / "model.onnx", f"{store.url}/out/model.onnx")
    [(_, newer)] = download(list_files(f"{store.url}/out/model.onnx"), tmp_path / "cache", "model")
    assert (newer.read_bytes(), path.read_bytes()) == (CONTENT[::-1], CONTENT)


def test_a_connection_that_is_cut_in_the_middle_is_continued(store: CloudStore, tmp_path: Path) -> None:
    store.put("a.bin", CONTENT)
    with cutting_proxy(store.port, after=1_200_000, times=2) as (proxy, came):
        store.aim(proxy)
        [(_, path)] = download(list_files(f"{store.url}/a.bin"), tmp_path, "a")
        assert path.read_bytes() == CONTENT
        assert len(came) > 1


def test_connections_that_are_always_cut_leave_no_file_and_say_so(store: CloudStore, tmp_path: Path) -> None:
    store.put("a.bin", CONTENT)
    files = list_files(f"{store.url}/a.bin")
    with cutting_proxy(store.port, after=10_000, times=-1) as (proxy, _):
        store.aim(proxy)
        with pytest.raises(RuntimeUnavailable, match=rf"{store.url}/a.bin: the connection ended \d times after 0 of 3"):
            download(files, tmp_path, "a")
    assert not complete_files(tmp_path)


def test_what_is_absent_is_said(store: CloudStore) -> None:
    store.put("a.csv", b"1")
    for url in (f"{store.url}/none.csv", store.url.replace("bucket", "none") + "/a.csv"):
        with pytest.raises(DataError, match=f"there is nothing at {url}"):
            list_files(url)
    with pytest.raises(DataError, match="there is no file"):
        list_files(f"{store.url}/*.parquet")
    with pytest.raises(Refused):
        upload(Path(__file__), store.url.replace("bucket", "none") + "/a.csv")


def test_a_store_that_is_not_there_is_said_in_one_sentence(store: CloudStore) -> None:
    store.aim(9)
    with pytest.raises(RuntimeUnavailable, match=rf"^{store.url}/a.csv cannot be read: \w+; is the address right"):
        list_files(f"{store.url}/a.csv")


def test_wrong_credentials_are_said_with_the_place_of_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with hugging_face(monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(DataError, match="HF_TOKEN, or `hf auth login`") as refusal:
            list_files("hf://datasets/me/bucket/a.csv")
        assert "hf_wrong" not in str(refusal.value)
