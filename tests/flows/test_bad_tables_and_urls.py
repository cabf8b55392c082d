"""Tables and URLs that cannot be trained on: message, exit status 2 or 3, nothing launched and nothing half-cached.

What is wrong with the rows themselves is in tests/trainer/data; here it goes through the real command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pandas as pd
import pytest

from tests.support.remote_servers import web_server

pytestmark = pytest.mark.slow

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
classifier (float[batch, 2] features) => (float[batch, 2] logits)
<float[2, 2] weight = {0.1, 0.2, 0.3, 0.4}>
{ logits = MatMul (features, weight) }
"""
CONFIG = """
[model]
path = "model.onnx"
[data]
source = "{source}"
label = "kind"
inputs = {{ features = ["height", "width"] }}
[train]
global_batch_size = 8
num_steps = 2
[launch]
device = "cpu"
"""


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "model.onnx")
    return tmp_path


def table(rows: int = 40) -> pd.DataFrame:
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {"height": random.normal(size=rows), "width": random.normal(size=rows), "kind": ["cat", "dog"] * (rows // 2)}
    )


def command(workshop: Path, source: str, *overrides: str, before: str = "") -> subprocess.Popen[str]:
    (workshop / "config.toml").write_text(CONFIG.format(source=source))
    words = [sys.executable, "-m", "onward.flows.cli", "run", "config.toml", *overrides, "--json"]
    words = ["bash", "-c", f'{before}; exec "$@"', "bash", *words] if before else words
    environment = os.environ | {"ONWARD_HOME": str(workshop / "home")}
    return subprocess.Popen(
        words, cwd=workshop, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def refused(
    workshop: Path, source: str, *overrides: str, status: int = 2, before: str = "", when: str = "before the run"
) -> str:
    """Return what the command says about a source that it refuses, before anything starts or `when`."""
    process = command(workshop, source, *overrides, before=before)
    stdout, stderr = process.communicate()
    assert process.returncode == status, stdout + stderr
    assert when != "before the run" or not (workshop / "home" / "runs").exists(), "a run was made"
    assert not list((workshop / "home").glob("shards/*/manifest.json")), "something could be taken for all rows"
    assert not complete_copies(workshop), "something could be taken for a whole file"
    return "\n".join(json.loads(stdout)["problems"])


def complete_copies(workshop: Path) -> list[Path]:
    """Return the files in the cache of downloads that a reader could take for whole ones."""
    found = (workshop / "home" / "downloads").rglob("*")
    return [path for path in found if path.is_file() and not path.name.startswith(".")]


CASES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a decimal comma that is not said": (
        "data.csv",
        lambda path: table().to_csv(path, sep=";", decimal=",", index=False),
        "may be a decimal number or have a comma between thousands; set data.table.decimal",
    ),
    "a separator that is not said": (
        "data.csv",
        lambda path: table().to_csv(path, sep=" ", index=False),
        "the data has a single column, 'height width kind'; set data.table.separator",
    ),
    "a column of nearly the same name": (
        "data.csv",
        lambda path: table().rename(columns={"height": "heigth"}).to_csv(path, index=False),
        "did you mean 'heigth'?",
    ),
    "an empty file": ("data.csv", lambda path: path.write_text(""), "holds no row that can be read"),
    "a header alone": (
        "data.csv",
        lambda path: path.write_text("height,width,kind\n"),
        "holds no row that can be read",
    ),
    "a directory without files": ("data", lambda path: path.mkdir(), "is a folder without files"),
    "a file that ends in the middle": (
        "data.parquet",
        lambda path: (table().to_parquet(path), path.write_bytes(path.read_bytes()[:-50])),
        "cannot be read",
    ),
    "a compressed file that ends in the middle": (
        "data.csv.gz",
        lambda path: (table().to_csv(path, index=False), path.write_bytes(path.read_bytes()[:-50])),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_table_that_cannot_be_read_is_refused(workshop: Path, case: str) -> None:
    name, write, sentence = CASES[case]
    write(workshop / name)
    assert sentence in refused(workshop, name)


def test_a_class_that_training_lacks_is_refused_where_it_is_evaluated(workshop: Path) -> None:
    table().to_csv(workshop / "data.csv", index=False)
    table().replace({"kind": {"dog": "cow"}}).to_csv(workshop / "held.csv", index=False)
    given = "data.evaluation_source='held.csv'", "data.classes=['cat','dog']"
    # without an order the classes are those of all rows, and are more than the model has
    assert "the output that the loss reads has 2 of them" in refused(
        workshop, "data.csv", given[0], when="in the rehearsal"
    )
    problem = refused(workshop, "data.csv", *given, when="all rows are read")
    assert "kind is 'cow', which is none of the 2 classes cat, dog" in problem


@pytest.mark.parametrize(
    ("status", "sentence"), [(404, "there is nothing at http"), (403, "may not be read; credentials: ~/.netrc")]
)
def test_a_server_that_refuses_is_said(workshop: Path, status: int, sentence: str) -> None:
    with web_server({}) as web:
        web.statuses["data.csv"] = status
        assert sentence in refused(workshop, f"{web.url}/data.csv")


@pytest.mark.parametrize("url", ["http://no-such-host.invalid/data.csv", "s3://bucket/data.csv", "hf://datasets/a/b/c"])
def test_a_server_without_an_address_is_said_and_not_waited_for(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    for name in ("AWS_ENDPOINT_URL", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "http://no-such-host.invalid")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    started_at = time.monotonic()
    problem = refused(workshop, url)
    assert f"{url} cannot be read: " in problem
    assert "is the address right, and the store up?" in problem
    assert time.monotonic() - started_at < 120
    assert "test-secret" not in problem


def test_a_url_with_credentials_is_refused_and_they_are_shown_nowhere(workshop: Path) -> None:
    for url in ("https://me:secret-word@host/a.csv", "https://host/a.csv?X-Amz-Signature=secret-word"):
        process = command(workshop, url)
        stdout, stderr = process.communicate()
        assert process.returncode == 2
        assert "credentials in a URL would get into records and logs" in stdout
        assert "secret-word" not in stdout + stderr
    assert not (workshop / "home").exists()


def test_a_disk_that_fills_up_in_the_download_leaves_no_file(workshop: Path) -> None:
    with web_server({"data.csv": os.urandom(3_000_000)}) as web:
        # a file that grows beyond a limit fails as on a full disk
        problem = refused(workshop, f"{web.url}/data.csv", before="trap '' XFSZ; ulimit -f 1000")
        assert "data.source: File too large" in problem
        assert not complete_copies(workshop)


def test_a_download_that_is_killed_leaves_no_file_and_goes_on_at_the_next_start(workshop: Path) -> None:
    content = table(100_000).to_csv(index=False).encode()
    with web_server({"data.csv": content}) as web:
        web.stall_after = len(content) // 2
        process = command(workshop, f"{web.url}/data.csv")
        while not any(path.stat().st_size > 1 << 20 for path in (workshop / "home").rglob("*.partial")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.kill()
        process.communicate()
        web.stall_after = 0
        assert not complete_copies(workshop)
        web.served.clear()
        process = command(workshop, f"{web.url}/data.csv", "data.label='none'")
        stdout, _ = process.communicate()
        assert (process.returncode, "'none'" in stdout) == (2, True)
        [copy] = complete_copies(workshop)
        assert copy.read_bytes() == content
        [wanted] = [each for method, _, each in web.served if method == "GET"]
        assert int(wanted.removeprefix("bytes=").rstrip("-")) >= 1 << 20
