"""The libraries that Onward loads send no telemetry and write nothing into the home directory of the user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_onnxruntime_keeps_no_record_of_its_use(tmp_path: Path) -> None:
    """Without ORT_DISABLE_TELEMETRY its import makes a device id and a database of events below ~/.cache."""
    user, temporary = tmp_path / "user", tmp_path / "tmp"
    user.mkdir()
    temporary.mkdir()
    dropped = ("ORT_DISABLE_TELEMETRY", "CI", "XDG_CACHE_HOME", "ORT_RUNNING_UNIT_TESTS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"HOME": str(user), "TMPDIR": str(temporary)}
    program = (
        "import onward.trainer.onnx_graph.files.onnxruntime_session as module; print(module.onnxruntime.__version__)"
    )
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)
    assert [*user.rglob("*")] == []
    assert [*temporary.rglob("*")] == []
