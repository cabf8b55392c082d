"""Remote files: complete and right, or not there; downloaded once for each version; errors without secrets."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from onward.trainer.errors import DataError, Refused, RuntimeUnavailable
from onward.trainer.run.remote import remote_files
from onward.trainer.run.remote.remote_files import download, joined_directory
from onward.trainer.run.remote.stores import file_beside, list_files, refuse_unwritable, upload
from tests.support.remote_servers import WebServer, cutting_proxy, object_store, web_server, without

CONTENT = os.urandom(3_000_000)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with object_store(monkeypatch) as client:
        yield client


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.01, 0.01, 0.01, 0.01))
    with web_server({"data/train.csv": CONTENT}) as server:
        yield server


def fetch(url: str, cache: Path) -> Path:
    [(_, path)] = download(list_files(url), cache, url)
    return path


def complete_files(cache: Path) -> list[Path]:
    """The files that a reader could take for a complete one."""
    return [path for path in cache.rglob("*") if path.is_file() and not path.name.startswith(".")]


def gets(web: WebServer) -> list[str]:
    return [wanted for method, _, wanted in web.served if method == "GET"]


# -- web servers


def test_a_file_is_downloaded_once_for_each_version(web: WebServer, tmp_path: Path) -> None:
    path = fetch(f"{web.url}/data/train.csv", tmp_path)
    assert (path.name, path.read_bytes()) == ("train.csv", CONTENT)
    assert fetch(f"{web.url}/data/train.csv", tmp_path) == path
    assert gets(web) == [""]
    web.files["data/train.csv"] = CONTENT[::-1]
    newer = fetch(f"{web.url}/data/train.csv", tmp_path)
    assert newer != path
    assert (newer.read_bytes(), path.read_bytes()) == (CONTENT[::-1], CONTENT)


def test_a_download_continues_where_the_connection_was_cut(web: WebServer, tmp_path: Path) -> None:
    web.cut_after, web.cuts_left = 1_000_000, 1
    assert fetch(f"{web.url}/data/train.csv", tmp_path).read_bytes() == CONTENT
    first, second = gets(web)
    assert first == ""
    assert 0 < int(second.removeprefix("bytes=").rstrip("-")) <= 1_000_000


def test_a_server_that_always_cuts_is_read_to_the_end_as_long_as_bytes_come(web: WebServer, tmp_path: Path) -> None:
    web.cut_after, web.cuts_left = 1_000_000, -1
    assert fetch(f"{web.url}/data/train.csv", tmp_path).read_bytes() == CONTENT
    assert len(gets(web)) >= 3


@pytest.mark.parametrize("cut_after", [1, 1_000_000])
def test_a_file_that_always_ends_in_the_middle_is_refused_and_not_kept(
    web: WebServer, tmp_path: Path, cut_after: int
) -> None:
    web.cut_after, web.cuts_left, web.ranges = cut_after, -1, False
    with pytest.raises(RuntimeUnavailable, match=r"the connection ended \d+ times after \d+ of 3000000 bytes"):
        fetch(f"{web.url}/data/train.csv", tmp_path)
    assert not complete_files(tmp_path)


def test_the_next_start_goes_on_where_a_download_ended(web: WebServer, tmp_path: Path) -> None:
    web.cut_after, web.cuts_left, web.ranges = 1_000_000, -1, False
    with pytest.raises(RuntimeUnavailable):
        fetch(f"{web.url}/data/train.csv", tmp_path)
    web.ranges, web.cuts_left, web.served = True, 0, []
    assert fetch(f"{web.url}/data/train.csv", tmp_path).read_bytes() == CONTENT
    [wanted] = gets(web)
    assert wanted.startswith("bytes=")


def test_a_server_without_ranges_is_read_again_from_the_beginning(web: WebServer, tmp_path: Path) -> None:
    web.ranges, web.cut_after, web.cuts_left = False, 1_000_000, 2
    assert fetch(f"{web.url}/data/train.csv", tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "header",
    [
        {"Content-MD5": base64.b64encode(hashlib.md5(b"other").digest()).decode()},
        {"Digest": "sha-256=" + base64.b64encode(hashlib.sha256(b"other").digest()).decode()},
    ],
)
def test_content_that_does_not_have_the_announced_checksum_is_refused(
    web: WebServer, tmp_path: Path, header: dict[str, str]
) -> None:
    web.headers = header
    with pytest.raises(DataError, match=r"its (md5|sha256) is .*, twice; the file in the store is damaged"):
        fetch(f"{web.url}/data/train.csv", tmp_path)
    assert not complete_files(tmp_path)


def test_a_right_checksum_is_accepted(web: WebServer, tmp_path: Path) -> None:
    web.headers = {"Content-MD5": base64.b64encode(hashlib.md5(CONTENT).digest()).decode()}
    assert fetch(f"{web.url}/data/train.csv", tmp_path).read_bytes() == CONTENT


def test_a_file_that_changes_while_it_is_listed_and_read_is_not_mixed(web: WebServer, tmp_path: Path) -> None:
    files = list_files(f"{web.url}/data/train.csv")
    web.files["data/train.csv"] = CONTENT[::-1]
    with pytest.raises(DataError, match="it changed while it was read, twice"):
        download(files, tmp_path, "train.csv")
    web.files["data/train.csv"] = CONTENT[:1000]
    with pytest.raises((DataError, RuntimeUnavailable)):
        download(files, tmp_path, "train.csv")
    assert not complete_files(tmp_path)


def test_a_server_that_names_no_version_is_asked_each_time(web: WebServer, tmp_path: Path) -> None:
    web.etags = web.times = False
    path = fetch(f"{web.url}/data/train.csv", tmp_path)
    assert fetch(f"{web.url}/data/train.csv", tmp_path) == path
    assert gets(web) == ["", ""]
    web.files["data/train.csv"] = CONTENT[::-1]  # of the same size
    newer = fetch(f"{web.url}/data/train.csv", tmp_path)
    assert newer != path
    assert (newer.read_bytes(), path.read_bytes()) == (CONTENT[::-1], CONTENT)


def test_a_server_that_names_no_size_is_refused(web: WebServer, tmp_path: Path) -> None:
    web.sizes = False
    with pytest.raises(DataError, match="does not say how long the file is"):
        fetch(f"{web.url}/data/train.csv", tmp_path)


def test_an_empty_file_is_an_empty_file(web: WebServer, tmp_path: Path) -> None:
    web.files["empty.csv"] = b""
    assert fetch(f"{web.url}/empty.csv", tmp_path).read_bytes() == b""


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (404, r"there is nothing at http://127.0.0.1:\d+/data/train.csv"),
        (403, r"http://127.0.0.1:\d+/data/train.csv may not be read; credentials: ~/.netrc"),
        (401, "may not be read"),
        (500, "cannot be read: status 500"),
    ],
)
def test_errors_of_a_web_server_name_the_url_and_the_remedy(web: WebServer, status: int, sentence: str) -> None:
    web.statuses = {"data/train.csv": status}
    with pytest.raises(Refused, match=sentence):
        list_files(f"{web.url}/data/train.csv")


def test_no_web_server_is_said_in_one_sentence() -> None:
    with pytest.raises(RuntimeUnavailable, match=r"http://127.0.0.1:9/x cannot be read: \w+; is the address right"):
        list_files("http://127.0.0.1:9/x")


def test_a_terminal_shows_a_bar_and_a_log_shows_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onward")
    for is_terminal in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        monkeypatch.setattr(remote_files.sys, "stderr", stream)
        bar = remote_files._Bar("s3://bucket/train.csv", 4_000_000)
        bar._shown_at -= 60
        bar.add(1_000_000)
        bar.clear()
        if is_terminal:
            shown = r"\[#{7} {23}\]  25% of 4 MB, .*/s, s3://bucket/train.csv"
            assert re.search(shown, stream.getvalue())
            assert not caplog.records
        else:
            assert not stream.getvalue()
    [record] = caplog.records
    assert re.fullmatch(r"downloading: 25% of 4 MB, .*/s, s3://bucket/train.csv", record.getMessage())


def test_web_servers_get_the_credentials_of_netrc(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret-word\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    web.passwords["data/train.csv"] = "Basic " + base64.b64encode(b"me:secret-word").decode()
    assert fetch(f"{web.url}/data/train.csv", tmp_path / "cache").read_bytes() == CONTENT


def test_a_full_disk_is_said_before_the_download(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 1000

    monkeypatch.setattr(remote_files.shutil, "disk_usage", lambda path: Full)
    with pytest.raises(RuntimeUnavailable, match=r"1 files need 3 MB, but .* has 1 kB free; make room there"):
        fetch(f"{web.url}/data/train.csv", tmp_path)
    assert not gets(web)


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(web: WebServer, tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # else the kernel ends the process
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(RuntimeUnavailable):
            fetch(f"{web.url}/data/train.csv", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not complete_files(tmp_path)


# -- object stores


def test_a_directory_and_a_glob_are_listed_with_the_names_of_local_ones(store: Any, tmp_path: Path) -> None:
    for name in ("train/a.csv", "train/sub/b.csv", "train/.hidden", "train/c.txt", "other.csv"):
        store.put_object(Bucket="bucket", Key=name, Body=name.encode())
    assert [file.name for file in list_files("s3://bucket/train")] == ["a.csv", "c.txt", "sub/b.csv"]
    assert [file.name for file in list_files("s3://bucket/train/")] == ["a.csv", "c.txt", "sub/b.csv"]
    assert [file.name for file in list_files("s3://bucket/train/*.csv")] == ["a.csv"]
    assert [file.name for file in list_files("s3://bucket/tr*/**/*.csv")] == ["train/a.csv", "train/sub/b.csv"]
    fetched = download(list_files("s3://bucket/train"), tmp_path, "train")
    directory = joined_directory(fetched, tmp_path, "train", links=True)
    assert {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*.*")} == {
        "a.csv": "train/a.csv",
        "c.txt": "train/c.txt",
        "sub/b.csv": "train/sub/b.csv",
    }
    assert joined_directory(fetched, tmp_path, "train", links=True) == directory


def test_files_of_a_directory_that_did_not_change_are_not_downloaded_again(
    store: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onward")
    for name in ("a", "b", "c"):
        store.put_object(Bucket="bucket", Key=f"train/{name}.csv", Body=name.encode() * 1000)
    download(list_files("s3://bucket/train"), tmp_path, "train")
    store.put_object(Bucket="bucket", Key="train/d.csv", Body=b"d" * 1000)
    download(list_files("s3://bucket/train"), tmp_path, "train")
    assert [record.getMessage() for record in caplog.records if record.name.startswith("onward")] == [
        "downloaded train: 3 files, 3 kB",
        "downloaded train: 1 files, 1 kB",
    ]


def test_an_object_is_read_in_blocks_of_one_version(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "BLOCK_BYTES", 1_000_000)
    store.put_object(Bucket="bucket", Key="a[1]*.bin", Body=CONTENT)  # a name that looks like a glob
    [file] = [file for file in list_files("s3://bucket") if file.name == "a[1]*.bin"]
    [(_, path)] = download([file], tmp_path, "a")
    assert path.read_bytes() == CONTENT


def test_a_connection_to_an_object_store_that_is_cut_in_the_middle_is_continued(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_object(Bucket="bucket", Key="a.bin", Body=CONTENT)
    port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    with cutting_proxy(port, after=1_000_000, times=2) as (proxy, came):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy}")
        s3fs.S3FileSystem.clear_instance_cache()
        assert fetch("s3://bucket/a.bin", tmp_path).read_bytes() == CONTENT
        assert sum(came) > len(CONTENT) + 1_000_000


def test_an_object_store_whose_connections_are_always_cut_leaves_no_file(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.01,))
    store.put_object(Bucket="bucket", Key="a.bin", Body=CONTENT)
    port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    with cutting_proxy(port, after=10_000, times=-1) as (proxy, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy}")
        s3fs.S3FileSystem.clear_instance_cache()
        # what s3fs itself tries again takes a minute
        monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
        with pytest.raises(RuntimeUnavailable, match=r"s3://bucket/a.bin: the connection ended 2 times after \d+ of"):
            fetch("s3://bucket/a.bin", tmp_path)
    assert not complete_files(tmp_path)


def test_absent_objects_and_buckets_are_refused(store: Any) -> None:
    for url in ("s3://bucket/none.csv", "s3://none/train.csv"):
        with pytest.raises(DataError, match=f"there is nothing at {url}"):
            list_files(url)
    with pytest.raises(DataError, match=r"s3://bucket/\*.csv: there is no file"):
        list_files("s3://bucket/*.csv")


def test_an_object_that_is_overwritten_between_listing_and_reading_is_refused(store: Any, tmp_path: Path) -> None:
    store.put_object(Bucket="bucket", Key="a.bin", Body=CONTENT)
    files = list_files("s3://bucket/a.bin")
    store.put_object(Bucket="bucket", Key="a.bin", Body=CONTENT[::-1])
    with pytest.raises(Refused):
        download(files, tmp_path, "a")
    assert not complete_files(tmp_path)


def test_a_name_that_leads_out_of_its_directory_is_refused(store: Any) -> None:
    store.put_object(Bucket="bucket", Key="model.onnx", Body=b"")
    for name in ("../secret", "/etc/passwd", "a/../../b"):
        with pytest.raises(DataError, match="not below its own directory"):
            file_beside("s3://bucket/model.onnx", name)


def test_a_file_is_uploaded_and_its_size_is_checked(store: Any, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(CONTENT)
    upload(tmp_path / "model.onnx", "s3://bucket/out/model.onnx")
    assert store.get_object(Bucket="bucket", Key="out/model.onnx")["Body"].read() == CONTENT
    with pytest.raises(Refused):
        upload(tmp_path / "model.onnx", "s3://none/model.onnx")


def test_places_that_cannot_be_written_to_are_refused(store: Any) -> None:
    refuse_unwritable("s3://bucket/out/model.onnx")
    with pytest.raises(DataError, match="there is no bucket none"):
        refuse_unwritable("s3://none/model.onnx")
    with pytest.raises(DataError, match="cannot be written by http"):
        refuse_unwritable("https://example.com/model.onnx")


@pytest.mark.parametrize(
    ("scheme", "package", "extra"),
    [
        ("s3", "s3fs", "remote"),
        ("gs", "gcsfs", "gcs"),
        ("az", "adlfs", "azure"),
        ("hf", "huggingface_hub", "huggingface"),
        ("https", "aiohttp", "remote"),
    ],
)
def test_a_missing_package_is_named_with_its_pip_line(
    scheme: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, package)
    problem = f"{scheme}:// needs {package}, which is not installed: pip install -e '.*/?.*\\[{extra}\\]'"
    with pytest.raises(RuntimeUnavailable, match=f"^{problem}$"):
        list_files(f"{scheme}://bucket/train.csv")
