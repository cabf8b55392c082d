"""Faults that a command has to refuse: each runs `onward resume` on a damaged or running run, and judges its answer.

    kill the flow --> damage files, and keep copies --> onward resume: exit status? --> put the files back

What was damaged is whole again afterwards, so the soak resumes the run and compares its bits.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from onward.trainer.errors import CheckpointError, ConfigError
from tests.soak.file_faults import flip_bit, kill_flow_and_wait
from tests.soak.scene import NoTarget, Scene

LONGEST_REFUSAL_S = 240.0
"""How long a command may take to refuse."""


def second_resume(scene: Scene, choice: float) -> str:
    """Resume a run that is running; that must be refused, and do no harm."""
    _must_end(scene, ("resume", scene.run_dir.root.name), status=ConfigError.exit_code)
    return "a second `onward resume`, refused"


def edit_config(scene: Scene, choice: float) -> str:
    """Change a setting of a run that was killed, and resume it."""
    told = kill_flow_and_wait(scene, choice)
    path = scene.run_dir.config
    text = path.read_text()
    settings = json.loads(text)
    settings["train"]["log_period"] += 1
    path.write_text(json.dumps(settings))
    try:
        said = _must_end(scene, ("resume", scene.run_dir.root.name), status=ConfigError.exit_code)
    finally:
        path.write_text(text)
    if "train.log_period" not in said:
        raise ConfigError(f"the refusal of an edited config.json does not name the setting: {said}")
    return f"RUN_DIR/config.json, refused, after {told}"


def flip_all_checkpoints(scene: Scene, choice: float) -> str:
    """Flip a bit in every checkpoint of a run that was killed, and resume it."""
    if not scene.checkpoints():
        raise NoTarget("there is no checkpoint yet")
    told = kill_flow_and_wait(scene, choice)
    folder, kept = scene.run_dir.checkpoints, scene.home / "kept-checkpoints"
    shutil.copytree(folder, kept)
    try:
        flipped = scene.checkpoints()  # the ranks of a killed flow save a last one
        for each in flipped:
            # the only file of one may have been the target of an earlier fault
            for path in sorted(each.glob("*.safetensors"))[:1]:
                flip_bit(path, choice)
        _must_end(scene, ("resume", scene.run_dir.root.name), status=CheckpointError.exit_code)
    finally:
        shutil.rmtree(folder)  # the resume may have renamed damaged ones
        kept.rename(folder)
    return f"all {len(flipped)} checkpoints, refused, after {told}"


def _must_end(scene: Scene, words: tuple[str, ...], *, status: int) -> str:
    """Run a command and return what it printed; raise ConfigError unless it ends with this exit status in time.

    Raises NoTarget where the run was done before the command looked at it.
    """
    environment = {**os.environ, **scene.environment()}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "onward.flows.cli", *words],
            env=environment,
            cwd=scene.home,
            capture_output=True,
            text=True,
            timeout=LONGEST_REFUSAL_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"onward {' '.join(words)} refused nothing in {LONGEST_REFUSAL_S:g} s") from None
    if ended.returncode == 0 and scene.run_dir.exported.exists():
        raise NoTarget("the run was done before the command looked at it")
    if ended.returncode != status:
        last = " / ".join(ended.stderr.strip().splitlines()[-3:])
        raise ConfigError(f"onward {' '.join(words)} ended with status {ended.returncode}, not {status}: {last}")
    return ended.stderr
