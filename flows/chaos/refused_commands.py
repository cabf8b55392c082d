"""Faults that a command has to refuse: each runs `onward resume` on a damaged or running run, and judges its answer.

    kill the flow --> damage a file, and keep a copy --> onward resume: exit status? --> put the file back

What was damaged is whole again afterwards, so the soak resumes the run and compares its bits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from onward.flows.chaos.file_faults import flip_bit, kill_flow_and_wait
from onward.flows.chaos.scene import NoTarget, Scene
from onward.trainer.errors import CheckpointError, ConfigError

LONGEST_REFUSAL_S = 240.0
"""How long a command may take to refuse."""


def second_resume(scene: Scene, choice: float) -> str:
    """Resume a run that is running; that must be refused, and do no harm."""
    _must_end(scene, ("resume", scene.run_dir.root.name), status=ConfigError.exit_code)
    return "a second `onward resume`, refused"


def edit_config(scene: Scene, choice: float) -> str:
    """Change a setting of a run that was killed, and resume it."""
    told = kill_flow_and_wait(scene, choice)
    with _put_back(scene.run_dir.config):
        text = scene.run_dir.config.read_text()
        scene.run_dir.config.write_text(text.replace('"log_period":', '"log_period":1'))
        _must_end(scene, ("resume", scene.run_dir.root.name), status=ConfigError.exit_code)
    return f"RUN_DIR/config.json, refused, after {told}"


def flip_all_checkpoints(scene: Scene, choice: float) -> str:
    """Flip a bit in every checkpoint of a run that was killed, and resume it."""
    told = kill_flow_and_wait(scene, choice)
    folders = scene.checkpoints()
    if not folders:
        raise NoTarget("there is no checkpoint yet")
    with contextlib.ExitStack() as kept:
        for folder in folders:
            path = sorted(folder.glob("*.safetensors"))[0]
            kept.enter_context(_put_back(path))
            flip_bit(path, choice)
        _must_end(scene, ("resume", scene.run_dir.root.name), status=CheckpointError.exit_code)
    return f"all {len(folders)} checkpoints, refused, after {told}"


@contextlib.contextmanager
def _put_back(path: Path) -> Iterator[None]:
    """Give a file its content back after a block."""
    copy = path.with_name(f"{path.name}.kept")
    shutil.copy2(path, copy)
    try:
        yield
    finally:
        copy.replace(path)


def _must_end(scene: Scene, words: tuple[str, ...], *, status: int) -> None:
    """Run a command; raise ConfigError unless it ends with this exit status."""
    environment = {**os.environ, **scene.environment()}
    ended = subprocess.run(
        [sys.executable, "-m", "onward.flows.cli", *words],
        env=environment,
        cwd=scene.home,
        capture_output=True,
        text=True,
        timeout=LONGEST_REFUSAL_S,
    )
    if ended.returncode != status:
        last = " / ".join(ended.stderr.strip().splitlines()[-3:])
        raise ConfigError(f"onward {' '.join(words)} ended with status {ended.returncode}, not {status}: {last}")
