"""Large content is read once, and again as soon as anything says that it may have changed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.storage import known_content, opened_shards, sharding
from onward.trainer.data.storage.known_content import forget, once_read
from onward.trainer.data.storage.recipe import Recipe, stored_columns
from onward.trainer.run import durable_files
from onward.trainer.run.directory import RunDir
from tests.support.shards import make_shards


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as large, and was written some time ago."""
    monkeypatch.setattr(known_content, "CHEAP_BYTES", 1 << 16)
    monkeypatch.setattr(known_content, "UNSETTLED_S", 0.01)
    path = tmp_path / "large.npz"
    np.savez(path, x=np.arange(100_000))
    time.sleep(0.1)
    return path


class Reads:
    """Counts how often content is read."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.number = 0
        self._path = path
        self._folder = folder

    def __call__(self) -> str:
        self.number += 1
        return durable_files.sha256(self._path)

    def again(self) -> str:
        return once_read(self._folder, "source", [self._path], self)


@pytest.fixture
def reads(large: Path, tmp_path: Path) -> Reads:
    reads = Reads(large, tmp_path / ".known")
    assert reads.again() == reads.again() == durable_files.sha256(large)
    assert reads.number == 1
    return reads


def rewrite(path: Path, at: int, content: bytes) -> None:
    """Write in place, and set the times back."""
    before = path.stat()
    time.sleep(0.05)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_one_byte_that_is_rewritten_in_place_with_the_former_time_is_noticed(large: Path, reads: Reads) -> None:
    rewrite(large, 400_123, b"!")
    assert reads.again() == durable_files.sha256(large)
    assert reads.number == 2


def test_a_copy_and_a_touched_file_are_read_again(large: Path, reads: Reads) -> None:
    content = large.read_bytes()
    large.unlink()
    large.write_bytes(content)
    time.sleep(0.05)
    reads.again()
    os.utime(large)
    reads.again()
    assert reads.number == 3


def test_without_times_of_changes_samples_notice_what_is_large(
    large: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    class SameTimes:
        def __init__(self, path: Path) -> None:
            found = stat(path)
            self.st_size, self.st_ino, self.st_mtime_ns = found.st_size, found.st_ino, found.st_mtime_ns
            self.st_ctime_ns, self.st_ctime = 1, 1e-9

    monkeypatch.setattr(Path, "stat", lambda path, **_: SameTimes(path) if path == large else stat(path))
    reads.again()
    assert reads.number == 2
    with large.open("r+b") as file:
        file.seek(200_000)
        file.write(bytes(200_000))
    os.utime(large, ns=(1, stat(large).st_mtime_ns))
    reads.again()
    assert reads.number >= 3


def test_a_file_that_was_changed_just_now_is_not_known(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(large, tmp_path / ".known")
    monkeypatch.setattr(known_content, "UNSETTLED_S", 60.0)
    assert reads.again() == reads.again()
    assert reads.number == 2
    assert not (tmp_path / ".known").exists()


def test_small_files_are_read_each_time(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"1")
    reads = Reads(tmp_path / "small", tmp_path / ".known")
    assert reads.again() == reads.again()
    assert reads.number == 2


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files of which digests are computed."""
    found: list[str] = []

    def sha256(path: Path) -> str:
        found.append(path.name)
        return durable_files.sha256(path)

    monkeypatch.setattr(sharding, "sha256", sha256)
    monkeypatch.setattr(opened_shards, "sha256", sha256)
    return found


def test_source_and_shards_are_read_whole_once(large: Path, tmp_path: Path, digests: list[str]) -> None:
    data = DataConfig(source=str(large))
    first = make_shards(data, None, tmp_path / "cache")
    time.sleep(0.1)
    assert digests == ["large.npz"]
    assert make_shards(data, None, tmp_path / "cache") == (*first[:2], True)
    # the shards, which were new before
    assert sorted(digests) == ["evaluation-00000.arrow", "large.npz", "train-00000.arrow", "train-00001.arrow"]
    digests.clear()
    assert make_shards(data, None, tmp_path / "cache") == (*first[:2], True)
    assert digests == []
    rewrite(first[0] / "train-00001.arrow", 1000, b"????")
    assert make_shards(data, None, tmp_path / "cache") == (*first[:2], False)
    assert "train-00001.arrow" in digests


def test_what_is_found_damaged_is_known_no_longer(
    large: Path, tmp_path: Path, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig(source=str(large))
    recipe = Recipe(data, stored_columns(data, None), ())
    cache, run = tmp_path / "cache", RunDir(tmp_path / "run")
    directory, manifest, _ = sharding.shard(recipe, cache)
    run.root.mkdir()
    run.shards.symlink_to(directory)
    time.sleep(0.1)
    # what a run would give
    monkeypatch.setattr(sharding, "read_config", lambda run: SimpleNamespace(model=None, data=data))
    monkeypatch.setattr(sharding, "read_training_signature", lambda model: None)
    monkeypatch.setattr(sharding, "recipe_of", lambda config, signature: recipe)

    def results() -> list[str]:
        return [each.result for each in sharding.check_data(run)]

    def read_by_the_next_run() -> set[str]:
        digests.clear()
        assert sharding.shard(recipe, cache) == (directory, manifest, True)
        return {name.partition("-")[0] for name in digests}

    assert read_by_the_next_run() == {"train", "evaluation"}
    assert results() == ["as written", "as sharded"]
    assert read_by_the_next_run() == set()
    # bits that flip on the disk change no time
    for module, expected, read in (
        (opened_shards, ["differ", "as sharded"], {"train", "evaluation"}),
        (sharding, ["as written", "differs"], {"large.npz"}),
    ):
        with monkeypatch.context() as flipped:
            flipped.setattr(module, "sha256", lambda path: "0" * 64)
            assert results() == expected
        assert read_by_the_next_run() == read
        assert read_by_the_next_run() == set()


def test_a_record_that_may_not_be_removed_is_named(
    large: Path, reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, **_: bool) -> None:
        raise PermissionError("not yours")

    (known,) = (tmp_path / ".known").iterdir()
    with monkeypatch.context() as of_another:
        of_another.setattr(Path, "unlink", refuse)
        forget(tmp_path / ".known", "source", [large])
    assert f"{known} still says that these files did not change; remove it: not yours" in caplog.text
    forget(tmp_path / ".known", "source", [large])
    reads.again()
    assert reads.number == 2
