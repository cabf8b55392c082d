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

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.parallel.planning.plan_record import Reserve

MiB = 2**20


class Peak(NamedTuple):
    """Peak rates of a GPU, by its data sheet."""

    fp32: float
    """TFLOP/s."""
    tf32: float
    half: float
    link: float
    """GB/s in one direction to another GPU of its host: NVLink, or PCIe where the card is usually without."""


# NVIDIA's data sheets, https://www.nvidia.com/en-us/data-center/ (h200, h100, a100, ..., hgx, gb200-nvl72) and
# https://www.nvidia.com/en-us/products/workstations/; half of the rates that one names with sparsity only. Of GeForce
# the architecture papers of GA102, Ada and RTX Blackwell: half precision with sums in fp32. Not every row has been
# compared with its sheet yet.
GPUS: dict[str, Peak] = {
    "GB300": Peak(80, 1250, 2500, 900),
    "GB200": Peak(80, 1250, 2500, 900),
    "B300": Peak(75, 1100, 2250, 900),
    "B200": Peak(75, 1100, 2250, 900),
    "H200": Peak(67, 494, 989, 450),
    "GH200": Peak(67, 494, 989, 450),
    "H800": Peak(67, 494, 989, 200),
    "H100 PCIe": Peak(51, 378, 756, 64),
    "H100 NVL": Peak(60, 417, 835, 300),
    "H100": Peak(67, 494, 989, 450),
    "A100-PCIE": Peak(19.5, 156, 312, 32),
    "A100 80GB PCIe": Peak(19.5, 156, 312, 32),
    "A100": Peak(19.5, 156, 312, 300),
    "A800": Peak(19.5, 156, 312, 200),
    "A40": Peak(37.4, 74.8, 149.7, 32),
    "A30": Peak(10.3, 82, 165, 32),
    "A10": Peak(31.2, 62.5, 125, 32),
    "A2": Peak(4.5, 9, 18, 8),
    "L40S": Peak(91.6, 183, 362, 32),
    "L40": Peak(90.5, 90.5, 181, 32),
    "L4": Peak(30.3, 60, 121, 32),
    "V100S": Peak(16.4, 16.4, 130, 16),
    "V100-PCIE": Peak(14, 14, 112, 16),
    "V100": Peak(15.7, 15.7, 125, 150),
    "T4": Peak(8.1, 8.1, 65, 16),
    "RTX PRO 6000 Blackwell Workstation Edition$": Peak(125, 250, 500, 64),
    "RTX 6000 Ada Generation$": Peak(91.1, 182.1, 364.2, 32),
    "RTX 5000 Ada Generation$": Peak(65.3, 130.6, 261.1, 32),
    "RTX A6000$": Peak(38.7, 77.4, 154.8, 32),
    "RTX A5000$": Peak(27.8, 55.6, 111.1, 32),
    "RTX A4000$": Peak(19.2, 38.3, 76.7, 32),
    "RTX 5090$": Peak(104.8, 104.8, 209.5, 64),
    "RTX 4090$": Peak(82.6, 82.6, 165.2, 32),
    "RTX 3090$": Peak(35.6, 35.6, 71.2, 32),
}
"""Words of the name that torch.cuda.get_device_properties reports, $ = its end -> peak rates. The first one counts."""
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

    flops_per_byte: float
    """FLOPs in the time of sending a byte of a message of a convolution to a rank of the same host."""

    def pass_s(self, flops: float, calls: int) -> float:
        """Return the time of computing; see above."""
        times = (flops / self.flops_per_s, calls * self.call_s)
        return max(times) if self.type == "cuda" else sum(times)


# fitted to 30 layouts of two ranks on two cores (tests/bench/auto_choice.py). A message takes so long because a rank
# waits until the other one comes to it. In messages of 64 KiB gloo sends 0.4 GB/s.
CPU = Device("CPU", "cpu", 80e9, 1e9, 0.4e9, message_s=3e-3, call_s=10e-6, flops_per_byte=100e9 / 0.4e9)


def describe(device: torch.device, compute: str) -> Device:
    """Return what is known of a device of this process. compute: `precision.compute`, resolved."""
    if device.type != "cuda":
        return CPU
    return gpu(torch.cuda.get_device_properties(device).name, compute)


def gpu(name: str, compute: str) -> Device:
    """Return what is known of a GPU of this name; of an unknown one, what is known of TYPICAL."""
    known = _known(name)
    peak = GPUS[known or TYPICAL]
    return Device(
        name=name if known else f"{name} (taken for {TYPICAL})",
        type="cuda",
        flops_per_s=_rate(peak, compute) * 1e12 * COMPUTE_SHARE,
        link_bytes_per_s=peak.link * 1e9 * LINK_SHARE,
        network_bytes_per_s=min(peak.link, NETWORK) * 1e9 * LINK_SHARE,
        # NCCL's latency within a host, and Python, dispatcher and launches of about three kernels
        message_s=20e-6,
        call_s=30e-6,
        flops_per_byte=_rate(peak, compute) * 1e12 * COMPUTE_SHARE / (peak.link * 1e9 * LINK_SHARE),
    )


def peak_flops_per_s(name: str, compute: str) -> float | None:
    """Return the peak rate of a GPU in this type by its data sheet; None for one that is not in the table.

    A part of a GPU (MIG) is not known: its name says how much memory it has, and its rate is no fixed share.
    """
    known = _known(name)
    return None if known is None or " MIG " in name else _rate(GPUS[known], compute) * 1e12


def _known(name: str) -> str | None:
    return next((key for key in GPUS if re.search(rf"\b{key}(?!\w)", name)), None)


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
