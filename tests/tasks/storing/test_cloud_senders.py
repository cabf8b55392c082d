"""A run that is sent to gs:// and az://, and fetched from there, against servers on 127.0.0.1; and to moto's S3."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.flows.running import from_store
from onward.flows.running.from_store import fetch_run
from onward.tasks.storing.run_sender import send_rest
from onward.trainer.checkpoint.retention import list_checkpoints
from onward.trainer.run.remote.object_store import open_place
from tests.support.cloud_stores import STORES, without_pauses
from tests.support.remote_servers import object_store
from tests.support.stored_runs import LOG, RUN_ID, holds_its_values, make_stored_run, save_step, send

pytestmark = [
    pytest.mark.slow,
    # these libraries leave files and connections to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(params=["s3", *(name for name in STORES if name != "hf")])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    without_pauses(monkeypatch)
    with contextlib.ExitStack() as servers:
        if request.param == "s3":
            servers.enter_context(object_store(monkeypatch))
            yield "s3://bucket/runs"
        else:
            yield f"{servers.enter_context(STORES[request.param](monkeypatch)).url}/runs"


def test_a_run_goes_to_the_store_and_comes_back(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_store, "SILENT_S", 0.0)
    run = make_stored_run(tmp_path / "home", store)
    for step in (1, 2, 3):
        save_step(run, step)
        assert send(run)
    send_rest(run, LOG)
    names = open_place(f"{store}/{RUN_ID}").names("000001/checkpoints/")
    assert {name.split("/")[2][:14] for name in names} == {"step-000000002", "step-000000003"}
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "other"))
    found = fetch_run(f"{store}/stored-1")
    assert [path.name for path in list_checkpoints(found)] == ["step-000000003"]
    assert holds_its_values(found, 3)
    assert found.events.read_bytes() == run.events.read_bytes()


def test_a_name_is_created_once(store: str) -> None:
    assert open_place(store).folders() == [], "of an empty store"
    place = open_place(f"{store}/one")
    threads = [threading.Thread(target=place.create, args=("000001.json", str(n).encode())) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = place.read("000001.json")
    place.create("000001.json", b"later")
    assert place.read("000001.json") == first
    assert place.has("000001.json")
    assert not place.has("000002.json")
