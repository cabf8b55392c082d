"""Checkpoints on real disks and real ranks: what comes back, what is refused, what is kept."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from trainer.checkpoint import load, newest_whole, partition, save
from trainer.distributed import MPIContext
from trainer.errors import CheckpointError, Fenced
from trainer.manifest import (
    UNSEALED,
    TrainState,
    expendable,
    list_checkpoints,
    read_manifest,
    remove,
    verify,
)
from trainer.run import CheckpointInfo, RunDir

ALONE = MPIContext(0, 1, 0, 1, "here", torch.device("cpu"))


def position(step: int) -> TrainState:
    metrics = {"evaluation/loss": 1 / 3, "evaluation/perplexity": math.inf}
    return TrainState(step=step, samples_seen=32 * step, scaler={"scale": 2.0**16}, metrics=metrics, evaluated_at=step)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every kind of tensor that has ever been lost on the way; the same on every rank."""
    dice = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 30, generator=dice)
    return {
        "model/conv1.weight": weight,
        "model/transposed": weight.t(),
        "model/a view of the middle": weight[3:5],
        "model/half": weight[:3].to(torch.bfloat16),
        "model/not numbers": torch.tensor([math.nan, math.inf, -0.0, 1e-42]),
        "model/empty": torch.empty(0, 7),
        "model/scalar": torch.tensor(3.25, dtype=torch.float64),
        "model/ünïcode / and ../slashes": torch.arange(5, dtype=torch.int16),
        "optimizer/conv1.weight/step": torch.tensor(2**62, dtype=torch.int64),
        "optimizer/conv1.weight/mask": torch.tensor([True, False, True]),
        "optimizer/conv1.weight/exp_avg": torch.nn.Parameter(torch.randn(40, 30, generator=dice)),
        "optimizer/conv1.weight/exp_avg_sq": torch.rand(1000, generator=dice).half(),
    }


def bits(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), list(tensor.shape), content.numpy().tobytes()


def same_bits(loaded: dict[str, torch.Tensor], seed: int = 0) -> bool:
    return {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in tensors(seed).items()}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The run directory of a first attempt."""
    run = RunDir(tmp_path)
    run.begin_attempt()
    return run


def saved(run: RunDir, step: int, *, seed: int = 0) -> Path:
    return save(run, attempt=run.current_attempt, state=position(step), tensors=tensors(seed), mpi=ALONE)


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def flip(path: Path, *, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


# -- what comes back


def exchange(mpi: MPIContext, root: str) -> bool:
    """Go on from the newest checkpoint, and save the next one."""
    run = RunDir(Path(root))
    path = newest_whole(run, mpi=mpi)
    assert path is not None
    state, loaded = load(path)
    save(run, attempt=1, state=position(state.step + 1), tensors=tensors(), mpi=mpi)
    return state == position(state.step) and same_bits(loaded)


def test_what_is_saved_comes_back_bit_for_bit_and_so_does_the_position(run: RunDir) -> None:
    state, loaded = load(saved(run, 7))
    assert state == position(7)
    assert same_bits(loaded)


@pytest.mark.mpi
def test_any_number_of_ranks_loads_what_any_other_number_saved(run: RunDir) -> None:
    saved(run, 1)
    assert run_ranks(2, f"{__name__}:exchange", str(run.root)) == [True] * 2
    assert run_ranks(3, f"{__name__}:exchange", str(run.root)) == [True] * 3
    assert same_bits(load(run.checkpoint(3))[1])
    assert names(run) == ["step-000000001", "step-000000002", "step-000000003"]
    assert [len(read_manifest(run.checkpoint(step)).files) for step in (1, 2, 3)] == [1, 2, 3]


def test_more_ranks_than_tensors_leave_files_that_hold_nothing() -> None:
    assert partition({"a": 3, "b": 1}, 4) == [["a"], ["b"], [], []]


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ({"a": 1, "b": 2, "c": 3}, 1, [["c", "b", "a"]]),
        ({"a": 1, "b": 2, "c": 3}, 2, [["c"], ["b", "a"]]),
        ({"b": 5, "a": 5, "c": 5, "d": 5}, 2, [["a", "c"], ["b", "d"]]),
        ({"big": 100, "x": 1, "y": 1, "z": 0}, 2, [["big"], ["x", "y", "z"]]),
    ],
)
def test_shares_are_about_equal_and_the_same_on_every_rank(
    sizes: dict[str, int], parts: int, expected: list[list[str]]
) -> None:
    assert partition(sizes, parts) == expected
    assert partition(dict(reversed(sizes.items())), parts) == expected


def test_a_big_file_is_written_with_heartbeats_in_between(run: RunDir) -> None:
    beats: list[None] = []
    big = {"model/w": torch.zeros(20 << 20), "model/v": torch.zeros(1)}  # 80 MB: over one sync with the disk
    path = save(run, attempt=1, state=position(1), tensors=big, mpi=ALONE, beat=lambda: beats.append(None))
    assert len(beats) >= 6
    assert load(path)[1]["model/w"].shape == big["model/w"].shape


# -- what is refused


def test_every_flipped_bit_is_found_and_its_file_named(run: RunDir) -> None:
    path = saved(run, 7)
    for file in path.iterdir():
        content = file.read_bytes()
        for byte in range(0, len(content), max(1, len(content) // 200)):
            flip(file, byte=byte, bit=byte % 8)
            with pytest.raises(CheckpointError, match=rf"step-000000007 is damaged: {file.name}"):
                verify(path)
            file.write_bytes(content)
    assert verify(path).step == 7


def shorten(path: Path) -> None:
    (path / "rank-00000.safetensors").write_bytes((path / "rank-00000.safetensors").read_bytes()[:-1])


def link(path: Path) -> None:
    (path / "rank-00000.safetensors").rename(path.parent / "elsewhere")
    (path / "rank-00000.safetensors").symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (shorten, r"rank-00000.safetensors has [\d,]+ bytes, not [\d,]+"),
        (link, "rank-00000.safetensors is missing"),
        (lambda path: (path / "rank-00000.safetensors").unlink(), "rank-00000.safetensors is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text(""), "manifest.json:  Invalid JSON"),
        (lambda path: (path / "rank-00001.safetensors").touch(), "rank-00001.safetensors does not belong to it"),
        (lambda path: (path / "folder").mkdir(), "folder does not belong to it"),
        (shutil.rmtree, "there is no checkpoint .*step-000000007"),
    ],
)
def test_harm_is_named(run: RunDir, harm: Callable[[Path], object], complaint: str) -> None:
    path = saved(run, 7)
    harm(path)
    with pytest.raises(CheckpointError, match=complaint):
        load(path)


def forge(path: Path, change: Callable[[Any], object]) -> None:
    """Rewrite the manifest, with a seal that is right."""
    forged = json.loads((path / "manifest.json").read_text()) | {"sha256": UNSEALED}
    change(forged)
    content = json.dumps(forged)
    seal = hashlib.sha256(content.encode()).hexdigest()
    (path / "manifest.json").write_text(content.replace(UNSEALED, seal, 1))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "rank-00000.safetensors/../../x", "rank-0"])
def test_a_manifest_leads_to_no_file_outside_of_its_directory(run: RunDir, name: str) -> None:
    path = saved(run, 7)
    forge(path, lambda manifest: manifest["files"][0].update(name=name))
    with pytest.raises(CheckpointError, match=r"manifest.json: files.0.name"):
        load(path)


def test_a_file_that_holds_other_tensors_than_the_manifest_says_is_refused(run: RunDir) -> None:
    path = saved(run, 7)
    forge(path, lambda manifest: manifest["files"][0]["tensors"].pop("model/empty"))
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors holds other tensors"):
        load(path)


def test_a_fenced_attempt_commits_nothing(run: RunDir) -> None:
    saved(run, 1)
    run.begin_attempt()

    def overtaken() -> None:
        if run.current_attempt == 2:
            run.begin_attempt()

    with pytest.raises(Fenced, match="attempt 1 found attempt 2"):
        save(run, attempt=1, state=position(2), tensors=tensors(), mpi=ALONE)
    with pytest.raises(Fenced, match="attempt 2 found attempt 3"):
        save(run, attempt=2, state=position(2), tensors=tensors(), mpi=ALONE, beat=overtaken)
    assert names(run) == ["step-000000001"]


# -- which one a training goes on from


def test_training_goes_on_from_the_newest_that_is_whole(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_whole(run, mpi=ALONE) is None
    paths = [saved(run, step) for step in (1, 2, 10, 1_000_000_000)]
    assert list_checkpoints(run) == paths
    assert newest_whole(run, mpi=ALONE) == paths[3]
    flip(paths[3] / "rank-00000.safetensors", byte=500)
    (paths[2] / "manifest.json").unlink()
    assert newest_whole(run, mpi=ALONE) == paths[1]
    assert "passed over" in caplog.text


def test_neither_half_written_nor_half_deleted_ones_are_checkpoints(run: RunDir) -> None:
    path = saved(run, 1)
    for name in ("step-000000002.partial-001", "step-000000003.removed", "step-000000004.damaged", "step-5", "step-"):
        shutil.copytree(path, run.checkpoints / name)
    (run.checkpoints / "announced.json").touch()
    assert list_checkpoints(run) == [path]


def newest_of_own(mpi: MPIContext, root: str) -> str | None:
    run = RunDir(Path(root) / str(mpi.rank))
    run.begin_attempt()
    for step in (1, 2)[: 2 - mpi.rank]:
        saved(run, step)
    found = newest_whole(run, mpi=mpi)
    return found and found.name


@pytest.mark.mpi
def test_ranks_that_see_different_directories_agree_on_the_oldest(tmp_path: Path) -> None:
    assert run_ranks(2, f"{__name__}:newest_of_own", str(tmp_path)) == ["step-000000001"] * 2


def test_a_step_made_again_leaves_the_whole_checkpoint_of_it_alone(run: RunDir) -> None:
    saved(run, 2, seed=1)
    run.begin_attempt()
    assert same_bits(load(saved(run, 2, seed=2))[1], seed=1)


def test_a_step_made_again_takes_the_place_of_a_damaged_checkpoint(run: RunDir) -> None:
    flip(saved(run, 2, seed=1) / "rank-00000.safetensors", byte=500)
    run.begin_attempt()
    assert same_bits(load(saved(run, 2, seed=2))[1], seed=2)
    assert names(run) == ["step-000000002", "step-000000002.damaged"]


def test_saving_clears_away_what_dead_attempts_left_and_nothing_else(run: RunDir) -> None:
    run.checkpoints.mkdir()
    left = ["step-000000002.partial-001", "step-000000003.partial-002", "step-000000001.removed"]
    stays = ["step-000000003.partial-003", "step-000000001.damaged"]
    for name in left + stays:
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "rank-00000.safetensors").touch()
    run.begin_attempt()
    saved(run, 3)
    assert names(run) == sorted([*stays, "step-000000003"])


def test_metrics_belong_to_a_checkpoint_only_if_it_was_evaluated_at_that_step(run: RunDir) -> None:
    later = position(7).advance(32, {"scale": 1.0})
    assert (later.step, later.samples_seen, later.metrics) == (8, 8 * 32, position(7).metrics)
    assert verify(saved(run, 7)).metrics == position(7).metrics
    assert verify(save(run, attempt=1, state=later, tensors=tensors(), mpi=ALONE)).metrics == {}
    evaluated = later.evaluated({"evaluation/loss": 0.5}).model_copy(update={"step": 8})
    assert verify(save(run, attempt=1, state=evaluated, tensors={}, mpi=ALONE)).metrics == {}, "step 8 stays as it is"


# -- which ones stay


@pytest.mark.parametrize(
    ("steps", "best", "keep_newest", "expected"),
    [
        ([], 0, 3, []),
        ([1, 2, 3], 0, 3, []),
        ([1, 2, 3, 4], 0, 3, [1]),
        ([1, 2, 3, 4], 1, 3, []),
        ([1, 2, 3, 4], 1, 1, [3, 2]),
        ([1, 2, 3, 4], 4, 1, [3, 2, 1]),
        ([4, 1, 3, 2], 2, 2, [1]),
        ([1, 2], 0, 0, [1]),
    ],
)
def test_the_newest_and_the_best_stay(steps: list[int], best: int, keep_newest: int, expected: list[int]) -> None:
    infos = [CheckpointInfo(step=s, path=Path(str(s)), bytes=1, digest="", metrics={}, best=s == best) for s in steps]
    assert [info.step for info in expendable(infos, keep_newest=keep_newest)] == expected


def test_a_removed_checkpoint_leaves_nothing(run: RunDir) -> None:
    saved(run, 1)
    (run.checkpoints / "step-000000001.removed").mkdir()  # of a removal that was cut off
    (run.checkpoints / "step-000000001.removed" / "manifest.json").touch()
    remove(run.checkpoint(1))
    assert names(run) == []


def test_what_the_manifest_says_adds_up(run: RunDir) -> None:
    path = saved(run, 7)
    info = verify(path)
    assert info.bytes == sum(file.stat().st_size for file in path.iterdir())
    assert (info.step, info.path, info.best) == (7, path, False)
    listed = {name: entry for file in read_manifest(path).files for name, entry in file.tensors.items()}
    assert {name: list(entry.shape) for name, entry in listed.items()} == {
        n: list(t.shape) for n, t in tensors().items()
    }
    assert listed["model/half"].dtype == "BF16"
