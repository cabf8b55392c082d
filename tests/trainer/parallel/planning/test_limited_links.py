"""The times of collectives against real ones, between hosts whose network cards send at a known rate (`tc tbf`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onward.trainer.parallel.planning.cluster import Collective, Group, Links, collective_s
from tests.support.machines import NETWORK, machines, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(not shutil.which("tc", path=f"{os.environ['PATH']}:/usr/sbin"), reason="it needs tc"),
]

RATE = 10e6
"""Bytes in a second, in one direction: slow enough that nothing else takes a part of the time."""
NUM_BYTES = 12 << 20
TOLERANCE = 0.3
"""Headers of packets take 5 %, a bucket that is full at first gives some back; the rest is a busy machine."""
PROGRAM = """
import json, sys, time, torch, torch.distributed as dist
rank, ranks, address, size = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"tcp://{address}:29555", rank=rank, world_size=ranks)
tensor = torch.ones(size // 4)
def seconds(call):
    found = []
    for _ in range(3):
        dist.barrier()
        begun = time.perf_counter()
        call()
        dist.barrier()
        found.append(time.perf_counter() - begun)
    return min(found)
def message():
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0) if rank == 1 else None
found = {"all-reduce": seconds(lambda: dist.all_reduce(tensor)), "message": seconds(message)}
if rank == 0:
    print(json.dumps(found), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_over_a_limited_link_take_the_time_that_is_estimated(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    links = Links(local_bytes_per_s=1e12, local_latency_s=0.0, network_bytes_per_s=RATE, network_latency_s=0.0)
    with machines(tmp_path / "hosts", ranks) as cluster:
        for number in range(ranks):
            rate = f"{int(8 * RATE)}bit"
            limit = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "32kb", "latency", "1s"]
            subprocess.run([*cluster.on(f"h{number}"), *limit], check=True)
        program = [sys.executable, str(tmp_path / "program.py")]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        logs = [tmp_path / f"{number}.log" for number in range(ranks)]
        started = [
            cluster.start(
                [*program, str(number), str(ranks), f"{NETWORK}.10", str(NUM_BYTES)],
                environment,
                logs[number],
                host=f"h{number}",
            )
            for number in range(ranks)
        ]
        for process in started:
            assert process.wait(600) == 0, [log.read_text() for log in logs]
    measured = json.loads(logs[0].read_text().splitlines()[-1])
    kinds: tuple[Collective, ...] = ("all-reduce", "message")
    for kind in kinds:
        estimated = collective_s(kind, NUM_BYTES, Group(ranks, ranks), links)
        assert abs(measured[kind] / estimated - 1) < TOLERANCE, (kind, measured[kind], estimated)
