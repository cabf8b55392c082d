"""Shards at a URL: files are fetched when their rows are needed, into a cache that never exceeds its limit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.data.batches.batches import Batches
from onward.trainer.data.batches.cache_needs import cache_problems
from onward.trainer.data.batches.sample_stream import permutation_in_blocks, sample_stream
from onward.trainer.data.batches.shard_read_ahead import ShardReadAhead
from onward.trainer.data.formats.arrow_shards import ArrowReader
from onward.trainer.data.formats.finished_shards import shards_at
from onward.trainer.data.reading.fetching import fetch
from onward.trainer.data.resolve import resolve
from onward.trainer.data.schema.columns import ColumnType
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage import shard_cache
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.data.storage.opened_shards import damaged_files, open_shards
from onward.trainer.data.storage.shard_cache import ShardCache, StoredFile
from onward.trainer.data.storage.sharding import check_data, make_training_shards
from onward.trainer.data.storage.shards import ShardFile, ShardManifest, Shards
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError, DataError, RuntimeUnavailable, ServerUnavailable, StorageUnavailable
from onward.trainer.run.outcomes.ending_kinds import ENDINGS, kind_of_rank_error
from onward.trainer.run.records import read_record
from onward.trainer.run.remote import remote_files
from onward.trainer.run.remote.stores import RemoteFile
from tests.support.graphs import tiny_mlp
from tests.support.runs import make_run
from tests.support.shards import make_shards
from tests.trainer.data.images.test_image_batches import Stored
from tests.trainer.data.test_class_names import labelled
from tests.trainer.data.text.test_masking import masked

FILE_ROWS = 99  # odd: no half of a file is a whole number of rows


@dataclass
class Served:
    """A directory of shards, the URL of its manifest, and what was asked of the server."""

    directory: Path
    url: str
    home: Path
    fetched: list[str] = field(default_factory=list)
    is_away: bool = False
    is_slow: threading.Event = field(default_factory=threading.Event)
    """Half of a file is sent, and nothing more."""
    trickles: bool = False
    """A file comes in small pieces."""

    @property
    def cache(self) -> Path:
        return self.home / "streamed"

    def open(self, split: Any = "train") -> Shards:
        return open_shards(self.place(), split)

    def place(self) -> Path:
        """The directory with the manifest alone."""
        [copy] = fetch({"data": DataConfig(source=self.url)})[0].copies
        return copy.path

    def limit(self, monkeypatch: pytest.MonkeyPatch, size_bytes: float) -> None:
        monkeypatch.setenv(shard_cache.LIMIT, str(size_bytes / 1e9))

    def used(self) -> int:
        """Bytes of the files, also while they are deleted."""
        sizes = []
        for path in self.cache.glob("*.arrow"):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        return sum(sizes)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """4,000 rows in 40 files of about 15 kB."""
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=(4400, 32)), "label": random.integers(0, 4, 4400)}
    columns = {name: values.astype(np.float32) for name, values in columns.items()}
    np.savez(tmp_path / "data.npz", **columns)
    data = DataConfig(source=str(tmp_path / "data.npz"), rows_per_shard=FILE_ROWS, evaluation_fraction=0.1)
    directory, _, _ = make_shards(data, None, tmp_path / "server")
    found = Served(directory, "", tmp_path / "home")

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            found.fetched.append(self.path.rpartition("/")[2])
            if found.is_away:
                self.close_connection = True
            elif found.is_slow.is_set() and self.path.endswith(".arrow"):
                content = (tmp_path / "server" / self.path.lstrip("/")).read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[:5000])
                self.wfile.flush()
                while found.is_slow.is_set():
                    time.sleep(0.05)
            elif found.trickles and self.path.endswith(".arrow"):
                content = (tmp_path / "server" / self.path.lstrip("/")).read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(OSError):  # the client has enough
                    for first in range(0, len(content), 500):
                        self.wfile.write(content[first : first + 500])
                        time.sleep(0.1)
            else:
                super().do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "server"))) as server:
        found.url = f"http://127.0.0.1:{server.server_address[1]}/{directory.name}/manifest.json"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield found
        server.shutdown()


def stored(served: Served, number: int = 0) -> StoredFile:
    file = open_shards(served.directory, "train").manifest.train[number]
    return StoredFile(served.url.replace("manifest.json", file.name), file.bytes, file.sha256)


def test_an_epoch_in_files_fetches_each_file_once_and_the_cache_keeps_its_limit(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = open_shards(served.directory, "train")
    largest = max(file.bytes for file in local.manifest.train)
    limit = 33.5 * largest
    assert local.size_bytes > limit
    served.limit(monkeypatch, limit)
    shards = served.open()
    train = TrainConfig(shuffle="files", num_epochs=2)
    order = sample_stream(shards.sizes, shards.size_bytes, shards.rows_of_file, DataConfig(source="x"), train)
    ahead = ShardReadAhead(shards, order, 2 * shards.num_rows)
    rows = order.rows(np.arange(2 * shards.num_rows))
    for first in range(0, len(rows), 50):
        ahead.reach(first)
        ahead.wait()
        wanted = rows[first : first + 50]
        np.testing.assert_array_equal(shards.read(wanted)["x"], local.read(wanted)["x"])
        assert served.used() <= limit
    ahead.close()
    names = [name for name in served.fetched if name.startswith("train")]
    # some files of an epoch are still there from the one before
    assert len(set(names)) == len(local.manifest.train)
    assert max(map(names.count, names)) <= 2


def test_whole_files_are_shuffled_and_the_last_one_comes_last() -> None:
    size, block = 1005, 10
    order = permutation_in_blocks(np.arange(size), size, block, seed=1, epoch=0, of_files=True)
    assert sorted(order.tolist()) == list(range(size))
    assert len(set((order[:160] // block).tolist())) == 16
    # neighbours in the data are not neighbours in a window
    assert (np.diff(order) == 1).mean() < 0.1
    assert set(range(1000, 1005)) <= set(order[960:].tolist())
    # a run that is resumed by a later version must take the same rows
    found = permutation_in_blocks(np.arange(6), 6, 2, seed=7, epoch=0, of_files=True)
    assert found.tolist() == FIRST_ORDER


FIRST_ORDER = [0, 3, 4, 1, 5, 2]


def test_shards_are_a_source_on_the_disk_and_at_a_url(served: Served, tmp_path: Path) -> None:
    def config(source: str | Path, **loss: Any) -> RunConfig:
        (tmp_path / "model.onnx").write_bytes(tiny_mlp(inputs=32).SerializeToString())
        return build_config(
            {
                "model": {"path": tmp_path / "model.onnx"},
                "data": {"source": str(source), "inputs": {"features": "x"}},
                "loss": {"name": "mse"} | loss,
                "train": {"num_steps": 4, "shuffle": "files"},
            }
        )

    assert check_files_and_data(dict(config(served.directory))) == []
    assert check_files_and_data(dict(config(served.url))) == []
    directory, manifest, found = make_training_shards(config(served.directory), tmp_path / "cache")
    assert (directory, manifest.rows("train"), found) == (
        served.directory,
        open_shards(directory, "train").num_rows,
        True,
    )
    (tmp_path / "latest").symlink_to(served.directory)
    assert make_training_shards(config(tmp_path / "latest"), tmp_path / "cache")[0] == served.directory.resolve()
    far = config(served.place())
    rows = read_first_rows(far, read_training_signature(far.model), 8)
    assert (rows.num_rows, rows.counts) == (8, (manifest.rows("train"), manifest.rows("evaluation")))
    with_more = config(served.directory).data.model_copy(update={"test_source": str(tmp_path / "data.npz")})
    problems = check_files_and_data({**dict(config(served.directory)), "data": with_more})
    assert "holds finished shards, which have the rows to evaluate on: remove data.test_source" in problems[0]
    standardised = config(served.directory, standardise_label="standard")
    with pytest.raises(ConfigError, match=r"do not have .* of label label, which .loss. needs: make them by a run"):
        make_training_shards(standardised, tmp_path / "cache")
    renamed = served.directory.rename(served.directory.parent / "mine")
    with pytest.raises(DataError, match=f"rename it to .*{manifest.key}"):
        make_training_shards(config(renamed), tmp_path / "cache")


@pytest.mark.parametrize("kind", ["class names", "masked text", "images"])
def test_finished_shards_give_the_batches_of_what_they_were_made_of(kind: str, tmp_path: Path) -> None:
    if kind == "class names":
        config = labelled(tmp_path, ["dog", "cat", "cow"] * 20)
    elif kind == "masked text":
        config = masked(tmp_path)
    else:
        config = Stored(tmp_path, augment={"flip": 0.5}).config
    directory, _, _ = make_training_shards(config, tmp_path / "made")
    finished = config.model_copy(update={"data": config.data.model_copy(update={"source": str(directory)})})
    assert check_files_and_data(dict(finished)) == []
    shards, signature = open_shards(directory, "train"), read_training_signature(config.model)
    inputs = []
    for each in (config, finished):
        completed = resolve(each, shards, signature)
        batches = Batches(shards, completed, signature, replica=0, num_replicas=1, device=torch.device("cpu"))
        taken = batches.take(0, each.train.global_batch_size)
        batches.close()
        inputs.append([tensor for batch in taken for tensor in batch.inputs])
        rows = read_first_rows(each, signature, 3)
        assert rows.fitted == shards.fitted
        named = [name for name, column in rows.columns.items() if column.holds_numbers]
        inputs[-1] += [torch.tensor(np.asarray(rows.values[name][0])) for name in named]
    assert all(map(torch.equal, *inputs))


@pytest.mark.parametrize("shuffle", [True, "length", "blocks"])
def test_an_order_that_would_fetch_a_file_for_each_row_is_refused_with_the_choices(
    served: Served, shuffle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = served.open()
    directory, manifest = shards._directory, shards.manifest
    train = TrainConfig(shuffle=shuffle, num_steps=1)
    assert list(cache_problems(directory, manifest, train, 2)) == []
    served.limit(monkeypatch, shards.size_bytes // 2)
    (problem,) = cache_problems(directory, manifest, train, 2)
    assert "Set train.shuffle = 'files', or false, or ONWARD_SHARD_CACHE_GB to at least" in problem
    assert list(cache_problems(served.directory, manifest, train, 2)) == [], "those on a disk need no cache"


def test_a_limit_below_what_a_step_needs_is_refused_with_numbers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = served.open()
    train = TrainConfig(shuffle="files", num_steps=1)
    served.limit(monkeypatch, 1e5)
    (problem,) = cache_problems(shards._directory, shards.manifest, train, 1)
    assert "may have 100 kB, and a run needs 497 kB: 33 files" in problem
    assert "data.rows_per_shard" in problem
    monkeypatch.setenv(shard_cache.LIMIT, problem.split("at least ")[1].split(",")[0])
    assert list(cache_problems(shards._directory, shards.manifest, train, 1)) == []
    monkeypatch.setenv(shard_cache.LIMIT, "much")
    with pytest.raises(ConfigError, match="is 'much', but must be a number of gigabytes"):
        served.open()


def test_a_damaged_file_is_named_and_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.0,))
    shards = served.open()
    first, second = (served.directory / file.name for file in shards.manifest.train[:2])
    content = bytearray(first.read_bytes())
    content[200] ^= 1
    first.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000.arrow has SHA-256 \w+, not the \w+ of the manifest: .*damaged"):
        shards.read(np.arange(3))
    second.write_bytes(second.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"train-00001.arrow has \d+ bytes, not the \d+ of the manifest"):
        shards.read(np.arange(FILE_ROWS, FILE_ROWS + 3))
    assert [path.name for path in served.cache.iterdir()] == [".lock"]
    (served.directory / shards.manifest.train[2].name).unlink()
    with pytest.raises(DataError, match=r"nothing at .*train-00002.arrow"):
        shards.read(np.arange(2 * FILE_ROWS, 2 * FILE_ROWS + 3))
    assert len(damaged_files(shards._directory, shards.manifest)) == 3


def test_a_server_that_comes_back_is_waited_for_and_one_that_stays_away_is_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.0,))
    monkeypatch.setattr(shard_cache, "PAUSE_S", 0.1)
    monkeypatch.setattr(shard_cache, "WAIT_S", 1.0)
    shards = served.open()
    served.is_away = True
    with pytest.raises(ServerUnavailable, match=r"train-00000.arrow: the connection ended 2 times after 0 of"):
        shards.read(np.arange(3))
    assert not ENDINGS[kind_of_rank_error("ServerUnavailable")].no_retry, "a retry may find it again"
    back = threading.Timer(0.5, setattr, (served, "is_away", False))
    back.start()
    assert len(shards.read(np.arange(3))["x"]) == 3
    back.join()


def test_a_network_that_is_too_slow_is_named_and_what_came_is_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "WAIT_S", 1.0)
    monkeypatch.setattr(remote_files, "BLOCK_BYTES", 500)
    shards = served.open()
    served.trickles = True
    began = time.monotonic()
    with pytest.raises(ServerUnavailable, match=r"train-00000.arrow .* was not here after 1 s"):
        shards.read(np.arange(3))
    assert time.monotonic() - began < 10
    [part] = served.cache.glob(".*.partial")
    assert part.stat().st_size > 0
    # who fetches ahead ends as soon as the training does
    assert not shards.hold_ahead(1, lambda: True)
    # a part that nobody fetches any more makes room for others
    size = stored(served).bytes
    served.trickles = False
    _, descriptor = ShardCache(served.cache, int(1.5 * size)).hold(stored(served, 2), lambda: None)
    os.close(descriptor)
    assert not part.exists()


def test_shards_whose_manifest_is_damaged_are_no_source(served: Served) -> None:
    manifest = served.directory / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(DataError, match=rf"{manifest} is damaged: copy it there again"):
        shards_at(DataConfig(source=str(served.directory)))
    manifest.write_text(json.dumps({"key": "k", "columns": [], "evaluation": [], "train": []}))
    with pytest.raises(DataError, match=rf"{manifest} lists no rows to train on"):
        shards_at(DataConfig(source=str(served.directory)))


def test_numbers_of_another_type_than_the_manifest_says_are_not_read_as_its_type(served: Served) -> None:
    manifest = read_record(served.directory / "manifest.json", ShardManifest)
    columns = [column.model_copy(update={"dtype": "int32"}) for column in manifest.columns]
    with pytest.raises(
        DataError, match=r"train-00000.arrow cannot be read: x is .*float.*, and the manifest says .*int32"
    ):
        ArrowReader(served.directory / "train-00000.arrow", columns)
    renamed = [column.model_copy(update={"name": "y"}) for column in manifest.columns]
    with pytest.raises(DataError, match="there is no column y"):
        ArrowReader(served.directory / "train-00000.arrow", renamed)


def test_a_server_that_is_away_is_not_called_a_difference(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.0,))
    monkeypatch.setattr(shard_cache, "WAIT_S", 0.5)
    settings: dict[str, Any] = {"data": {"source": str(served.place()), "inputs": {"features": "x"}}}
    settings |= {"train": {"num_steps": 1}, "loss": {"name": "mse"}}
    run = make_run(served.home / "run", tiny_mlp(inputs=32), {}, **settings)
    served.is_away = True
    [checked] = check_data(run)
    assert checked.result.startswith("cannot be read: ")
    assert checked.problems == ()


def test_files_that_were_fetched_ahead_make_room_for_rows_that_are_needed_now(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "WAIT_S", 5.0)
    size = stored(served).bytes
    served.limit(monkeypatch, 4.5 * size)
    # two runs share the cache, and each has fetched what it needs next
    runs = [served.open(), served.open()]
    for number, shards in enumerate(runs):
        assert all(shards.hold_ahead(2 * number + 10 + place, lambda: False) for place in range(2))
    with ThreadPoolExecutor(2) as threads:
        rows = list(threads.map(lambda shards: shards.read(np.arange(FILE_ROWS + 1))["x"], runs))
    assert (rows[0] == rows[1]).all()


def test_files_that_are_read_stay_and_leave_no_room_for_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "WAIT_S", 0.3)
    size = stored(served).bytes
    cache = ShardCache(served.cache, int(2.5 * size))
    served.cache.mkdir(parents=True)
    held = [cache.hold(stored(served, number), lambda: None) for number in range(2)]
    assert not cache.fetch(stored(served, 2), lambda: True, tries_again=False)
    with pytest.raises(RuntimeUnavailable, match=r"other runs read from nearly all .* set ONWARD_SHARD_CACHE_GB"):
        cache.hold(stored(served, 2), lambda: None)
    # a file that is closed makes room, and of those the one that was opened longest ago
    os.close(held[1][1])
    path, descriptor = cache.hold(stored(served, 2), lambda: None)
    assert path.exists()
    assert held[0][0].exists()
    assert not held[1][0].exists()
    # the files of the caller itself make room, too
    _, last = cache.hold(stored(served, 1), lambda: os.close(descriptor))
    os.close(last)
    assert (cache.clean(0.0).deleted, cache.clean(0.0).kept) == (1, 1), "one is still read"
    os.close(held[0][1])
    assert cache.clean(1.0).deleted == 0
    assert cache.clean(0.0).deleted_bytes == size


def test_a_full_disk_is_named_with_its_numbers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = served.open()
    shards.read(np.arange(3))
    usage = type(shutil.disk_usage("/"))(10**9, 10**9 - 500, 500)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageUnavailable, match=r"train-00001.arrow needs 1\S+ kB, and the disk of .* has 500 bytes"):
        shards.read(np.arange(FILE_ROWS, FILE_ROWS + 3))
    # nothing is left that the next attempt would wait for
    assert not shards.hold_ahead(1, lambda: False)
    assert not [*served.cache.glob(".*.partial")]


def test_what_a_server_says_leads_out_of_no_directory(served: Served, tmp_path: Path) -> None:
    good: dict[str, Any] = {"name": "train-00000.arrow", "rows": 1, "bytes": 5, "sha256": "a" * 64}
    ShardFile(**good)
    for name, values in (
        ("sha256", ("/../../x", "a" * 63, "A" * 64)),
        ("name", ("../train-00000.arrow", "train-00000.arrow/..", "/etc/passwd")),
        ("rows", (-1,)),
        ("bytes", (-1,)),
    ):
        for value in values:
            with pytest.raises(ValidationError):
                ShardFile(**(good | {name: value}))
    manifest = served.directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace(served.directory.name, "../../../outside"))
    [problem] = fetch({"data": DataConfig(source=served.url)})[1]
    assert "has the key '../../../outside', which is none of shards" in problem
    assert not [*tmp_path.rglob("outside")]


def test_of_a_file_that_is_longer_than_announced_little_more_is_read(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "CHUNK_BYTES", 500)
    file = stored(served)
    assert file.bytes > 14_000
    remote_files.download_to(RemoteFile(file.url, "x", 1000, {}), tmp_path / "x")
    assert 1000 < (tmp_path / "x").stat().st_size < 10_000


def test_rows_of_varying_length_outlive_their_file(served: Served, tmp_path: Path) -> None:
    lists = [[*range(number)] for number in range(1, 40)]
    (tmp_path / "t.jsonl").write_text("".join(f'{{"v": {each}}}\n' for each in lists))
    data = DataConfig(source=str(tmp_path / "t.jsonl"), rows_per_shard=10)
    made, manifest, _ = make_shards(data, {"v": ColumnType("int64", (None,))}, tmp_path / "server")
    served.url = served.url.replace(served.directory.name, manifest.key)
    shards = served.open()
    rows = shards.read(np.arange(5))["v"]
    shards.close_files()
    assert ShardCache(served.cache, 0).clean(0.0).kept == 0
    expected = open_shards(made, "train").read(np.arange(5))["v"]
    assert [row.tolist() for row in rows] == [row.tolist() for row in expected]
    assert str(served.cache) not in Path("/proc/self/maps").read_text()


PROGRAM = """
import sys, numpy as np
from pathlib import Path
from onward.trainer.data.storage import opened_shards, shards
shards.FILES_TOGETHER = 1
rows = opened_shards.open_shards(Path(sys.argv[1]), "train")
for row in map(int, sys.argv[2:]):
    print(row, int(rows.read(np.array([row]))["label"][0]), flush=True)
"""


def reading(served: Served, rows: list[int]) -> subprocess.Popen[str]:
    """A process that reads rows one by one, and prints them with their labels."""
    words = [sys.executable, "-c", PROGRAM, str(served.place()), *map(str, rows)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_share_the_cache(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 4.5 * stored(served).bytes
    served.limit(monkeypatch, limit)
    random = np.random.default_rng(0)
    rows = random.integers(0, 3900, 2 * 40).tolist()
    labels = open_shards(served.directory, "train").read(np.array(rows))["label"]
    mine = served.open()
    most = 0
    with reading(served, rows[:40]) as other:
        while other.poll() is None:
            for row, label in zip(rows[40:], labels[40:], strict=True):
                mine._most_open = 1
                assert mine.read(np.array([row]))["label"][0] == label
                most = max(most, served.used())
        assert other.stdout
        found = [tuple(map(int, line.split())) for line in other.stdout]
    assert found == [(row, int(label)) for row, label in zip(rows[:40], labels[:40], strict=True)]
    assert 0 < most <= limit


def test_a_process_that_is_killed_leaves_no_half_file_and_no_lock(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.limit(monkeypatch, 1.5 * stored(served).bytes)
    served.is_slow.set()
    with reading(served, [0]) as other:
        deadline = time.monotonic() + 60
        while not served.fetched or not served.fetched[-1].startswith("train"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # the room for all of the file is taken
        assert not ShardCache(served.cache, int(1.5 * stored(served).bytes)).fetch(
            stored(served, 1), lambda: True, tries_again=False
        )
        other.kill()
    served.is_slow.clear()
    assert [path.suffix for path in served.cache.iterdir() if path.name != ".lock"] == [".partial"]
    for number in (0, 1):
        served.open().read(np.array([number * FILE_ROWS]))
        assert {path.name for path in served.cache.iterdir()} == {".lock", f"{stored(served, number).sha256}.arrow"}
