"""Files that are complete or absent, and what killed processes leave beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from onward.trainer.run.durable_files import durable_file, remove_partials

DIES = """
import os, signal, sys
from pathlib import Path
from onward.trainer.run.durable_files import durable_file
with durable_file(Path(sys.argv[1])) as partial:
    partial.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_has_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    path, other = tmp_path / "model[1].onnx", tmp_path / "model1.onnx"
    for file in (path, other):
        subprocess.run([sys.executable, "-c", DIES, str(file)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    with durable_file(path) as own:
        own.write_bytes(b"whole")
        remove_partials(path)
        assert own.name == f".model[1].onnx.{os.getpid()}.partial"
        assert own.exists()
    assert path.read_bytes() == b"whole"
    (left,) = [file.name for file in tmp_path.iterdir() if file != path]
    assert left.startswith(".model1.onnx."), "it belongs to another file"
