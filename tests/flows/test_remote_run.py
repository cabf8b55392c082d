"""A whole `onward run` with model, data and export by URL: an object store, and a web server that cuts a connection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

from onward.trainer.diagnostics.diff import compare
from onward.trainer.run.directory import RunDir, read_config
from tests.support.cloud_stores import AZURE_KEY, HUB_TOKEN, STORES
from tests.support.remote_servers import object_store, web_server
from tests.support.workshop import Workshop

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.timeout(900)]

CONFIG = """
[model]
path = "s3://bucket/models/model.onnx"
[data]
source = "{url}/data/train.npz"
evaluation_source = "s3://bucket/held-out/*.npz"
[train]
global_batch_size = 8
num_steps = 40
[parallel]
data = 2
[launch]
device = "cpu"
threads_per_rank = 1
[export]
path = "s3://bucket/trained/model.onnx"
"""


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path)
    yield workshop
    workshop.close()


def outcome(workshop: Workshop, *words: str) -> tuple[int, dict[str, Any], str]:
    """Return (exit status, the JSON object on stdout, stderr) of a command."""
    ended = subprocess.run(
        [sys.executable, "-m", "onward.flows.cli", *words, "--json"],
        env=workshop.environment,
        capture_output=True,
        text=True,
    )
    return ended.returncode, json.loads(ended.stdout), ended.stderr


@pytest.mark.slow
def test_model_data_and_export_may_be_urls(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (workshop.root / "data.npz").read_bytes()
    with object_store(monkeypatch) as bucket, web_server({"data/train.npz": content}) as web:
        bucket.upload_file(str(workshop.root / "model.onnx"), "bucket", "models/model.onnx")
        bucket.upload_file(str(workshop.root / "data.npz"), "bucket", "held-out/a.npz")
        web.cut_after, web.cuts_left = len(content) // 2, 1
        config = workshop.root / "config.toml"
        config.write_text(CONFIG.format(url=web.url))

        status, refused, _ = outcome(workshop, "run", str(config), "data.source='s3://bucket/none.npz'")
        assert (status, refused["problems"]) == (
            2,
            ["data.source: there is nothing at s3://bucket/none.npz (or the store hides it without credentials)"],
        )
        assert not (workshop.home / "runs").exists()

        status, ran, stderr = outcome(workshop, "run", str(config))
        assert status == 0, stderr
        assert web.cuts_left == 0
        assert ran["after"]["evaluation/loss"] < ran["before"]["evaluation/loss"]
        assert read_config(RunDir(Path(ran["directory"])), "given").data.source == f"{web.url}/data/train.npz"
        bucket.download_file("bucket", "trained/model.onnx", str(workshop.root / "trained.onnx"))
        assert (workshop.root / "trained.onnx").read_bytes() == Path(ran["model"]).read_bytes()
        onnxruntime.InferenceSession(str(workshop.root / "trained.onnx"), providers=["CPUExecutionProvider"])
        difference = compare(workshop.root / "model.onnx", workshop.root / "trained.onnx")
        assert not difference.same
        assert len(onnx.load(workshop.root / "trained.onnx").graph.node) == len(
            onnx.load(workshop.root / "model.onnx").graph.node
        )
        secrets = [file for file in workshop.home.rglob("*") if file.is_file() and b"test-secret" in file.read_bytes()]
        assert not secrets
        # what the run needs is here: the store may be gone
        for key in ("models/model.onnx", "held-out/a.npz"):
            bucket.delete_object(Bucket="bucket", Key=key)
        web.files.clear()
        status, again, stderr = outcome(workshop, "resume", "last")
        assert (status, again["sha256"]) == (0, ran["sha256"]), stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scheme", STORES)
def test_a_run_reads_and_writes_google_azure_and_hugging_face(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with STORES[scheme](monkeypatch) as store:
        environment = {key: value for key, value in os.environ.items() if key not in workshop.environment}
        workshop.environment.update(environment)
        store.put("models/model.onnx", (workshop.root / "model.onnx").read_bytes())
        store.put("train/a.npz", (workshop.root / "data.npz").read_bytes())
        config = workshop.root / "config.toml"
        text = CONFIG.replace("s3://bucket", store.url).replace('"{url}/data/train.npz"', f'"{store.url}/train"')
        config.write_text(text.replace("held-out/*.npz", "train/*.npz").replace("num_steps = 40", "num_steps = 4"))
        status, ran, stderr = outcome(workshop, "run", str(config))
        assert status == 0, stderr
        assert store.get("trained/model.onnx") == Path(ran["model"]).read_bytes()
        secrets = [secret.encode() for secret in (AZURE_KEY, HUB_TOKEN)]
        for file in workshop.home.rglob("*"):
            assert not (file.is_file() and any(secret in file.read_bytes() for secret in secrets)), file
        assert not any(secret.decode() in stderr for secret in secrets)
