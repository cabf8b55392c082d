"""In bf16 ZeRO gathers the weights of products in half the bytes, and trains with the bits of gathers in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.parallel.replicas.fsdp_groups import gathered_in_half
from tests.support.ranks import run_ranks
from tests.trainer.parallel.replicas.test_zero import (
    MODELS,
    Training,
    accumulate,
    micro_batches,
    reduced_norm,
    stage_of,
)

HERE = "tests.trainer.parallel.replicas.test_zero_in_half"
CASES = [(name, zero) for name in MODELS for zero in (1, 2, 3)]


class InHalf(nn.Module):
    """A module under autocast, its outputs in fp32, in which losses are computed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = self.module(*inputs)
        return tuple(output.float() for output in (outputs if isinstance(outputs, tuple) else (outputs,)))


class Gathered(TorchDispatchMode):
    """Count the bytes of gathered weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "_allgather_base_.default":
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def training_in_half(mpi: MPIContext, name: str, zero: int, half: torch.dtype | None) -> Training:
    training = Training(mpi, name, ParallelConfig.model_validate({"data": 2, "zero": zero}), compute="bf16", half=half)
    training.chain = InHalf(training.chain)  # type: ignore[assignment]
    return training


def alone_in_half(name: str) -> dict[str, Tensor]:
    """The gradients of the first step in one process, under autocast alone."""
    module = to_module(MODELS[name][0]())
    batches = [batch for replica in (0, 1) for batch in micro_batches(name, 0, replica)]
    accumulate(InHalf(module), batches, len(batches))
    return {name: weight.grad for name, weight in named_weights(module).items() if weight.grad is not None}


def compared(mpi: MPIContext) -> dict[str, Any]:
    """For each case whether two trainings have the same bits, the bytes that a step of either gathers, and the largest
    relative difference of the first gradients from those of one process."""
    found = {}
    for name, zero in CASES:
        full, half = (training_in_half(mpi, name, zero, dtype) for dtype in (None, torch.bfloat16))
        steps = [(full.step(), half.step()) for _ in range(2)]
        same = [one == other for one, other in steps]
        seen, wanted = steps[0][1].gradients, alone_in_half(name)
        assert seen.keys() == wanted.keys()
        far = max(float((seen[key] - wanted[key]).abs().max() / wanted[key].abs().max()) for key in wanted)
        sizes = []
        for training in (full, half):
            training.engine.begin(1)
            with Gathered() as gathered:
                accumulate(training.chain, micro_batches(name, 5, mpi.rank), 1)
            reduced_norm(training.engine)
            sizes.append(gathered.bytes)
        found[f"{name} {zero}"] = [same, sizes, far]
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, f"{HERE}:compared", timeout_s=120)


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "zero"), CASES)
@pytest.mark.slow
def test_gathers_in_half_precision_train_with_the_bits_of_gathers_in_fp32(
    ranks: list[dict[str, Any]], name: str, zero: int
) -> None:
    for found in ranks:
        same, _, far = found[f"{name} {zero}"]
        assert same == [True, True]
        assert far < 1e-5, "one process under autocast"


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "zero"), CASES)
def test_weights_that_only_products_read_are_gathered_in_half_the_bytes(
    ranks: list[dict[str, Any]], name: str, zero: int
) -> None:
    (stage, _) = stage_of(name, compute="bf16")
    halves = sum(weight.nbytes for weight in gathered_in_half(stage.chain))
    for found in ranks:
        in_full, in_half = found[f"{name} {zero}"][1]
        passes = 2 if zero == 3 else 1  # ZeRO 3 gathers again in the backward pass
        saved = passes * halves / 2
        # what does not divide over the ranks is padded
        assert in_full - in_half == saved if name != "uneven" else in_full - in_half > saved


def test_norms_tied_embeddings_and_what_two_units_read_differently_stay_in_fp32() -> None:
    (stage, weights) = stage_of("tied", compute="bf16")
    halves = gathered_in_half(stage.chain)
    names = {weight.name for weight in weights if weight.tensor in halves}
    assert {name.rsplit(".", 2)[-2] for name in names} == {"c_attn", "c_proj", "c_fc"}
    assert len(names) == 16, "weights and biases of four products in two layers"
    assert not gathered_in_half(stage_of("tied")[0].chain), "nothing is cast in fp32"
