"""`onward verify`: what is as it was saved, what is not, and a part of a run that is trained again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from onward.flows.cli import app
from onward.flows.running import verify_run
from onward.flows.running.replayed_training import choose
from onward.trainer.checkpoint.manifest import NO_DIGEST, Manifest, read_manifest, serialise
from onward.trainer.checkpoint.verification import CheckedRun
from onward.trainer.errors import CheckpointError, ConfigError
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.durable_files import sha256
from tests.support import graphs
from tests.support.runs import make_run, train_run, train_until

pytestmark = pytest.mark.mpi


STEPS = {"global_batch_size": 8, "num_steps": 6}


def run_of(folder: Path, **sections: Any) -> RunDir:
    rows = np.random.default_rng(0)
    columns = {"features": rows.normal(size=(40, 4)).astype(np.float32), "label": np.ones((40, 1), np.float32)}
    given: dict[str, Any] = {
        "model": {"loss": "mse"},
        "train": STEPS,
        "checkpoint": {"period": 2, "keep_newest": 9},
    }
    return make_run(folder, graphs.tiny_mlp(), columns, **(given | sections))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of two ranks with the checkpoints of steps 2, 4 and 6."""
    run = run_of(tmp_path_factory.mktemp("trained"), parallel={"data": 2})
    train_run(run)
    return run


@pytest.fixture
def copied(trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    shutil.copytree(trained.root.parent, tmp_path, dirs_exist_ok=True, symlinks=True)
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    return RunDir(tmp_path / "run")


def change_weight(path: Path) -> None:
    """Change one element and make all digests of files right again, as a wrong tool could."""
    manifest = read_manifest(path)
    for file in manifest.files:
        tensors = load_file(path / file.name)
        for name, tensor in tensors.items():
            if name.startswith("model/") and tensor.numel() > 1:
                tensor.view(-1)[0] += 1
                save_file(dict(tensors), path / file.name)
                changed = file.model_copy(
                    update={"sha256": sha256(path / file.name), "bytes": (path / file.name).stat().st_size}
                )
                files = tuple(changed if each.name == file.name else each for each in manifest.files)
                forge(path, manifest.model_copy(update={"files": files}))
                return


def forge(path: Path, manifest: Manifest) -> None:
    (path / "manifest.json").write_bytes(serialise(manifest.model_copy(update={"sha256": NO_DIGEST})))


def verify(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_an_untouched_run_is_verified_and_its_checkpoints_are_shown(copied: RunDir) -> None:
    status, shown, problems = verify(copied.root)
    assert (status, problems) == (0, "")
    rows = [line.split() for line in shown.splitlines() if line.strip().startswith("step-")]
    assert [(row[0], row[-1]) for row in rows] == [
        ("step-000000002", "saved"),
        ("step-000000004", "saved"),
        ("step-000000006", "saved"),
    ]
    status, shown, _ = verify(copied.root, "--json")
    assert status == 0
    facts = json.loads(shown)
    assert (len(facts["checkpoints"]), facts["problems"]) == (3, [])
    assert verify(copied.checkpoint(4))[0] == 0


def test_deleted_checkpoints_are_not_missed_while_one_is_left(copied: RunDir) -> None:
    shutil.rmtree(copied.checkpoint(4))
    assert verify(copied.root)[0] == 0
    shutil.rmtree(copied.checkpoints)
    status, _, _ = verify(copied.root)
    assert status != 0
    with pytest.raises(CheckpointError, match="has no checkpoint to verify"):
        verify_run.verify(copied.root)


def test_a_flipped_bit_ends_with_exit_status_4_and_the_file(copied: RunDir) -> None:
    file = copied.checkpoint(4) / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    status, _, problems = verify(copied.root)
    assert status == 4
    assert "step-000000004: checkpoint" in problems
    assert "rank-00000.safetensors has SHA-256" in problems


def test_changed_shards_and_a_changed_source_end_with_exit_status_4(copied: RunDir) -> None:
    _, shown, _ = verify(copied.root)
    assert [line.split()[-1] for line in shown.splitlines() if line.strip().startswith("shards")] == ["written"]
    shards = copied.shards.resolve()
    copied.shards.unlink()
    shutil.copytree(shards, copied.shards)
    file = copied.shards / "train-00000.arrow"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, _, problems = verify(copied.root)
    assert status == 4
    assert "train-00000.arrow has SHA-256" in problems
    source = Path(read_config(copied).data.source)
    content = bytearray(source.read_bytes())
    try:
        source.write_bytes(content + b"\0")
        assert "changed since it was sharded (key" in verify(copied.root)[2]
    finally:
        source.write_bytes(content)


def test_which_steps_a_replay_takes(trained: RunDir) -> None:
    assert choose([2, 4, 6], None, trained) == (4, 6)
    assert choose([2, 4, 6], 2, trained) == (2, 4)
    assert choose([2, 4, 6], 0, trained) == (0, 2)
    with pytest.raises(ConfigError, match=r"--from 3: run run keeps the checkpoints of steps 2, 4, 6"):
        choose([2, 4, 6], 3, trained)
    with pytest.raises(ConfigError, match="none after it"):
        choose([2, 4, 6], 6, trained)
    with pytest.raises(CheckpointError, match=r"--from 0"):
        choose([6], None, trained)


@pytest.mark.slow
def test_a_replay_reaches_the_same_bits_and_leaves_nothing(copied: RunDir, tmp_path: Path) -> None:
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    status, shown, problems = verify(copied.root, "--replay")
    assert (status, problems) == (0, ""), problems
    assert "from step 4 to step 6" in shown
    assert "the same bits" in shown
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_replay_of_changed_weights_names_the_first_tensor_that_differs(copied: RunDir) -> None:
    # consistent in itself, so that the replay alone finds it: the checkpoint that it begins with was changed
    change_weight(copied.checkpoint(4))
    replayed = verify_run.replay(copied.root)
    assert "model/" in replayed.differences[0]
    assert "elements, by up to" in replayed.differences[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": {"data": 2, "zero": 2}},
        {
            "parallel": {"data": 2, "pipeline": 2},
            "train": {"global_batch_size": 8, "num_steps": 6, "gradient_accumulation_steps": 2},
        },
        {"parallel": {"data": 2, "zero": 3}, "average": {"kind": "ema"}},
        {"checkpoint": {"period": 4, "keep_newest": 9, "background": False}},
    ],
)
def test_every_layout_is_replayed_to_the_same_bits_after_a_kill_too(sections: dict[str, Any], tmp_path: Path) -> None:
    run = run_of(tmp_path, **sections)
    ranks = sections.get("parallel", {})
    train_until(run, ("scalars", 5), rank=min(1, ranks.get("data", 1) - 1))
    train_run(run)
    found = verify_run.verify(run.root)
    assert isinstance(found, CheckedRun)
    assert found.problems == ()
    for start in (None, 0):
        assert verify_run.replay(run.root, from_step=start).differences == ()
