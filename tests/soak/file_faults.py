"""Faults of files, databases and limits, under the home of the soak: never of a file of the user's.

Each function gets the scene and a number from 0 to 1, hits its target and returns its description; it raises NoTarget
when there is none yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sqlite3
import time
from pathlib import Path

from tests.soak.process_faults import to_flow, to_rank
from tests.soak.scene import NoTarget, Scene, until_gone

OUTAGE_S = 8.0
"""How long a server, a database or a disk is away that Onward has to do without."""


def newest_checkpoint(scene: Scene) -> Path:
    found = scene.checkpoints()
    if len(found) < 2:
        raise NoTarget("there are no two checkpoints yet")
    return found[-1]


def flip_bit(path: Path, choice: float) -> str:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        position = int(choice * size)
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << int(choice * 8999) % 8)]))
    return f"a bit of byte {position} of {path.parent.name}/{path.name}"


def flip_checkpoint(scene: Scene, choice: float) -> str:
    folder = newest_checkpoint(scene)
    files = sorted(folder.glob("*.safetensors"))
    told = flip_bit(files[int(choice * len(files))], choice)
    return f"{told}; {to_rank(signal.SIGKILL, scene, choice)}"


def truncate_manifest(scene: Scene, choice: float) -> str:
    path = newest_checkpoint(scene) / "manifest.json"
    os.truncate(path, int(choice * path.stat().st_size))
    return f"{path.parent.name}/manifest.json; {to_rank(signal.SIGKILL, scene, choice)}"


def delete_rank_file(scene: Scene, choice: float) -> str:
    files = sorted(newest_checkpoint(scene).glob("*.safetensors"))
    path = files[int(choice * len(files))]
    path.unlink()
    return f"{path.parent.name}/{path.name}; {to_rank(signal.SIGKILL, scene, choice)}"


def kill_flow_and_wait(scene: Scene, choice: float) -> str:
    told = to_flow(signal.SIGKILL, scene, choice)
    until_gone(scene.jobs, 15.0)
    return told


def one_shard(scene: Scene, choice: float) -> Path:
    files = sorted(path for path in scene.run_dir.shards.resolve().iterdir() if path.name != "manifest.json")
    if not files:
        raise NoTarget("there are no shards")
    return files[int(choice * len(files))]


def flip_shard(scene: Scene, choice: float) -> str:
    told = kill_flow_and_wait(scene, choice)
    return f"{flip_bit(one_shard(scene, choice), choice)}, after {told}"


def delete_shard(scene: Scene, choice: float) -> str:
    told = kill_flow_and_wait(scene, choice)
    path = one_shard(scene, choice)
    path.unlink()
    return f"{path.parent.name}/{path.name}, after {told}"


def remove_heartbeat(scene: Scene, choice: float) -> str:
    scene.run_dir.heartbeat.unlink(missing_ok=True)
    return "RUN_DIR/heartbeat"


def damage_events(scene: Scene, choice: float) -> str:
    """Overwrite a line of the event log that has been sent to MLflow."""
    sent = json.loads(scene.run_dir.cursor.read_text())["offset"]
    if not sent:
        raise NoTarget("nothing of the event log has been sent yet")
    told = kill_flow_and_wait(scene, choice)
    log = scene.run_dir.events
    content = log.read_bytes()
    lines = content[:sent].splitlines(keepends=True)
    number = int(choice * len(lines))
    lines[number] = b"\0" * (len(lines[number]) - 1) + b"\n"
    log.write_bytes(b"".join(lines) + content[sent:])
    return f"line {number + 1} of RUN_DIR/{log.name}, after {told}"


# -- databases


def lock_database(folder: str, scene: Scene, choice: float) -> str:
    """Hold the exclusive lock of a SQLite database, as a slow reader or a backup does."""
    path = scene.home / folder / f"{folder}.db"
    if not path.exists():
        raise NoTarget(f"{path} does not exist yet")
    with contextlib.closing(sqlite3.connect(path, timeout=5.0, isolation_level=None)) as database:
        try:
            database.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            raise NoTarget(f"{path} is in use") from None
        time.sleep(OUTAGE_S)
        database.execute("ROLLBACK")
    return f"{folder}/{path.name} for {OUTAGE_S:g} s"


def hide_mlflow(scene: Scene, choice: float) -> str:
    """Move MLflow's database away for some seconds, with its journals."""
    folder = scene.home / "mlflow"
    files = sorted(folder.glob("mlflow.db*"))
    if not files:
        raise NoTarget(f"{folder} has no database yet")
    for path in files:
        path.rename(path.with_name(f"hidden-{path.name}"))
    time.sleep(OUTAGE_S)
    for path in folder.glob("mlflow.db*"):
        path.unlink()  # an empty one, which a client has created meanwhile
    for path in files:
        path.with_name(f"hidden-{path.name}").rename(path)
    return f"mlflow/mlflow.db for {OUTAGE_S:g} s"


# -- limits that stand for a full disk and for a full memory


def limit_files(scene: Scene, choice: float) -> str:
    """Let no rank write further into a file than a few bytes, as on a full disk."""
    programs = scene.programs()
    for process in programs:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (64, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return f"{len(programs)} ranks"


def fill_disk(scene: Scene, choice: float) -> str:
    """Fill the file system of the home for some seconds."""
    filler = scene.home / "filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for block in (1 << 22, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(block)):
                        pass
        time.sleep(OUTAGE_S)
    finally:
        filler.unlink(missing_ok=True)
    return f"the file system of {scene.home} for {OUTAGE_S:g} s"
