"""Python of the user is executed with the bytes that were permitted, and no others."""

from __future__ import annotations

import hashlib
import os
import py_compile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from onward.trainer import bounds
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_import.lowering.converters import load_converters
from onward.trainer.run import allowed_code
from onward.trainer.run.allowed_code import AllowedCode, allow_code_of, code_digests, load_function
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import write_record
from tests.support.graphs import tiny_mlp
from tests.support.runs import make_run, start_attempt

GOOD = "def f():\n    return 'good'\n"
EVIL = "from pathlib import Path\nPath(__file__).with_name('evil').touch()\ndef f():\n    return 'evil'\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Python file; what this process may execute is as before after the test."""
    monkeypatch.setattr(allowed_code, "_allowed", None)
    (tmp_path / "loss.py").write_text(GOOD)
    return tmp_path / "loss.py"


def permit(file: Path) -> None:
    """Let this process execute what a run in the file's folder may: the file as it is now."""
    run = RunDir(file.parent)
    write_record(run.code, AllowedCode(files=code_digests({"loss": {"file": f"{file}:f"}})))
    allow_code_of(run)


def test_without_a_record_the_users_files_run_as_they_are(file: Path) -> None:
    allow_code_of(RunDir(file.parent))
    assert load_function(file, "f", "loss.file")() == "good"


def test_a_file_that_changed_is_refused_with_both_digests_and_what_to_do(file: Path) -> None:
    permit(file)
    assert load_function(file, "f", "loss.file")() == "good"
    file.write_text(EVIL)
    digests = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in (GOOD, EVIL)]
    with pytest.raises(ConfigError) as caught:
        load_function(file, "f", "loss.file")
    (problem,) = caught.value.problems
    assert problem.startswith(
        f"loss.file: {file} changed after it was permitted (SHA-256 {digests[0]}, now {digests[1]})"
    )
    assert "put the file back, or look at it and start a new run (of a deployment: deploy it again)" in problem
    with pytest.raises(ConfigError, match="changed after it was permitted"):
        load_converters([file])
    assert not (file.parent / "evil").exists()


def test_a_file_that_nobody_has_permitted_is_refused(file: Path) -> None:
    permit(file)
    other = file.with_name("other.py")
    other.write_text(EVIL)
    for load in (lambda: load_function(other, "f", "loss.count"), lambda: load_converters([other])):
        with pytest.raises(ConfigError, match=rf"{other} is Python that nobody has permitted; permitted are: {file}"):
            load()
    assert not (file.parent / "evil").exists()


def test_the_bytes_that_were_compared_are_those_that_are_executed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced between its reading and its execution."""
    permit(file)
    read = allowed_code.read_bounded

    def read_then_replaced(path: Path, limit: bounds.Limit) -> bytes:
        content = read(path, limit)
        path.write_text(EVIL)
        return content

    monkeypatch.setattr(allowed_code, "read_bounded", read_then_replaced)
    assert load_function(file, "f", "loss.file")() == "good"
    assert not (file.parent / "evil").exists()


@pytest.mark.parametrize("ending", [".pyc", ".so", "", ".onnx"])
def test_only_source_is_executed(ending: str, file: Path) -> None:
    """An importer takes compiled code as well, which nobody can read before it is allowed."""
    other = file.with_name(f"mine{ending}")
    file.write_text(EVIL)
    py_compile.compile(str(file), cfile=str(other))
    with pytest.raises(ConfigError, match=r"it is not a Python file; its name must end with \.py"):
        load_function(other, "f", "loss.file")
    with pytest.raises(ConfigError, match="it is not a Python file"):
        load_converters([other])
    assert not (file.parent / "evil").exists()


@pytest.mark.mpi
@pytest.mark.parametrize("setting", ["loss.file", "model.converters"])
def test_a_rank_refuses_a_file_that_is_not_the_one_which_the_flow_has_recorded(setting: str, tmp_path: Path) -> None:
    """Real ranks: the file is replaced between the record of the flow and their start."""
    mine = tmp_path / "mine.py"
    mine.write_text("def f(output, labels):\n    return ((output - labels) ** 2).sum()\n")
    own: dict[str, Any] = {"model": {"loss": "mse", "converters": [mine]}}
    if setting == "loss.file":
        own = {"loss": [{"file": f"{mine}:f", "label": "label"}]}
    columns = {"features": np.ones((40, 4), np.float32), "label": np.ones((40, 1), np.float32)}
    run = make_run(tmp_path, tiny_mlp(), columns, train={"global_batch_size": 8, "num_steps": 2}, **own)
    before = code_digests(read_config(run))
    assert list(before) == [str(mine)]
    write_record(run.code, AllowedCode(files=before))
    mine.write_text(EVIL)
    after = hashlib.sha256(EVIL.encode()).hexdigest()
    start_attempt(run).wait(120)
    error = run.first_error(1)
    assert error is not None
    assert f"{setting}: {mine} changed after it was permitted (SHA-256 {before[str(mine)][:12]}, now {after[:12]})" in (
        error.cause
    )
    assert not (tmp_path / "evil").exists()


def test_a_stale_bytecode_cache_is_not_used(file: Path) -> None:
    """An importer takes the bytecode beside a file if time and size of the file are those that it notes."""
    status = file.stat()
    padded = EVIL + "#" * 7
    file.write_text(padded)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    py_compile.compile(str(file))
    file.write_text(GOOD + "#" * (len(padded) - len(GOOD)))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    permit(file)
    assert load_function(file, "f", "loss.file")() == "good"


def test_a_fifo_and_a_device_are_refused(file: Path) -> None:
    fifo = file.with_name("fifo.py")
    os.mkfifo(fifo)
    device = file.with_name("device.py")
    device.symlink_to("/dev/zero")
    for other in (fifo, device):
        with pytest.raises(ConfigError, match="only regular files are read"):
            load_function(other, "f", "loss.file")


def test_modules_beside_the_file_are_not_found(file: Path) -> None:
    """What the permission covers: the file. Its folder is not on the module path."""
    file.with_name("beside.py").write_text(EVIL)
    file.write_text("import beside\n")
    with pytest.raises(ConfigError, match="No module named 'beside'"):
        load_function(file, "f", "loss.file")


def test_a_file_knows_its_own_place(file: Path) -> None:
    file.write_text("def f():\n    return __file__, __name__\n")
    assert load_function(file, "f", "loss.file")() == (str(file), "onward_loss_loss")
    assert isinstance(allowed_code.execute(file, "loss.file", "name"), ModuleType)
