"""The certificate of a checkpoint: the same for every layout of the same tensors, another for any change."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.trainer.checkpoint import tensor_sums
from onward.trainer.checkpoint.certificate import Certificate, digest_of_config, digest_of_position
from onward.trainer.checkpoint.manifest import read_manifest
from onward.trainer.checkpoint.save import save
from onward.trainer.checkpoint.tensor_sums import FileSums, added, box_sum
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.config.loading import build_config
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Box, Placement
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import StopState

ALONE = MPIContext(0, 1, 0, 1, "here", torch.device("cpu"))
STATE = TrainState(step=7, samples_seen=56, scaler={"scale": 1.0}, metrics={"evaluation/loss": 1.0})

Array = np.ndarray[Any, np.dtype[Any]]


def sum_of(array: Array, box: Box | None = None) -> tensor_sums.Sum:
    box = tuple((0, length) for length in array.shape) if box is None else box
    return box_sum(array.reshape(-1).view(np.int32), box)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (300,), (5, 9), (40, 30), (3, 4, 5, 2), (2, 1, 200)])
@pytest.mark.parametrize("block", [16, 1 << 16])
def test_the_sum_of_any_tiling_is_that_of_the_tensor(
    shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_sums, "BLOCK", block)
    tensor_sums._all_columns.cache_clear()
    random = np.random.default_rng(0)
    array = random.normal(size=shape).astype(np.float32)
    cuts = [sorted({0, length, *(int(each) for each in random.integers(0, length + 1, 2))}) for length in shape]
    total = (0, 0)
    for box in itertools.product(*(itertools.pairwise(each) for each in cuts)):
        piece = np.ascontiguousarray(array[tuple(slice(*each) for each in box)])
        total = added(total, sum_of(piece, box))
    assert total == sum_of(array)
    tensor_sums._all_columns.cache_clear()


def test_the_sum_does_not_depend_on_the_size_of_blocks_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.random.default_rng(0).normal(size=(37, 53)).astype(np.float32)
    expected = sum_of(array)
    monkeypatch.setattr(tensor_sums, "BLOCK", 20)
    tensor_sums._all_columns.cache_clear()
    for step in (4, 64, 400, 4000):
        content = memoryview(array.tobytes())
        sums = FileSums([("model/w", "F32", ((0, 37), (0, 53)))])
        for start in range(0, len(content), step):
            sums.update(content[start : start + step])
        assert sums.sums["weights"] == tensor_sums.times(expected, "model/w")
    tensor_sums._all_columns.cache_clear()


def test_any_flipped_bit_and_any_two_swapped_elements_change_the_sum() -> None:
    array = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    seen = {sum_of(array)}
    for element, bit in itertools.product(range(30), range(32)):
        changed = array.copy()
        changed.reshape(-1).view(np.uint32)[element] ^= np.uint32(1 << bit)
        seen.add(sum_of(changed))
    for one, other in itertools.combinations(range(30), 2):
        changed = array.copy().reshape(-1)
        changed[[one, other]] = changed[[other, one]]
        seen.add(sum_of(changed.reshape(6, 5)))
    for one, other in itertools.combinations(range(30), 2):  # two signs: the differences cancel most easily
        changed = array.copy().reshape(-1)
        changed[[one, other]] *= -1
        seen.add(sum_of(changed.reshape(6, 5)))
    assert len(seen) == 1 + 30 * 32 + 2 * math.comb(30, 2)


def certificate(
    root: Path,
    tensors: dict[str, torch.Tensor],
    *,
    state: TrainState = STATE,
    cut: bool = False,
    previous: str = "0" * 64,
) -> Certificate:
    """Save on one rank, in one piece or cut into two along the last dimension; return the certificate."""
    root.mkdir()
    run = RunDir(root)
    run.begin_attempt()
    parts = {}
    for name, tensor in tensors.items():
        placement = Placement.full(tensor.shape)
        if cut and tensor.shape and (length := tensor.shape[-1]) > 1:
            placement = Placement(
                placement.shape, (*placement.intervals[:-1], ((0, length // 2), (length // 2, length)))
            )
        parts[name] = (tensor, placement)
    found = read_manifest(save(run, attempt=1, state=state, parts=parts, mpi=ALONE, previous=previous)).certificate
    assert found is not None
    return found


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model/w": torch.randn(6, 4, generator=generator),
        "model/half": torch.randn(3, 5, generator=generator).bfloat16(),
        "model/flag": torch.tensor([True, False, True]),
        "model/count": torch.tensor(7),
        "model/empty": torch.zeros(0, 3),
        "optimizer/w/moment_1": torch.randn(6, 4, generator=generator),
        "average/w/ema": torch.randn(6, 4, generator=generator).double(),
    }


def test_every_part_of_the_certificate_changes_with_what_it_is_of_alone(tmp_path: Path) -> None:
    plain = certificate(tmp_path / "plain", tensors())
    assert certificate(tmp_path / "cut", tensors(), cut=True) == plain
    number = itertools.count()

    def changed(**values: Any) -> set[str]:
        made = {**tensors(), **values.pop("tensors", {})}
        other = certificate(tmp_path / str(next(number)), made, **values)
        return {key for key, value in other.model_dump().items() if value != getattr(plain, key)}

    assert changed(tensors={"model/w": tensors()["model/w"].flip(0)}) == {"weights"}
    assert changed(tensors={"model/empty": torch.zeros(0, 4)}) == {"weights"}
    assert changed(tensors={"model/zeros": torch.zeros(3)}) == {"weights"}
    assert changed(tensors={"model/count": torch.tensor(7, dtype=torch.int32)}) == {"weights"}
    assert changed(tensors={"average/w/ema": torch.zeros(6, 4).double()}) == {"optimizer"}
    assert changed(state=STATE.model_copy(update={"samples_seen": 55})) == {"position"}
    assert changed(previous="1" * 64) == {"previous"}


def test_times_and_metrics_are_not_a_part_of_the_position() -> None:
    later = {"metrics": {}, "evaluated_at": 7, "stop": StopState(trained_s=99.0)}
    assert digest_of_position(STATE.model_copy(update=later)) == digest_of_position(STATE)
    worse = STATE.model_copy(update={"stop": StopState(evaluations_since=1)})
    assert digest_of_position(worse) != digest_of_position(STATE)


def test_the_digest_of_the_configuration_is_of_what_decides_the_bits(tmp_path: Path) -> None:
    def digest(code: str = "a", **sections: Any) -> str:
        given = {"model": {"path": tmp_path / "m.onnx", "loss": "mse"}, "data": {"source": "digits"}, **sections}
        return digest_of_config(build_config({"train": {"num_steps": 9}, **given}), {str(tmp_path / "loss.py"): code})

    plain = digest()
    for same in (
        {"name": "other"},
        {"model": {"path": "/elsewhere/m.onnx", "loss": "mse"}},
        {"data": {"source": "/elsewhere/rows.csv"}},
        {"checkpoint": {"period": 5}},
        {"stop": {"max_hours": 1.0}},
        {"launch": {"retries": 0}},
        {"monitor": {"experiment": "other"}},
    ):
        assert digest(**same) == plain, same
    for other in (
        {"train": {"num_steps": 9, "seed": 1}},
        {"parallel": {"data": 2}},
        {"launch": {"threads_per_rank": 3}},
        {"optimizer": {"learning_rate": 0.5}},
        {"code": "b"},
    ):
        assert digest(**other) != plain, other
