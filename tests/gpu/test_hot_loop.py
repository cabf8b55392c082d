"""The training loop on the device: one wait in a step, copies that run beside it, sums and losses as on the CPU."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.trainer.data.batches.device_copies import DeviceCopies
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, Weight
from onward.trainer.model.losses import chunked_loss
from onward.trainer.parallel.replicas.norms import local_squares
from tests.gpu import ranks
from tests.gpu.device import DEVICE, REASON, REHEARSAL, available
from tests.gpu.measure import Enough, run_of, train_until_enough
from tests.support import graphs
from tests.support.runs import tiny_images, tiny_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason=REASON)]

Record = Callable[[str, object], None]
COUNTED_STEP = 4
MODELS = {
    "transformer": (graphs.tiny_transformer, tiny_text),
    "conv net with BatchNorm": (graphs.tiny_conv_net_with_batch_norm, tiny_images),
}


def waits_of_a_step(mpi: MPIContext, name: str, compute: str, result: str) -> None:
    """Write where the host waits for the device in one step, as torch reports it: a line for each wait."""
    model, columns = MODELS[name]

    def at_step(step: int) -> None:
        if DEVICE.type == "cuda" and step >= COUNTED_STEP:
            torch.cuda.set_sync_debug_mode("warn" if step == COUNTED_STEP else "default")
        if step > COUNTED_STEP:
            raise Enough

    train = {"gradient_accumulation_steps": 4, "global_batch_size": 16}
    with (
        run_of(model(), columns(16), train=train, precision={"compute": compute}) as run,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        train_until_enough(run, mpi, at_step)
    waits = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    Path(result).write_text(json.dumps([f"{each.filename}:{each.lineno}" for each in waits]))


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_host_waits_for_the_device_once_in_a_step_of_four_micro_batches(
    name: str, compute: str, tmp_path: Path, record_property: Record
) -> None:
    result = tmp_path / "waits.json"
    ranks.call(1, f"{__name__}:waits_of_a_step", name, compute, str(result), folder=tmp_path)
    waits = json.loads(result.read_text())
    record_property("waits", waits)
    assert len(waits) == (0 if REHEARSAL else 1), "for the totals of the step, in norms.sum_over_world"


def test_copies_are_complete_before_they_are_read_and_are_not_overwritten_while_they_are() -> None:
    """Kernels that take long before and behind the copies: a wait or an owner that were missing would show."""
    copies = DeviceCopies(DEVICE)
    sums: list[Tensor] = []
    for number in range(20):
        batch = [copies.start(torch.full((1 << 20,), float(number))) for _ in range(3)]
        copies.finish(batch)
        if DEVICE.type == "cuda":
            torch.cuda._sleep(5_000_000)  # the batch is dropped long before its memory has been read
        sums += [tensor.sum() for tensor in batch]
        del batch
    assert torch.stack(sums).tolist() == [float(number << 20) for number in range(20) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_chunked_cross_entropy_is_that_of_an_fp32_copy_and_takes_two_bytes_per_logit(
    dtype: torch.dtype, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, classes = (64, 1000) if REHEARSAL else (8192, 50257)
    monkeypatch.setitem(chunked_loss.CHUNK, "cuda", 1 << 22)
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (rows,), generator=random).to(DEVICE)
    labels[5:9] = -100
    drawn = torch.randn(rows, classes, generator=random).to(DEVICE, dtype)
    found = []
    for loss in (
        lambda z: F.cross_entropy(z.float(), labels, reduction="sum"),
        lambda z: chunked_loss.cross_entropy(z, labels, -100),
    ):
        logits = drawn.clone().requires_grad_()
        before = _peak(reset=True)
        value = loss(logits)
        (value * 0.25).backward()
        found.append((value.detach(), logits.grad, (_peak() - before) / logits.numel()))
    (wanted, gradient, bytes_of_torch), (value, ours, bytes_of_ours) = found
    record_property("bytes_per_logit", {"an fp32 copy": bytes_of_torch, "chunks": bytes_of_ours})
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(ours, gradient, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert REHEARSAL or bytes_of_ours < 2.5


def _peak(*, reset: bool = False) -> int:
    if DEVICE.type != "cuda":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats(DEVICE)
        return torch.cuda.memory_allocated(DEVICE)
    return torch.cuda.max_memory_allocated(DEVICE)


def test_the_squared_norm_is_that_of_the_cpu_to_nine_digits(record_property: Record) -> None:
    shapes = [(), (7,), (0,), (300, 400), (1 << 14,) if REHEARSAL else (1 << 24,)]
    gradients = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
    weights = []
    for number, gradient in enumerate(gradients):
        tensor = torch.zeros_like(gradient, device=DEVICE)
        tensor.grad = gradient.to(DEVICE)
        weights.append(Weight(str(number), tensor, Placement.full(tensor.shape), True))
    found = float(local_squares(weights, DEVICE))
    record_property("relative_error", abs(found / exact - 1))
    assert found == pytest.approx(exact, rel=1e-7 if REHEARSAL else 1e-9)
