"""Checkpoints on real disks and real ranks: what comes back, in which layout, what is refused, what is kept."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from onward.trainer.checkpoint import consistency
from onward.trainer.checkpoint.consistency import check_copies
from onward.trainer.checkpoint.load import differences, load, verify_together
from onward.trainer.checkpoint.manifest import (
    NO_DIGEST,
    Manifest,
    TensorEntry,
    find_untiled,
    piece_key,
    read_manifest,
    serialise,
    split_key,
)
from onward.trainer.checkpoint.resume import newest_complete
from onward.trainer.checkpoint.retention import list_checkpoints, prunable, remove
from onward.trainer.checkpoint.save import save
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.checkpoint.verification import verify
from onward.trainer.checkpoint.write_plan import Piece, TensorPart, assign_writers
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, slices
from onward.trainer.errors import CheckpointError, Fenced, TrainingFailed
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import CheckpointInfo, StopState
from tests.support.placements import share_of
from tests.support.ranks import run_ranks

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


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorPart]:
    """All of every tensor, as a single rank or a replica holds it."""
    return {name: (tensor, Placement.full(tensor.shape)) for name, tensor in tensors.items()}


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
    return save(run, attempt=run.current_attempt, state=position(step), parts=whole(tensors(seed)), mpi=ALONE)


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
    newest, _ = newest_complete(run, mpi=mpi)
    assert newest is not None
    state, loaded = load(newest)
    save(run, attempt=1, state=position(state.step + 1), parts=whole(tensors()), mpi=mpi)
    return state == position(state.step) and same_bits(loaded)


def test_what_is_saved_comes_back_bit_for_bit_and_so_does_the_position(run: RunDir) -> None:
    state, loaded = load(verify(saved(run, 7)))
    assert state == position(7)
    assert same_bits(loaded)


@pytest.mark.mpi
def test_any_number_of_ranks_loads_what_any_other_number_saved(run: RunDir) -> None:
    saved(run, 1)
    assert run_ranks(3, f"{__name__}:exchange", str(run.root)) == [True] * 3
    assert same_bits(load(verify(run.checkpoint(2)))[1])
    assert names(run) == ["step-000000001", "step-000000002"]
    assert [len(read_manifest(run.checkpoint(step)).files) for step in (1, 2)] == [1, 3]


def piece(name: str, num_bytes: int, *ranks: int) -> Piece:
    return Piece(name, ((0, num_bytes),), name, TensorEntry(dtype="U8", shape=(num_bytes,)), ranks)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([piece("a", 1, 0), piece("b", 2, 0), piece("c", 3, 0)], [["c", "b", "a"]]),
        ([piece("a", 1, 0, 1), piece("b", 2, 0, 1), piece("c", 3, 0, 1)], [["c"], ["b", "a"]]),
        ([piece(name, 5, 0, 1) for name in "bacd"], [["a", "c"], ["b", "d"]]),
        ([piece("big", 99, 0, 1), piece("x", 1, 0, 1), piece("y", 1, 0, 1)], [["big"], ["x", "y"]]),
        ([piece("a", 3, 0, 1, 2, 3), piece("b", 1, 0, 1, 2, 3)], [["a"], ["b"], [], []]),
        ([piece("only 1 has it", 5, 1), piece("x", 4, 0, 1), piece("y", 1, 0, 1)], [["x", "y"], ["only 1 has it"]]),
        ([piece("first stage", 4, 0, 1), piece("last stage", 3, 2, 3), piece("tied", 2, 0, 1, 2, 3)],
         [["first stage"], ["tied"], ["last stage"], []]),
    ],
)  # fmt: skip
def test_each_piece_is_written_by_one_of_its_holders_in_shares_about_equal_and_the_same_on_every_rank(
    pieces: list[Piece], expected: list[list[str]]
) -> None:
    assert [[piece.key for piece in share] for share in assign_writers(pieces, len(expected))] == expected
    assert assign_writers(reversed(pieces), len(expected)) == assign_writers(pieces, len(expected))


def test_a_big_file_is_written_with_heartbeats_in_between(run: RunDir) -> None:
    beats: list[None] = []
    big = {"model/w": torch.zeros(20 << 20), "model/v": torch.zeros(1)}  # 80 MB: over one sync with the disk
    path = save(run, attempt=1, state=position(1), parts=whole(big), mpi=ALONE, beat=lambda: beats.append(None))
    assert len(beats) >= 6
    assert load(verify(path))[1]["model/w"].shape == big["model/w"].shape


# -- layouts


def place(layout: str, shape: tuple[int, ...], rank: int, size: int) -> Placement | None:
    """What rank `rank` of `size` holds of a tensor of that shape; None if nothing."""
    everything = Placement.full(shape)
    inner, outer = rank % 2, rank // 2
    if not shape or layout == "replicas":
        return everything
    if layout == "rows":
        return share_of(everything, 0, [shape[0]], rank, size)
    if layout == "columns":
        return share_of(everything, len(shape) - 1, [shape[-1]], rank, size)
    if layout == "tensor x data":  # the other way round than ranks of one tensor-parallel group usually are
        return share_of(everything, 0, [shape[0]], outer, -(-size // 2))
    if layout == "pipeline":  # the first stage has the vectors, the last one the rest, and both what is tied
        return everything if shape[0] == 9 or len(shape) % 2 == rank * 2 // size else None
    if layout == "fused x shards" and shape[0] % 3 == 0:  # of each third a half, and of that in memory a share
        part = share_of(everything, 0, [shape[0] // 3] * 3, inner, min(2, size))
        return share_of(part, 0, [part.local_shape[0]], outer, -(-size // 2))
    if layout == "grid" and len(shape) > 1:
        part = share_of(everything, 0, [shape[0]], inner, min(2, size))
        return share_of(part, 1, [shape[1]], outer, -(-size // 2))
    return everything


LAYOUTS = ("replicas", "rows", "columns", "tensor x data", "pipeline", "fused x shards", "grid")


def model() -> dict[str, torch.Tensor]:
    """Tensors of many shapes, some smaller than the number of ranks."""
    dice = torch.Generator().manual_seed(5)
    sizes = [(), (1,), (3,), (7,), (9, 4), (12, 6), (24,), (5, 3), (0, 7), (6, 2, 3, 3), (2, 1)]
    model = {f"model/{number} {list(size)}": torch.randn(size, generator=dice) for number, size in enumerate(sizes)}
    half = {name.replace("model/", "optimizer/") + "/exp_avg": tensor.bfloat16() for name, tensor in model.items()}
    return {**model, **half, "model/a name like a key[0:3]": torch.arange(6), "model/steps": torch.tensor(2**60)}


def placements(layout: str, rank: int, size: int) -> dict[str, Placement]:
    found = {name: place(layout, tuple(tensor.shape), rank, size) for name, tensor in model().items()}
    return {name: placement for name, placement in found.items() if placement is not None}


def taken(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    part = torch.empty(placement.local_shape, dtype=tensor.dtype)
    for local, content in placement.take(tensor):
        part[slices(local)] = content
    return part


def parts(layout: str, rank: int, size: int) -> dict[str, TensorPart]:
    whole = model()
    return {name: (taken(whole[name], held), held) for name, held in placements(layout, rank, size).items()}


def wrongly_loaded(path: Path, layout: str, size: int) -> list[tuple[str, int]]:
    """Tensors, and ranks out of `size` that would get other bits than are theirs."""
    wrong = []
    for rank in range(size):
        held = parts(layout, rank, size)
        loaded = load(verify(path), {name: placement for name, (_, placement) in held.items()})[1]
        wrong += [(name, rank) for name, (tensor, _) in held.items() if bits(loaded.pop(name)) != bits(tensor)]
        wrong += [(name, rank) for name in loaded]
    return wrong


def save_in_layouts(mpi: MPIContext, root: str) -> list[str]:
    run = RunDir(Path(root))
    for step, layout in enumerate(LAYOUTS, 1):
        held = parts(layout, mpi.rank, mpi.world_size)
        check_copies(held, mpi)
        save(run, attempt=1, state=position(step), parts=held, mpi=mpi)
    torch.distributed.barrier()
    beats: list[None] = []
    newest, _ = newest_complete(run, mpi=mpi, beat=lambda: beats.append(None))
    assert newest is not None
    return [str(newest.path), str(len(beats)), *refused_by_all(mpi, run), *refused_when_damaged(mpi, run)]


def refused_by_all(mpi: MPIContext, run: RunDir) -> list[str]:
    """What this rank is told when the parts do not fit together, and when replicas have drifted."""
    row = Placement.full((8, 2)).narrow(0, 2 * mpi.rank, 2 * mpi.rank + 2)
    unlike = row.narrow(0, 0, 1) if mpi.rank == 1 else row
    more = Placement.full((8, 2)).narrow(0, 0, 3) if mpi.rank == 0 else row
    other = Placement.full((8, 3)) if mpi.rank == 2 else Placement.full((8, 2))
    told = []
    for placement in (unlike, more, other):
        held = {"model/w": (torch.zeros(placement.local_shape), placement)}
        with pytest.raises(CheckpointError) as refused:
            save(run, attempt=1, state=position(99), parts=held, mpi=mpi)
        told.append(str(refused.value))
    drifted = parts("tensor x data", mpi.rank, mpi.world_size)
    if mpi.rank == 3:
        for name in ("model/4 [9, 4]", "model/7 [5, 3]"):
            drifted[name][0].view(torch.int32)[0, :2] = drifted[name][0].view(torch.int32)[0, :2].flip(0)
    with pytest.raises(TrainingFailed) as failed:
        check_copies(drifted, mpi)
    return [*told, str(failed.value)]


def refused_when_damaged(mpi: MPIContext, run: RunDir) -> list[str]:
    """What this rank is told of a file that it did not read; and which checkpoint is the newest then."""
    damaged = run.checkpoint(len(LAYOUTS))
    torch.distributed.barrier()
    if mpi.rank == 0:
        flip(damaged / "rank-00002.safetensors", byte=900)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as refused:
        verify_together(damaged, mpi=mpi)
    newest, _ = newest_complete(run, mpi=mpi)
    assert newest is not None
    return [str(refused.value), str(newest.path)]


@pytest.fixture(scope="module")
def in_layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, list[list[str]]]:
    """A run with a checkpoint of the same tensors in each layout, and what each of the four ranks was told."""
    run = RunDir(tmp_path_factory.mktemp("layouts"))
    run.begin_attempt()
    return run, run_ranks(4, f"{__name__}:save_in_layouts", str(run.root))


@pytest.mark.mpi
def test_saved_in_any_layout_comes_back_in_any_other_on_any_number_of_ranks(
    in_layouts: tuple[RunDir, list[list[str]]],
) -> None:
    paths = [in_layouts[0].checkpoint(step) for step in range(1, len(LAYOUTS))]  # the last one is damaged by now
    for path, layout, size in itertools.product(paths, LAYOUTS, (1, 2, 3)):
        assert not wrongly_loaded(path, layout, size), f"{path.name} saved as {LAYOUTS[paths.index(path)]}"
    for path in paths:
        checkpoint = verify(path)
        state, loaded = load(checkpoint)
        assert {name: bits(tensor) for name, tensor in loaded.items()} == {n: bits(t) for n, t in model().items()}
        assert state == position(state.step)
        assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in model().items()}


def test_the_manifest_of_an_earlier_version_is_read_without_its_certificate(tmp_path: Path) -> None:
    plain = json.loads(Manifest(world_size=1, state=position(3), files=()).model_dump_json())
    former = plain | {"certificate": {"weights": "1" * 64, "previous": NO_DIGEST}}
    content = json.dumps(former).encode()
    content = content.replace(NO_DIGEST.encode(), hashlib.sha256(content).hexdigest().encode(), 1)
    (tmp_path / "manifest.json").write_bytes(content)
    found = read_manifest(tmp_path)
    assert found.state == position(3)
    assert b"certificate" not in serialise(found)


def test_times_and_metrics_are_not_a_part_of_the_position() -> None:
    later = {"metrics": {}, "evaluated_at": 3, "stop": StopState(trained_s=99.0)}
    assert position(3).model_copy(update=later).position == position(3).position
    worse = position(3).model_copy(update={"stop": StopState(evaluations_since=1)})
    assert worse.position != position(3).position


@pytest.mark.mpi
def test_each_rank_writes_one_file_and_no_byte_is_written_twice(in_layouts: tuple[RunDir, list[list[str]]]) -> None:
    total = sum(tensor.nbytes for tensor in model().values())
    for step in range(1, len(LAYOUTS) + 1):
        files = read_manifest(in_layouts[0].checkpoint(step)).files
        assert [file.name for file in files] == [f"rank-{rank:05d}.safetensors" for rank in range(4)]
        size = {"F32": 4, "BF16": 2, "I64": 8}
        shares = [sum(math.prod(e.shape) * size[e.dtype] for e in file.tensors.values()) for file in files]
        assert sum(shares) == total
        assert max(shares) - min(shares) <= max(tensor.nbytes for tensor in model().values()), shares


@pytest.mark.mpi
def test_safetensors_and_json_alone_are_enough_to_read_it(in_layouts: tuple[RunDir, list[list[str]]]) -> None:
    path = in_layouts[0].checkpoint(1 + LAYOUTS.index("fused x shards"))
    whole = json.loads((path / "manifest.json").read_text())["tensors"]
    name = "model/5 [12, 6]"
    assert whole[name] == {"dtype": "F32", "shape": [12, 6]}
    found = np.zeros(whole[name]["shape"], np.float32)
    for file in path.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            for key in opened.keys():  # noqa: SIM118
                if key.startswith(name):
                    (a, b, c, d) = map(int, re.findall(r"\d+", key.removeprefix(name)))
                    found[a:b, c:d] = opened.get_tensor(key)
    assert np.array_equal(found, model()[name].numpy())


@pytest.mark.mpi
def test_ranks_share_the_verification_and_all_hear_what_one_finds(in_layouts: tuple[RunDir, list[list[str]]]) -> None:
    run, told = in_layouts
    newest = run.checkpoint(len(LAYOUTS))
    assert [(found[0], int(found[1])) for found in told] == [(str(newest), 1 + 1)] * 4, "one file of four, and done"
    for found in told:
        assert "step-000000007 is damaged: rank-00002.safetensors has SHA-256" in found[-2]
        assert found[-1] == str(run.checkpoint(len(LAYOUTS) - 1))


@pytest.mark.mpi
def test_parts_that_do_not_fit_together_are_refused_by_all_ranks_and_nothing_is_left(
    in_layouts: tuple[RunDir, list[list[str]]],
) -> None:
    run, told = in_layouts
    assert told == [told[0]] * 4
    hole, overlapping, other, _ = told[0][2:6]
    assert "held by the ranks do not cover 1 tensors exactly once: model/w [3:4,0:2] is on no rank" in hole
    assert "model/w [2:3,0:2] is in different pieces, [0:3,0:2] on rank 0 and [2:4,0:2] on rank 1" in overlapping
    assert "model/w is F32 [8, 3] on rank 2, F32 [8, 2] on rank 0" in other
    assert names(run) == [f"step-{step:09d}" for step in range(1, len(LAYOUTS) + 1)]


@pytest.mark.mpi
def test_replicas_that_have_drifted_apart_are_named_by_tensor_box_and_rank(
    in_layouts: tuple[RunDir, list[list[str]]],
) -> None:
    assert (
        f"2 of {len(model())} tensors differ between ranks that must hold the same bits: "
        "model/4 [9, 4][4:9,0:4] on rank 2 is not that on rank 3; model/7 [5, 3][2:5,0:3] on rank 2 is not"
    ) in in_layouts[1][0][5]


@pytest.mark.parametrize("name", tensors())
def test_a_checksum_depends_on_the_elements_and_their_order_and_not_on_strides(name: str) -> None:
    tensor = tensors()[name].detach()
    copy = tensor.contiguous().clone()
    checksum = consistency._checksum(copy)
    assert consistency._checksum(tensor) == checksum, "a view has the checksum of its copy"
    content = copy.reshape(-1).view(torch.uint8)
    for byte in range(0, len(content), max(1, len(content) // 50)):
        content[byte] ^= 1 << byte % 8
        assert consistency._checksum(copy) != checksum, f"bit {byte % 8} of byte {byte}"
        content[byte] ^= 1 << byte % 8
    if len(content) >= 8:
        words = content[: len(content) // 4 * 4].view(torch.int32)
        words[:2] = words[:2].flip(0)
        assert consistency._checksum(copy) != checksum, "two words in each other's place"


@pytest.mark.parametrize(
    ("name", "box", "shape", "key"),
    [
        ("w", ((0, 4), (0, 2)), (4, 2), "w"),
        ("w", ((0, 4), (1, 2)), (4, 2), "w[0:4,1:2]"),
        ("w", (), (), "w"),
        ("w[0:3]", ((0, 6),), (6,), "w[0:3][0:6]"),
        ("w[0:3]", ((0, 2),), (6,), "w[0:3][0:2]"),
        ("w[]", (), (), "w[][]"),
        ("w[x]", ((0, 6),), (6,), "w[x]"),
        ("a\nb[1:2]", ((3, 4),), (6,), "a\nb[1:2][3:4]"),
    ],
)
def test_a_key_says_which_box_of_which_tensor_it_is(
    name: str, box: tuple[tuple[int, int], ...], shape: tuple[int, ...], key: str
) -> None:
    assert piece_key(name, box, shape) == key
    assert split_key(key) in [(name, box), (name, None)]


@pytest.mark.parametrize(
    ("boxes", "shape", "expected"),
    [
        ([()], (), None),
        ([], (), ((), 0)),
        ([], (0, 7), None),
        ([], (3,), (((0, 3),), 0)),
        ([((0, 3),)], (3,), None),
        ([((0, 1),), ((2, 3),)], (3,), (((1, 2),), 0)),
        ([((0, 2),), ((1, 3),)], (3,), (((1, 2),), 2)),
        ([((0, 3),), ((0, 3),)], (3,), (((0, 3),), 2)),
        ([((0, 1), (0, 4)), ((1, 2), (0, 2)), ((1, 2), (2, 4))], (2, 4), None),
        ([((0, 2), (0, 2)), ((0, 1), (2, 4)), ((1, 2), (2, 3))], (2, 4), (((1, 2), (3, 4)), 0)),
        ([((0, 2), (0, 3)), ((0, 1), (3, 4)), ((1, 2), (2, 4))], (2, 4), (((1, 2), (2, 3)), 2)),
    ],
)
def test_boxes_that_do_not_tile_a_tensor_are_found(boxes: Any, shape: tuple[int, ...], expected: Any) -> None:
    assert find_untiled(tuple(boxes), shape) == expected


# -- what is refused


def test_wanted_tensors_that_are_missing_or_of_another_shape_are_all_named(run: RunDir) -> None:
    path = verify(saved(run, 7))
    wanted = {name: Placement.full(shape) for name, shape in path.shapes.items()}
    wanted |= {f"model/absent{number}": Placement.full((2,)) for number in range(8)}
    wanted |= {"model/transposed": Placement.full((40, 30)).narrow(0, 0, 3), "model/half": Placement.full((3,))}
    with pytest.raises(CheckpointError) as refused:
        load(path, wanted)
    assert "of 20 tensors 8 missing: model/absent0; model/absent1; " in str(refused.value)
    assert "; 2 of another shape: model/half is [3, 30], the model's is [3]; " in str(refused.value)
    with pytest.raises(CheckpointError, match=r"model/transposed is \[30, 40\], the model's is \[40, 30\]"):
        load(path, {"model/transposed": wanted["model/transposed"]})
    assert load(path, {})[1] == {}


def test_a_checkpoint_in_which_all_tensors_are_whole_and_not_listed_loads_as_ever(run: RunDir) -> None:
    path = saved(run, 7)

    def older(manifest: Any) -> None:
        manifest["format"] = 1
        del manifest["tensors"]

    names = verify(path).shapes
    forge(path, older)
    assert verify(path).shapes == names
    assert same_bits(load(verify(path))[1])
    rows = Placement.full((40, 30)).narrow(0, 7, 9)
    assert torch.equal(
        load(verify(path), {"model/conv1.weight": rows})[1]["model/conv1.weight"],
        rows.take(tensors()["model/conv1.weight"])[0][1],
    )


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor], Any], object]) -> None:
    """Change the tensors of the only file, with a manifest that agrees but for what is changed in it after that."""
    file = path / "rank-00000.safetensors"
    tensors = safetensors.torch.load_file(file)
    listed = json.loads((path / "manifest.json").read_text())["tensors"]
    change(tensors, listed)
    safetensors.torch.save_file(tensors, file)
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    entries = {key: {"dtype": entry["dtype"], "shape": entry["shape"]} for key, entry in header.items()}
    entry = {
        "name": file.name,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "tensors": entries,
    }
    forge(path, lambda manifest: manifest.update(tensors=listed, files=[entry]))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda held, _: held.pop("w[2:4]"), r"damaged: w\[2:4\] is in none of its files"),
        (lambda held, _: held.update({"w[3:5]": torch.ones(2)}), r"w\[3:4\] is in 2 pieces \(rank-00000.safet"),
        (lambda held, _: held.update({"w[0:2]": held["w[0:2]"].int()}), r"w\[0:2\] as I32 \[2\], but w is F32 \[6\]"),
        (lambda held, _: held.update({"w[0:2]": torch.ones(3)}), r"w\[0:2\] as F32 \[3\], but w is F32 \[6\]"),
        (lambda held, _: held.update({"w[4:7]": torch.ones(3)}), r"w\[4:7\] as F32 \[3\], but w is F32 \[6\]"),
        (lambda held, _: held.update({"w[0:2,0:1]": torch.ones(2, 1)}), r"w\[0:2,0:1\] as F32 \[2, 1\], but w is"),
        (
            lambda held, _: held.update({"x": torch.ones(1)}),
            "rank-00000.safetensors holds x, which is not a tensor of it",
        ),
        (lambda _, listed: listed["w"].update(shape=[7]), r"w\[6:7\] is in none of its files"),
        (lambda _, listed: listed.update(v={"dtype": "F32", "shape": []}), "v is in none of its files"),
        (lambda _, listed: listed.clear(), r"holds w\[0:2\], which is not a tensor of it"),
    ],
)
def test_a_manifest_whose_pieces_do_not_make_up_the_tensors_is_refused(
    run: RunDir, change: Callable[[Any, Any], object], complaint: str
) -> None:
    pieces = Placement((6,), (((0, 2), (2, 4), (4, 6)),))
    path = save(run, attempt=1, state=position(7), parts={"w": (torch.arange(6.0), pieces)}, mpi=ALONE)
    rewrite(path, lambda held, listed: None)
    assert load(verify(path))[1]["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=complaint):
        verify(path)


def test_every_flipped_bit_is_found_and_its_file_named(run: RunDir) -> None:
    path = saved(run, 7)
    for file in path.iterdir():
        content = file.read_bytes()
        for byte in range(0, len(content), max(1, len(content) // 200)):
            flip(file, byte=byte, bit=byte % 8)
            with pytest.raises(CheckpointError, match=rf"step-000000007 is damaged: {file.name}"):
                verify(path)
            file.write_bytes(content)
    assert verify(path).info.step == 7


def shorten(path: Path) -> None:
    (path / "rank-00000.safetensors").write_bytes((path / "rank-00000.safetensors").read_bytes()[:-1])


def link(path: Path) -> None:
    (path / "rank-00000.safetensors").rename(path.parent / "elsewhere")
    (path / "rank-00000.safetensors").symlink_to(path.parent / "elsewhere")


def link_manifest(path: Path) -> None:
    (path / "manifest.json").rename(path.parent / "elsewhere.json")
    (path / "manifest.json").symlink_to(path.parent / "elsewhere.json")


def link_directory(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def replaced(path: Path, put: Callable[[Path], object]) -> None:
    """Put something else in the place of the manifest."""
    (path / "manifest.json").unlink()
    put(path / "manifest.json")


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (shorten, r"rank-00000.safetensors has [\d,]+ bytes, not [\d,]+"),
        (link, "rank-00000.safetensors is not a regular file"),
        (link_manifest, "manifest.json is a symbolic link"),
        (link_directory, "step-000000007 is a symbolic link, not a checkpoint"),
        (lambda path: replaced(path, lambda manifest: manifest.mkdir()), "manifest.json is not a regular file"),
        (lambda path: replaced(path, os.mkfifo), "manifest.json is not a regular file"),
        (lambda path: replaced(path, lambda manifest: manifest.symlink_to("/dev/zero")), "is a symbolic link"),
        (lambda path: os.truncate(path / "manifest.json", 1 << 40), "manifest.json has 1,099,511,627,776 bytes, more"),
        (lambda path: (path / "manifest.json").write_text("[" * 100_000), "Invalid JSON: recursion limit"),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json: Invalid JSON"),
        (lambda path: (path / os.fsdecode(b"\xff\xfe")).touch(), r"\\udcff\\udcfe does not belong to it"),
        (lambda path: (path / "rank-00000.safetensors").unlink(), "rank-00000.safetensors is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text(""), "manifest.json: Invalid JSON"),
        (lambda path: (path / "rank-00001.safetensors").touch(), "rank-00001.safetensors does not belong to it"),
        (lambda path: (path / "folder").mkdir(), "folder does not belong to it"),
        (shutil.rmtree, "there is no checkpoint .*step-000000007"),
    ],
)
def test_harm_is_named(run: RunDir, harm: Callable[[Path], object], complaint: str) -> None:
    path = saved(run, 7)
    harm(path)
    with pytest.raises(CheckpointError, match=complaint):
        verify(path)


def forge(path: Path, change: Callable[[Any], object]) -> None:
    """Rewrite the manifest, with a seal that is right."""
    forged = json.loads((path / "manifest.json").read_text()) | {"sha256": NO_DIGEST}
    change(forged)
    content = json.dumps(forged)
    seal = hashlib.sha256(content.encode()).hexdigest()
    (path / "manifest.json").write_text(content.replace(NO_DIGEST, seal, 1))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "rank-00000.safetensors/../../x", "rank-0"])
def test_a_manifest_leads_to_no_file_outside_of_its_directory(run: RunDir, name: str) -> None:
    path = saved(run, 7)
    forge(path, lambda manifest: manifest["files"][0].update(name=name))
    with pytest.raises(CheckpointError, match=r"manifest.json: files.0.name"):
        verify(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("world_size", True),
        ("world_size", -1),
        ("format", "2"),
        ("files", {}),
        ("files", [{"name": "rank-00000.safetensors\0", "bytes": 1, "sha256": NO_DIGEST, "tensors": {}}]),
        ("files", [{"name": "rank-00000.safetensors", "bytes": 10**30, "sha256": NO_DIGEST, "tensors": {}}]),
        ("tensors", {"w": {"dtype": "F32", "shape": [1 << 63]}}),
        ("tensors", {"w": {"dtype": "F32", "shape": [-1]}}),
        ("tensors", {"w\0": {"dtype": "F32", "shape": [2]}}),
        ("tensors", {"w[0:" + "9" * 5000 + "]": {"dtype": "F32", "shape": [2]}}),
        ("state", {"step": -1, "samples_seen": 0, "scaler": {}, "metrics": {}}),
        ("state", {"step": True, "samples_seen": 0, "scaler": {}, "metrics": {}}),
        ("state", []),
    ],
)
def test_a_manifest_with_impossible_values_is_refused_in_a_sentence(run: RunDir, key: str, value: Any) -> None:
    path = saved(run, 7)
    forge(path, lambda manifest: manifest.update({key: value}))
    with pytest.raises(CheckpointError, match=r"is damaged: "):
        verify(path)


def test_a_key_with_a_number_of_5000_digits_is_no_box(run: RunDir) -> None:
    assert split_key("w[0:" + "9" * 5000 + "]")[1] is None


def test_a_file_that_holds_other_tensors_than_the_manifest_says_is_refused(run: RunDir) -> None:
    path = saved(run, 7)
    forge(path, lambda manifest: manifest["files"][0]["tensors"].pop("model/empty"))
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors holds other tensors"):
        verify(path)


def test_a_fenced_attempt_commits_nothing(run: RunDir) -> None:
    saved(run, 1)
    run.begin_attempt()

    def overtaken() -> None:
        if run.current_attempt == 2:
            run.begin_attempt()

    with pytest.raises(Fenced, match="attempt 1 found attempt 2"):
        save(run, attempt=1, state=position(2), parts=whole(tensors()), mpi=ALONE)
    with pytest.raises(Fenced, match="attempt 2 found attempt 3"):
        save(run, attempt=2, state=position(2), parts=whole(tensors()), mpi=ALONE, beat=overtaken)
    assert names(run) == ["step-000000001"]


# -- which one a training goes on from


def newest_path(run: RunDir) -> Path | None:
    newest, _ = newest_complete(run, mpi=ALONE)
    return newest and newest.path


def test_training_goes_on_from_the_newest_that_is_whole(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_complete(run, mpi=ALONE)[0] is None
    paths = [saved(run, step) for step in (1, 2, 10, 1_000_000_000)]
    assert list_checkpoints(run) == paths
    assert newest_path(run) == paths[3]
    flip(paths[3] / "rank-00000.safetensors", byte=500)
    (paths[2] / "manifest.json").unlink()
    assert newest_path(run) == paths[1]
    assert "not used: checkpoint" in caplog.text


def test_neither_half_written_nor_half_deleted_ones_are_checkpoints(run: RunDir) -> None:
    path = saved(run, 1)
    for name in ("step-000000002.partial-001", "step-000000003.removed", "step-000000004.damaged", "step-5", "step-"):
        shutil.copytree(path, run.checkpoints / name)
    (run.checkpoints / "announced.json").touch()
    assert list_checkpoints(run) == [path]


def newest_of_own(mpi: MPIContext, root: str) -> str | None:
    """Rank 0 has steps 1 to 3 whole, rank 1 has 1 and 2 on a disk of its own, of which 2 is damaged."""
    run = RunDir(Path(root) / str(mpi.rank))
    run.begin_attempt()
    for step in (1, 2, 3)[: 3 - mpi.rank]:
        saved(run, step)
    if mpi.rank == 1:
        flip(run.checkpoint(2) / "rank-00000.safetensors", byte=500)
    newest, _ = newest_complete(run, mpi=mpi)
    return newest and newest.path.name


@pytest.mark.mpi
def test_ranks_that_see_different_directories_agree_on_the_oldest(tmp_path: Path) -> None:
    assert run_ranks(2, f"{__name__}:newest_of_own", str(tmp_path)) == ["step-000000001"] * 2


def test_a_step_made_again_leaves_the_whole_checkpoint_of_it_alone(run: RunDir) -> None:
    saved(run, 2, seed=1)
    run.begin_attempt()
    assert same_bits(load(verify(saved(run, 2, seed=2)))[1], seed=1)


def test_a_step_made_again_takes_the_place_of_a_damaged_checkpoint(run: RunDir) -> None:
    flip(saved(run, 2, seed=1) / "rank-00000.safetensors", byte=500)
    run.begin_attempt()
    assert same_bits(load(verify(saved(run, 2, seed=2)))[1], seed=2)
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
    assert verify(saved(run, 7)).info.metrics == position(7).metrics
    assert verify(save(run, attempt=1, state=later, parts=whole(tensors()), mpi=ALONE)).info.metrics == {}
    evaluated = later.evaluated({"evaluation/loss": 0.5}, CheckpointConfig()).model_copy(update={"step": 8})
    assert verify(save(run, attempt=1, state=evaluated, parts={}, mpi=ALONE)).info.metrics == {}, (
        "step 8 stays as it is"
    )


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
    assert [info.step for info in prunable(infos, keep_newest=keep_newest)] == expected


def test_a_removed_checkpoint_leaves_nothing(run: RunDir) -> None:
    saved(run, 1)
    (run.checkpoints / "step-000000001.removed").mkdir()  # of a removal that was cut off
    (run.checkpoints / "step-000000001.removed" / "manifest.json").touch()
    remove(run.checkpoint(1))
    assert names(run) == []


def test_what_the_manifest_says_adds_up(run: RunDir) -> None:
    path = saved(run, 7)
    info = verify(path).info
    assert info.bytes == sum(file.stat().st_size for file in path.iterdir())
    assert (info.step, info.path, info.best) == (7, path, False)
    listed = {name: entry for file in read_manifest(path).files for name, entry in file.tensors.items()}
    assert {name: list(entry.shape) for name, entry in listed.items()} == {
        n: list(t.shape) for n, t in tensors().items()
    }
    assert listed["model/half"].dtype == "BF16"


def test_differences_are_those_of_the_bits_in_every_kind_of_tensor(run: RunDir) -> None:
    first, same, other = (verify(saved(run, step, seed=seed)) for step, seed in ((1, 0), (2, 0), (3, 1)))
    assert differences(first, same) == []
    found = differences(first, other)
    assert found[0].startswith("model/conv1.weight: 1200 of 1200 elements, by up to ")
    assert found[3].startswith("model/half: 90 of 90 elements, by up to ")
