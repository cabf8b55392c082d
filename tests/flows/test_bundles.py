"""`onward bundle`: one file with all that an export needs, read without trust in what is in it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.flows.run_state import exports
from onward.flows.running import verify_run
from onward.trainer.checkpoint.bundle import LISTING, is_bundle, unpack
from onward.trainer.checkpoint.verification import CheckedCheckpoint
from onward.trainer.errors import CheckpointError, ConfigError
from onward.trainer.run.allowed_code import AllowedCode
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import read_record
from tests.support import graphs
from tests.support.runs import make_run, train_run

pytestmark = pytest.mark.mpi


def trained_run(folder: Path, **sections: Any) -> RunDir:
    rows = np.random.default_rng(0)
    columns = {"features": rows.normal(size=(40, 4)).astype(np.float32), "label": np.ones((40, 1), np.float32)}
    given = {"model": {"loss": "mse"}, "train": {"global_batch_size": 8, "num_steps": 2}}
    run = make_run(folder, graphs.tiny_mlp(), columns, **(given | sections))
    train_run(run)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def bundle(run: RunDir, tmp_path: Path) -> Path:
    path = tmp_path / "run.bundle"
    exports.bundle(run.checkpoint(2), path)
    return path


def rewrite(bundle: Path, change: Callable[[dict[str, bytes]], object], **entry: Any) -> None:
    """Write a bundle again with other files, and a list with their sizes and digests."""
    with zipfile.ZipFile(bundle) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    listing = json.loads(files.pop(LISTING))
    listing["files"] = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    with zipfile.ZipFile(bundle, "w") as archive:
        for name, content in {**files, LISTING: json.dumps(listing).encode()}.items():
            info = zipfile.ZipInfo(name)
            for key, value in entry.items():
                setattr(info, key, value)
            archive.writestr(info, content, info.compress_type)


def with_settings(change: Callable[[Any], object]) -> Callable[[dict[str, bytes]], object]:
    def changed(files: dict[str, bytes]) -> None:
        settings = json.loads(files["run/config.json"])
        change(settings)
        files["run/config.json"] = json.dumps(settings).encode()

    return changed


def test_a_bundle_is_opened_where_the_originals_are_gone(bundle: Path, run: RunDir, tmp_path: Path) -> None:
    opened, checkpoint = unpack(bundle, tmp_path / "opened")
    found = verify_run.verify(bundle)
    assert isinstance(found, CheckedCheckpoint)
    assert (found.step, found.problems) == (2, ())
    assert checkpoint.is_dir()
    for file in opened.root.parent.rglob("*"):
        assert stat.S_ISREG(file.lstat().st_mode) or file.is_dir()
        if file.suffix == ".json":
            assert str(run.root.parent) not in file.read_text(), f"{file} names a path of the original"


def test_the_same_checkpoint_gives_the_same_bytes(bundle: Path, run: RunDir, tmp_path: Path) -> None:
    exports.bundle(run.checkpoint(2), tmp_path / "again.bundle")
    assert bundle.read_bytes() == (tmp_path / "again.bundle").read_bytes()


def test_another_file_is_not_overwritten_and_a_bundle_is(bundle: Path, run: RunDir, tmp_path: Path) -> None:
    exports.bundle(run.checkpoint(2), bundle)
    other = tmp_path / "thesis.txt"
    other.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is no bundle"):
        exports.bundle(run.checkpoint(2), other)
    assert other.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.bundle", "thesis.txt"]


def test_every_truncated_and_every_flipped_bundle_is_refused_in_a_sentence(bundle: Path, tmp_path: Path) -> None:
    content, cut = bundle.read_bytes(), tmp_path / "cut.bundle"
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="is not a bundle, or a part of it is missing"):
            unpack(cut, tmp_path / f"cut-{length}")
    for place in range(0, len(content), len(content) // 60):
        cut.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            _, checkpoint = unpack(cut, tmp_path / f"flipped-{place}")
        except CheckpointError:
            continue
        assert checkpoint.is_dir(), "a bit that no reader reads"
    cut.write_bytes(content[:-30])
    with pytest.raises(CheckpointError, match="is not a bundle"):
        exports.export(cut, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/tmp/evil",
        "run/../../evil",
        "run//evil",
        "run/./evil",
        "C:/evil",
        "run\\..\\evil",
        "elsewhere/evil",
        "evil",
    ],
)
def test_no_name_leads_out_of_the_directory(bundle: Path, name: str, tmp_path: Path) -> None:
    rewrite(bundle, lambda files: files.update({name: b"evil"}))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"would be written outside|is damaged"):
        unpack(bundle, tmp_path / "opened")
    assert sorted(tmp_path.rglob("*")) == before


def test_links_are_written_as_files_and_packed_entries_are_refused(bundle: Path, tmp_path: Path) -> None:
    packed = bundle.with_name("packed.bundle")
    shutil.copyfile(bundle, packed)
    rewrite(
        bundle, lambda files: files.update({"code/0/link": b"/etc/passwd"}), external_attr=(stat.S_IFLNK | 0o777) << 16
    )
    unpack(bundle, tmp_path / "opened")
    assert (tmp_path / "opened/code/0/link").read_bytes() == b"/etc/passwd"
    assert not any(path.is_symlink() for path in (tmp_path / "opened").rglob("*"))
    rewrite(packed, lambda files: files.update({"code/0/bomb": bytes(10**7)}), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="is packed"):
        unpack(packed, tmp_path / "packed")


@pytest.mark.parametrize(
    "change",
    [
        lambda settings: settings["model"].update(path="/etc/passwd"),
        lambda settings: settings["model"].update(path="model/../../x.onnx"),
        lambda settings: settings["model"].update(converters=["/home/me/evil.py"]),
        lambda settings: settings["data"].update(source="../rows.csv"),
        lambda settings: settings["model"].update(path="model/x:/../../../../etc/passwd"),
        lambda settings: settings["model"].update(path="model:x"),
        lambda settings: settings["model"].update(path="digits"),
        lambda settings: settings["model"].update(converters=["digits"]),
    ],
)
def test_settings_that_name_files_elsewhere_are_refused(
    bundle: Path, change: Callable[[Any], object], tmp_path: Path
) -> None:
    rewrite(bundle, with_settings(change))
    with pytest.raises(CheckpointError, match=r"its settings name .*, which is not in it"):
        unpack(bundle, tmp_path / "opened", run_code=True)


EVIL_LOSSES = {
    "a function that ends like an ONNX file": "code/0/x.py:f.onnx",
    "a plain function": "code/0/x.py:f",
    "an ONNX file with a function": "code/0/x.onnx:f",
    "another spelling of onnx": "code/0/x.ONNX:f",
    "a path that leads out behind a colon": "code/0/x:/../../../../..{folder}/outside.py:f",
}


@pytest.mark.parametrize("loss", EVIL_LOSSES.values(), ids=EVIL_LOSSES.keys())
def test_a_strangers_bundle_executes_nothing_without_run_code(loss: str, bundle: Path, tmp_path: Path) -> None:
    """The whole command, on a bundle whose every Python file would leave a mark."""
    mark = tmp_path / "executed"
    evil = f"open({str(mark)!r}, 'w')\ndef f(output, labels):\n    return ((output - labels) ** 2).sum()\n".encode()
    (tmp_path / "outside.py").write_bytes(evil)

    def change(settings: Any) -> None:
        del settings["model"]["loss"]
        settings["loss"] = [{"name": "file", "file": loss.format(folder=tmp_path), "label": "label"}]

    def add(files: dict[str, bytes]) -> None:
        with_settings(change)(files)
        files |= dict.fromkeys(("code/0/x.py", "code/0/x.onnx", "code/0/x.ONNX", "code/0/x:/a", "code/0/f.onnx"), evil)

    rewrite(bundle, add)
    done = onward_export(bundle, tmp_path / "out.onnx")
    assert done.returncode in (2, 4), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not mark.exists(), "the bundle's code was executed"
    assert not (tmp_path / "out.onnx").exists()


def onward_export(bundle: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `onward export BUNDLE` as a user does, in the bundle's folder with a home of its own."""
    command = [sys.executable, "-c", "from onward.flows.cli import main; main()", "export", str(bundle)]
    environment = os.environ | {"ONWARD_HOME": str(bundle.parent / "home"), "HOME": str(bundle.parent)}
    return subprocess.run(
        [*command, "-o", str(out), *options],
        cwd=bundle.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize("name", ["remote.json", "adjusted.json", "code.json", "export/onnx.py", "numpy.py"])
def test_a_bundle_brings_no_other_records_of_a_run(name: str, bundle: Path, tmp_path: Path) -> None:
    """remote.json would put other paths in the place of those that were checked, and fetch from addresses."""
    content = b'{"copies": [{"url": "", "path": "/elsewhere/x.py", "key": "", "bytes": 0}]}'
    rewrite(bundle, lambda files: files.update({f"run/{name}": content}))
    with pytest.raises(CheckpointError, match=rf"'run/{name}' would be written outside of run/config.json"):
        unpack(bundle, tmp_path / "opened", run_code=True)


def test_what_was_not_allowed_is_not_executed_by_the_processes_of_the_export(bundle: Path, tmp_path: Path) -> None:
    """Should a setting that names code ever get past `unpack`, its processes refuse what code.json does not have."""
    opened, _ = unpack(bundle, tmp_path / "plain")
    assert read_record(opened.code, AllowedCode).files == {}

    def add(files: dict[str, bytes]) -> None:
        with_settings(lambda settings: settings["model"].update(converters=["code/0/mine.py"]))(files)
        files["code/0/mine.py"] = b"# reviewed"
        files["code/0/other.py"] = b"# not named"

    rewrite(bundle, add)
    opened, _ = unpack(bundle, tmp_path / "allowed", run_code=True)
    mine = tmp_path / "allowed/code/0/mine.py"
    assert read_record(opened.code, AllowedCode).files == {str(mine): hashlib.sha256(b"# reviewed").hexdigest()}


def test_python_code_needs_to_be_allowed(bundle: Path, tmp_path: Path) -> None:
    def add(files: dict[str, bytes]) -> None:
        with_settings(lambda settings: settings["model"].update(converters=["code/0/mine.py"]))(files)
        files["code/0/mine.py"] = b"raise SystemExit(99)"

    rewrite(bundle, add)
    with pytest.raises(ConfigError, match=r"holds Python code \(code/0/mine.py\).*--run-code"):
        unpack(bundle, tmp_path / "refused")
    assert unpack(bundle, tmp_path / "allowed", run_code=True)[1].is_dir()


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    for number, content in enumerate((b"", b"PK\3\4", os.urandom(500), b"\x80\x04\x95")):
        path = tmp_path / str(number)
        path.write_bytes(content)
        assert not is_bundle(path)
        with pytest.raises(CheckpointError, match="is not a bundle"):
            unpack(path, tmp_path / f"opened-{number}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "python loss"])
def test_a_bundle_is_exported_on_another_machine_to_the_file_of_the_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything of the run is deleted, and the home is another one."""
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir(), here.mkdir()
    loss = there / "loss.py"
    loss.write_text("def squares(output, labels):\n    return ((output - labels) ** 2).sum()\n")
    plain: dict[str, Any] = {}
    if kind == "python loss":
        plain = {"model": {}, "loss": [{"file": f"{loss}:squares", "label": "label"}]}
    run = trained_run(there, **plain)
    (checkpoint,) = run.checkpoints.glob("step-*2")
    first = exports.export(checkpoint, there / "first.onnx")
    before = first.path.read_bytes()
    exports.bundle(checkpoint, here / "run.bundle")
    shutil.rmtree(there)
    done = onward_export(here / "run.bundle", here / "out.onnx", *(["--run-code"] if kind != "plain" else []))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (here / "out.onnx").read_bytes() == before
