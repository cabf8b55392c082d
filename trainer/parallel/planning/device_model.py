"""Describe the device of a rank for the planner: how fast it computes, sends and starts operators, and what memory it
needs beside the tensors of the model.

    time of a pass on a CPU    FLOPs / rate + operators x call_s      one after the other
    time of a pass on a GPU    max(FLOPs / rate, operators x call_s)  the host starts operators while the GPU computes
    time of the messages       bytes / link + messages x message_s

The numbers of a GPU are those of NVIDIA's data sheets (peak rates without sparsity; the link in one direction), times
the shares below. They rank layouts against each other; they do not predict the time of a step. MFU is relative to the
peak rates themselves (throughput.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.parallel.planning.cluster import Cluster, Links
from onward.trainer.parallel.planning.gpus import GPUS, Peak, known_gpu, memory_gib
from onward.trainer.parallel.planning.plan_record import Reserve

MiB = 2**20


TYPICAL = "A100"
"""Taken for a GPU that is not in the table, and for decisions that ranks with different GPUs must make alike."""
COMPUTE_SHARE = 0.6
LINK_SHARE = 0.8
"""What large matrix products, and large collectives of NCCL, reach of the peak."""
NETWORK = 25.0
"""GB/s of one GPU to another host: one network card of 200 Gbit/s for each GPU."""


@dataclass(frozen=True)
class Device:
    """What one rank computes on."""

    name: str
    type: str
    """cpu or cuda."""
    flops_per_s: float
    link_bytes_per_s: float
    """To a rank of the same host."""
    network_bytes_per_s: float
    """To a rank of another host."""
    message_s: float
    """Time of a message, however small."""
    call_s: float
    """Time of calling one node's operators, forward and backward, however small."""
    local_latency_s: float
    """Of one hop of a collective inside a host."""
    network_latency_s: float
    """Of one hop to another host."""
    copies: float
    """Times that the bytes of gradients and gathered weights are moved: on a CPU the copies into and out of buckets
    take the cores that compute."""
    memory_bytes: int
    """0 = that of this machine."""

    flops_per_byte: float
    """FLOPs in the time of sending a byte of a message of a convolution to a rank of the same host."""

    def pass_s(self, flops: float, calls: int) -> float:
        """Return the time of computing; see above."""
        times = (flops / self.flops_per_s, calls * self.call_s)
        return max(times) if self.type == "cuda" else sum(times)

    @property
    def links(self) -> Links:
        """Return how fast ranks send to each other."""
        return Links(self.link_bytes_per_s, self.local_latency_s, self.network_bytes_per_s, self.network_latency_s)


# fitted to 30 layouts of two ranks on two cores (tests/bench/auto_choice.py). A message takes so long because a rank
# waits until the other one comes to it. In messages of 64 KiB gloo sends 0.4 GB/s.
CPU = Device(
    "CPU", "cpu", 80e9, 1e9, 0.4e9,
    message_s=3e-3, call_s=10e-6, flops_per_byte=100e9 / 0.4e9,
    local_latency_s=0.0, network_latency_s=50e-6, copies=2.0, memory_bytes=0,
)  # fmt: skip


def describe(device: torch.device, compute: str) -> Device:
    """Return what is known of a device of this process. compute: `precision.compute`, resolved."""
    if device.type != "cuda":
        return CPU
    return gpu(torch.cuda.get_device_properties(device).name, compute)


def gpu(name: str, compute: str) -> Device:
    """Return what is known of a GPU of this name; of an unknown one, what is known of TYPICAL."""
    known = known_gpu(name)
    peak = GPUS[known or TYPICAL]
    flops_per_s = _rate(peak, compute) * 1e12 * COMPUTE_SHARE
    link_bytes_per_s = peak.link * 1e9 * LINK_SHARE
    return Device(
        name=name if known else f"{name} (taken for {TYPICAL})",
        type="cuda",
        flops_per_s=flops_per_s,
        link_bytes_per_s=link_bytes_per_s,
        network_bytes_per_s=min(peak.link, NETWORK) * 1e9 * LINK_SHARE,
        # NCCL's latency within a host, and Python, dispatcher and launches of about three kernels
        message_s=20e-6,
        call_s=30e-6,
        flops_per_byte=flops_per_s / link_bytes_per_s,
        # of NCCL's protocol for short messages (LL), by its own table of latencies (src/graph/tuning.cc)
        local_latency_s=0.6e-6,
        network_latency_s=2.7e-6,
        copies=1.0,
        memory_bytes=memory_gib(name, peak) << 30,
    )


def planned_device(cluster: Cluster, device: torch.device, compute: str) -> Device:
    """Return the GPU that a cluster names, else this process's device, with the network of the cluster if given."""
    found = gpu(cluster.gpu, compute) if cluster.gpu else describe(device, compute)
    return replace(
        found,
        # what is given is the rate of the card, of which collectives reach a share
        network_bytes_per_s=cluster.network_bytes_per_s * LINK_SHARE or found.network_bytes_per_s,
        network_latency_s=cluster.latency_s or found.network_latency_s,
    )


def peak_flops_per_s(name: str, compute: str) -> float | None:
    """Return the peak rate of a GPU in this type by its data sheet; None for one that is not in the table.

    A part of a GPU (MIG) is not known: its name says how much memory it has, and its rate is no fixed share.
    """
    known = known_gpu(name)
    return None if known is None or " MIG " in name else _rate(GPUS[known], compute) * 1e12


def _rate(peak: Peak, compute: str) -> float:
    return {"fp32": peak.fp32, "tf32": peak.tf32}.get(compute, peak.half)


def typical(device_type: str, compute: str) -> Device:
    """Return a description that depends on the configuration alone, and so is the same on all ranks."""
    return CPU if device_type == "cpu" else gpu(TYPICAL, compute)


# -- memory that is not the model's

CONTEXT_BYTES = 640 * MiB
"""A process's CUDA context with the kernels that it has loaded: about 520 MiB on an H100, less on older GPUs; kernels
are loaded when they are first called (CUDA_MODULE_LOADING=LAZY)."""
WORKSPACE_BYTES = 128 * MiB + 256 * MiB
"""cuBLAS and cuBLASLt, 32 MiB each in the main thread and in autograd's (recommended for Hopper,
https://docs.nvidia.com/cuda/cublas/#cublassetworkspace); and cuDNN's, for which there is no bound: 256 MiB."""
COMMUNICATOR_BYTES = 688 * MiB
"""NCCL's buffers of one communicator, measured on 4 A100 with NVLink (https://github.com/NVIDIA/nccl/issues/964): 32
channels x 2 connections x 10 MiB for the three protocols (NCCL_BUFFSIZE is 4 MiB of it), and what was not explained."""
FRAGMENTATION_SHARE = 0.05
"""Of all memory: gaps between the blocks of torch's allocator, which `expandable_segments` keeps small."""


def reserve(parallel: ParallelConfig, device_type: str, limit_bytes: int) -> Reserve:
    """Return what a rank with `limit_bytes` keeps free for what is not the model's; nothing on a CPU.

    It depends on the configuration alone, so training and planning decide alike.
    """
    if device_type != "cuda":
        return Reserve()
    return Reserve(
        context=CONTEXT_BYTES,
        workspaces=WORKSPACE_BYTES,
        communicators=_num_communicators(parallel) * COMMUNICATOR_BYTES,
        fragmentation=int(FRAGMENTATION_SHARE * limit_bytes),
    )


def _num_communicators(parallel: ParallelConfig) -> int:
    """Return the number of NCCL communicators of one rank. NCCL takes memory for one when it is first used."""
    # the world's is used by the sum of each step, in a world of one rank too
    hybrid = parallel.zero and 0 < parallel.shard < parallel.data
    used = (parallel.data > 1, parallel.data > 1 and parallel.zero, hybrid, parallel.tensor > 1, parallel.pipeline > 1)
    return 1 + sum(map(bool, used))
