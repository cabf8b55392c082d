"""Training from a real S3 server, with less room than the data needs, has the bits of training from a disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs

from onward.trainer.checkpoint.bundle import write_bundle
from onward.trainer.checkpoint.verification import newest_complete
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.reading.fetching import fetch
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.shard_cache import LIMIT
from onward.trainer.run.directory import RunDir
from tests.support.graphs import tiny_mlp
from tests.support.runs import assert_equal_bits, final_tensors, make_run, train_run, train_until
from tests.support.s3_server import S3Server, faulty_proxy, s3_server
from tests.support.shards import make_shards

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
NUM_ROWS = 20_000
FILES = 80


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """18 MB in 80 files."""
    random = np.random.default_rng(0)
    columns = {"features": random.normal(size=(NUM_ROWS, 256)), "label": random.normal(size=(NUM_ROWS, 1))}
    np.savez(tmp_path / "data.npz", **{name: values.astype(np.float32) for name, values in columns.items()})
    data = DataConfig(source=str(tmp_path / "data.npz"), rows_per_shard=NUM_ROWS * 9 // 10 // FILES)
    return make_shards(data, None, tmp_path / "made")[0]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3", monkeypatch) as started:
        yield started


def run_of(folder: Path, source: str, ranks: int, **train: Any) -> RunDir:
    return make_run(
        folder,
        tiny_mlp(inputs=256),
        {},
        data={"source": source},
        loss={"name": "mse"},
        train={"num_epochs": 2, "global_batch_size": 200, "shuffle": "files"} | train,
        parallel={"data": ranks},
        checkpoint={"period": 20},
    )


class Watched:
    """The most that the files of a cache take while it is watched, and how many were fetched."""

    def __init__(self, cache: Path) -> None:
        self.most = 0
        self.left_parts: list[Path] = []
        self._cache = cache
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()
        self.left_parts = list(self._cache.glob(".*.partial"))

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            used = 0
            for path in self._cache.glob("*.arrow"):
                try:
                    used += path.stat().st_size
                except FileNotFoundError:
                    continue
            self.most = max(self.most, used)


@pytest.mark.parametrize(("ranks", "is_killed"), [(1, False), (1, True), (2, True)])
def test_data_larger_than_the_cache_trains_to_the_bits_of_a_disk_also_killed_and_resumed(
    tmp_path: Path, shards: Path, server: S3Server, ranks: int, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs.S3FileSystem().put(str(shards), f"bucket/shards/{shards.name}", recursive=True)
    local = open_shards(shards, "train")
    largest = max(file.bytes for file in local.manifest.train)
    limit = (35 + 2 * ranks) * largest
    assert 2 * limit < local.size_bytes * 1.1
    monkeypatch.setenv(LIMIT, str(limit / 1e9))
    on_disk = run_of(tmp_path / "disk", str(shards), ranks)
    train_run(on_disk)

    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "far" / "home"))
    [copy] = fetch({"data": DataConfig(source=f"s3://bucket/shards/{shards.name}")})[0].copies
    assert copy.bytes < 100_000
    far = run_of(tmp_path / "far", str(copy.path), ranks)
    cache = tmp_path / "far" / "home" / "streamed"
    with faulty_proxy(server.ports["s3.port"]) as proxy, Watched(cache) as watched:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        if is_killed:
            train_until(far, ("checkpoint", 60), rank=ranks - 1)
            # the server goes away, too, and comes back
            proxy.is_down = True
            threading.Timer(6, setattr, (proxy, "is_down", False)).start()
        train_run(far)
    assert 0.5 * limit < watched.most <= limit
    # once per epoch, but for what the second attempt reads again
    size = sum(file.bytes for file in (*local.manifest.train, *local.manifest.evaluation))
    print(f"{proxy.sent_bytes / size:.2f} of {size} bytes, at most {watched.most} of {limit} on the disk")
    assert size < proxy.sent_bytes < (2.7 if is_killed else 2.02) * size
    assert watched.left_parts == []
    assert_equal_bits(final_tensors(far), final_tensors(on_disk))
    # a bundle is exported where there is no server: the rows to evaluate on are in it
    newest = newest_complete(far)
    assert newest is not None
    bundle = write_bundle(far, newest, tmp_path / "run.bundle")
    rows = {file.name for file in (*local.manifest.evaluation, *local.manifest.test)}
    assert {Path(name).name for name in bundle.files if name.startswith("run/shards/")} == {*rows, "manifest.json"}
