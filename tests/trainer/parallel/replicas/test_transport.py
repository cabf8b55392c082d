"""Gradients by MPI and as halves, on real ranks: sums, equal bits, overflow, overlap, silent peers."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.distributed import collectives
from onward.trainer.distributed.failures import lost_a_peer
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.events import Heartbeat
from onward.trainer.parallel.replicas import adasum
from onward.trainer.parallel.replicas import reducer as reduce
from onward.trainer.parallel.replicas import transport as sending
from onward.trainer.parallel.replicas.channels import Channel, check_device, open_channel
from onward.trainer.parallel.replicas.compression import add_decompressed, compress, compressed_bytes
from onward.trainer.parallel.replicas.transport import CommunicationStream, Summed
from onward.trainer.run.directory import RunDir
from tests.support.graphs import tiny_conv_net, tiny_transformer
from tests.support.ranks import run_ranks
from tests.support.reducing import reduced_norm
from tests.support.runs import (
    assert_equal_bits,
    final_tensors,
    make_run,
    tiny_images,
    tiny_text,
    train_run,
    train_until,
)
from tests.trainer.parallel.replicas.test_reducer import mesh_of, network, reducer_of, weights_of

ROUTES = [(transport, compression) for transport in ("torch", "mpi") for compression in ("none", "fp16", "bf16")]
ERROR = {"none": 1e-6, "fp16": 2**-10, "bf16": 2**-7}
"""Of a sum, relative to the greatest magnitude: one rounding of what is sent, one of what comes back."""


def world_channel(mpi: MPIContext, transport: str, *, timeout_s: float = 30) -> Channel:
    channel = open_channel(transport, [list(range(mpi.world_size))], timeout_s=timeout_s)
    assert channel is not None
    return channel


def values_of(rank: int, length: int, size: float = 1.0) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)) * size


LENGTHS_AND_SIZES = [(1, 1.0), (2, 1.0), (10_007, 1.0), (4096, 1e30), (4096, 1e-12), (4096, 1e-36), (33, 0.0)]


def routes(mpi: MPIContext) -> dict[str, Any]:
    """For each route, by case: digest, error, whether an overflow was seen; then the reducer on it, and overlap."""
    results = {}
    for transport, compression in ROUTES:
        channel = world_channel(mpi, transport)
        carrier = Summed(channel, compression=compression, device=mpi.device, timeout_s=30)
        sums = []
        for length, size in LENGTHS_AND_SIZES:
            mine, again = values_of(mpi.rank, length, size), values_of(mpi.rank, length, size)
            waits = [carrier.start(tensor, [length]) for tensor in (mine, again)]
            for wait in waits:
                wait()
            assert torch.equal(mine, again), "a resumed run has the same bits"
            exact = sum(values_of(rank, length, size).double() for rank in range(mpi.world_size))
            error = float((mine - exact).abs().max() / exact.abs().max().clamp(min=1e-300))
            sums.append([mine.tolist() if length < 50 else float(mine.double().square().sum()), error])
        seen = []
        for poison in (math.inf, -math.inf, math.nan):
            mine = values_of(mpi.rank, 100)
            mine[7] = poison if mpi.rank == 1 else 1.0
            carrier.start(mine, [100])()
            seen.append(not math.isfinite(float(mine[7])))
        carrier.close()
        results[f"{transport} {compression}"] = [sums, seen, by_reducer(mpi, transport, compression)]
    return results


def by_reducer(mpi: MPIContext, transport: str, compression: str) -> list[Any]:
    """The gradients of a network, each replica having its own row; buckets sent when the last gradient is made."""
    reduce.BUCKET_BYTES["gloo"] = (1, 1)
    module, sent = network(), []
    reducer = reducer_of(mpi, weights_of(module), config=ParallelConfig(transport=transport, compression=compression))
    module[0].weight.register_hook(lambda gradient: sent.append(reducer.num_sent))
    reducer.begin(1)
    module(torch.ones(1, 3) * mpi.rank).sum().backward()
    norm = reduced_norm(reducer)
    reducer.close()
    return [[parameter.grad.flatten().tolist() for parameter in module.parameters()], norm, sent]


@pytest.mark.mpi
def test_every_route_sums_with_the_same_bits_on_every_rank() -> None:
    results = run_ranks(3, "tests.trainer.parallel.replicas.test_transport:routes")
    assert results[0] == results[1] == results[2]
    module = network()
    module(torch.arange(3.0)[:, None] * torch.ones(3, 3)).sum().backward()
    for transport, compression in ROUTES:
        sums, seen, (gradients, norm, sent) = results[0][f"{transport} {compression}"]
        assert all(error <= ERROR[compression] for _, error in sums), (transport, compression, sums)
        assert sums[-1][0] == [0.0] * 33
        assert seen == [True] * 3, "infinity and NaN arrive as such"
        assert sent[0] >= 3, "of 5 buckets, sent before the first layer's gradient is made"
        for found, parameter in zip(gradients, module.parameters(), strict=True):
            wanted = parameter.grad.flatten()
            torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=4 * ERROR[compression])
        assert norm == pytest.approx(math.sqrt(sum(value**2 for part in gradients for value in part)), rel=1e-6)


def there_and_back(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wire, back = torch.empty(compressed_bytes(values.numel()), dtype=torch.uint8), torch.zeros_like(values)
    compress(values, dtype, wire)
    add_decompressed(wire, dtype, back)
    return back


def test_halves_keep_small_gradients_and_do_not_mend_overflows() -> None:
    for dtype, error in ((torch.float16, 2**-11), (torch.bfloat16, 2**-8)):
        for size in (1e-38, 1e-20, 1.0, 65504.0, 1e5, 3e38):
            values = torch.tensor([1.0, -0.3, 2**-20, 0.0]) * size
            back = there_and_back(values, dtype)
            torch.testing.assert_close(back[:3], values[:3], rtol=error, atol=1e-42)
            assert back[3] == 0
        whole = torch.tensor([1.0, 2.0, -1024.0])
        assert torch.equal(there_and_back(whole, dtype), whole), "powers of two round nothing"
        back = there_and_back(torch.tensor([1.0, math.inf, math.nan, -math.inf]), dtype)
        assert (back[0], back[1], back[3]) == (1.0, math.inf, -math.inf)
        assert back[2].isnan()
        assert there_and_back(torch.empty(0), dtype).numel() == 0


def test_mpi_between_gpus_is_refused() -> None:
    check_device("mpi", torch.device("cpu"))
    check_device("torch", torch.device("cuda:0"))
    with pytest.raises(ConfigError, match="carries gradients of CPU ranks, but this one is on cuda:0; use 'torch'"):
        check_device("mpi", torch.device("cuda:0"))


def silent_peer(mpi: MPIContext) -> list[Any]:
    """Rank 1 never sends: what rank 0 says, after how long, and what becomes of later jobs."""
    if mpi.rank == 1:
        world_channel(mpi, "mpi")
        time.sleep(3)
        return []
    said: list[Any] = []
    carrier = Summed(world_channel(mpi, "mpi", timeout_s=1), compression="none", device=mpi.device, timeout_s=10)
    waits = [carrier.start(torch.ones(5), [5]) for _ in range(2)]
    for wait in waits:
        since = time.monotonic()
        try:
            wait()
        except RuntimeError as error:
            said.append([str(error), lost_a_peer(error), time.monotonic() - since])
    return said


@pytest.mark.mpi
def test_a_silent_peer_is_given_up_on_after_the_timeout_and_so_is_all_that_follows() -> None:
    (first, after), nothing = run_ranks(2, "tests.trainer.parallel.replicas.test_transport:silent_peer")
    assert nothing == []
    assert first[:2] == ["Timed out waiting 1 s for other ranks to send their gradients", True]
    assert first[2] < 5
    assert after[:2] == first[:2]
    assert after[2] < 0.5, "not another timeout"


def single_threaded(mpi: MPIContext) -> str:
    from mpi4py import MPI

    MPI.Query_thread = lambda: MPI.THREAD_FUNNELED
    try:
        world_channel(mpi, "mpi")
    except RuntimeUnavailable as error:
        return str(error)
    return ""


@pytest.mark.mpi
def test_an_mpi_that_only_its_main_thread_may_call_is_refused() -> None:
    for said in run_ranks(2, "tests.trainer.parallel.replicas.test_transport:single_threaded"):
        assert said.startswith("this MPI grants thread level 1 and parallel.transport = 'mpi' needs 2")
        assert said.endswith("use parallel.transport = 'torch'")


def peer_that_stops_inside(mpi: MPIContext, how: str) -> None:
    """Rank 1 ends in the middle of a long series of sums; rank 0 goes on."""
    config = ParallelConfig(transport="mpi")
    module = torch.nn.Linear(1000, 1000)
    reducer = reducer_of(mpi, weights_of(module), config=config, timeout_s=3, mesh=mesh_of(mpi, data=2))
    for step in range(10_000):
        reducer.begin(1)
        module(torch.ones(1, 1000)).sum().backward()
        if mpi.rank == 1 and step == 20:
            os.kill(os.getpid(), getattr(signal, how))
        reducer.reduce()


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_peer_that_dies_or_stops_ends_the_job_within_seconds(how: str) -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, "tests.trainer.parallel.replicas.test_transport:peer_that_stops_inside", how)
    assert "did not finish in time" not in str(caught.value)
    if how == "SIGSTOP":
        assert "Timed out waiting 3" in str(caught.value)
    assert time.monotonic() - started < 20


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    "route", [{"transport": "mpi"}, {"transport": "mpi", "compression": "bf16"}, {"reduction": "adasum"}]
)
def test_killed_and_resumed_is_never_interrupted_on_every_route(tmp_path: Path, route: dict[str, str]) -> None:
    finals = []
    for name in ("undisturbed", "killed"):
        run = make_run(
            tmp_path / name,
            tiny_conv_net(),
            tiny_images(80),
            train={"global_batch_size": 9, "num_steps": 12, "evaluation_period": 0},
            parallel={"data": 3, **route},
            checkpoint={"period": 4},
        )
        if name == "killed":
            train_until(run, lambda event: event.step >= 6 and event.kind == "scalars", rank=1)
        assert train_run(run).step == 12
        finals.append(final_tensors(run))
    assert_equal_bits(*finals)


BESIDE_TENSOR_PARALLELISM: list[dict[str, Any]] = [{"compression": "fp16"}, {"reduction": "adasum_all"}]


def trained_in_both_ways(mpi: MPIContext, threaded: list[str], streamed: list[str]) -> list[Any]:
    """Train as a CPU sends, then as a GPU; return (operation, ranks in its group, thread) of all that the latter
    started, in order."""
    from onward.trainer.loop import train

    def train_all(folders: list[str]) -> None:
        for folder in folders:
            run, beats = RunDir(Path(folder)), Heartbeat(Path(folder) / "heartbeat")
            if mpi.rank == 0:
                run.begin_attempt()
            dist.barrier()
            train(run, mpi, attempt=1, heartbeat=beats, stop_requested=lambda: False)

    train_all(threaded)
    started: list[Any] = []

    def recorded(module: Any, name: str) -> None:
        call = getattr(module, name)

        def record(*arguments: Any, **named: Any) -> Any:
            group = named.get("group")
            size = group.size() if isinstance(group, dist.ProcessGroup) else mpi.world_size
            started.append([name, size, threading.current_thread().name])
            return call(*arguments, **named)

        setattr(module, name, record)

    for name in ("all_reduce", "all_gather", "all_to_all_single", "broadcast", "batch_isend_irecv"):
        recorded(dist, name)
    recorded(collectives, "all_reduce")
    for module in (sending, adasum):
        module.background = lambda device, timeout_s: CommunicationStream(device)  # type: ignore[attr-defined]
    train_all(streamed)
    return started


@pytest.mark.slow
@pytest.mark.mpi
def test_sent_from_the_thread_of_the_backward_pass_gradients_have_the_same_bits_and_ranks_one_order(
    tmp_path: Path,
) -> None:
    """NCCL needs one order of the operations of all groups, and two threads have none."""
    runs: dict[str, list[RunDir]] = {}
    for way in ("thread", "stream"):
        runs[way] = [
            make_run(
                tmp_path / f"{way}-{number}",
                tiny_transformer(),
                tiny_text(20),
                train={"global_batch_size": 4, "num_steps": 2, "evaluation_period": 0},
                parallel={"data": 2, "tensor": 2, **route},
            )
            for number, route in enumerate(BESIDE_TENSOR_PARALLELISM)
        ]
    roots = [[str(run.root) for run in runs[way]] for way in ("thread", "stream")]
    first, *others = run_ranks(4, "tests.trainer.parallel.replicas.test_transport:trained_in_both_ways", *roots)
    assert all(started == first for started in others)
    assert {thread for _, _, thread in first} == {"MainThread"}
    assert {name for name, _, _ in first} >= {"all_to_all_single", "batch_isend_irecv", "all_gather", "all_reduce"}
    for threaded, streamed in zip(runs["thread"], runs["stream"], strict=True):
        assert_equal_bits(final_tensors(streamed), final_tensors(threaded))
