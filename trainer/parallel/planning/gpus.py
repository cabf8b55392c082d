"""What NVIDIA's data sheets say of GPUs, by the names that torch gives them. Without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Peak(NamedTuple):
    """Peak rates of a GPU, by its data sheet."""

    fp32: float
    """TFLOP/s."""
    tf32: float
    half: float
    link: float
    """GB/s in one direction to another GPU of its host: NVLink, or PCIe where the card is usually without."""
    memory: int
    """GiB; of a card that is sold with several sizes the smallest."""


# NVIDIA's data sheets, https://www.nvidia.com/en-us/data-center/ (h200, h100, a100, ..., hgx, gb200-nvl72) and
# https://www.nvidia.com/en-us/products/workstations/; half of the rates that one names with sparsity only. Of GeForce
# the architecture papers of GA102, Ada and RTX Blackwell: half precision with sums in fp32. Not every row has been
# compared with its sheet yet.
GPUS: dict[str, Peak] = {
    "GB300": Peak(80, 1250, 2500, 900, 288),
    "GB200": Peak(80, 1250, 2500, 900, 186),
    "B300": Peak(75, 1100, 2250, 900, 288),
    "B200": Peak(75, 1100, 2250, 900, 180),
    "H200": Peak(67, 494, 989, 450, 141),
    "GH200": Peak(67, 494, 989, 450, 96),
    "H800": Peak(67, 494, 989, 200, 80),
    "H100 PCIe": Peak(51, 378, 756, 64, 80),
    "H100 NVL": Peak(60, 417, 835, 300, 94),
    "H100": Peak(67, 494, 989, 450, 80),
    "A100-PCIE": Peak(19.5, 156, 312, 32, 40),
    "A100 80GB PCIe": Peak(19.5, 156, 312, 32, 80),
    "A100": Peak(19.5, 156, 312, 300, 40),
    "A800": Peak(19.5, 156, 312, 200, 80),
    "A40": Peak(37.4, 74.8, 149.7, 32, 48),
    "A30": Peak(10.3, 82, 165, 32, 24),
    "A10": Peak(31.2, 62.5, 125, 32, 24),
    "A2": Peak(4.5, 9, 18, 8, 16),
    "L40S": Peak(91.6, 183, 362, 32, 48),
    "L40": Peak(90.5, 90.5, 181, 32, 48),
    "L4": Peak(30.3, 60, 121, 32, 24),
    "V100S": Peak(16.4, 16.4, 130, 16, 32),
    "V100-PCIE": Peak(14, 14, 112, 16, 16),
    "V100": Peak(15.7, 15.7, 125, 150, 16),
    "T4": Peak(8.1, 8.1, 65, 16, 16),
    "RTX PRO 6000 Blackwell Workstation Edition$": Peak(125, 250, 500, 64, 96),
    "RTX 6000 Ada Generation$": Peak(91.1, 182.1, 364.2, 32, 48),
    "RTX 5000 Ada Generation$": Peak(65.3, 130.6, 261.1, 32, 32),
    "RTX A6000$": Peak(38.7, 77.4, 154.8, 32, 48),
    "RTX A5000$": Peak(27.8, 55.6, 111.1, 32, 24),
    "RTX A4000$": Peak(19.2, 38.3, 76.7, 32, 16),
    "RTX 5090$": Peak(104.8, 104.8, 209.5, 64, 32),
    "RTX 4090$": Peak(82.6, 82.6, 165.2, 32, 24),
    "RTX 3090$": Peak(35.6, 35.6, 71.2, 32, 24),
}
"""Words of the name that torch.cuda.get_device_properties reports, $ = its end -> peak rates. The first one counts."""

WITHOUT_BF16 = ("V100S", "V100-PCIE", "V100", "T4")
"""GPUs older than Ampere."""


def known_gpu(name: str) -> str | None:
    """Return the row of the table that a name belongs to; None if there is none."""
    return next((key for key in GPUS if re.search(rf"\b{key}(?!\w)", name, re.IGNORECASE)), None)


def gpu_problems(name: str) -> Iterator[str]:
    """Yield a sentence, with all names, for the name of a GPU that is not in the table."""
    if known_gpu(name) is None:
        known = ", ".join(key.rstrip("$") for key in GPUS)
        yield (
            f"--device {name}: the rates of this GPU are not known. Known are {known}. A size in the name counts, "
            "as in A100 80GB"
        )


def has_bf16(name: str) -> bool:
    """Return whether a GPU of the table computes in bf16 and TF32."""
    return known_gpu(name) not in WITHOUT_BF16


def memory_gib(name: str, peak: Peak) -> int:
    """Return the memory of a GPU: the size in its name, else that of the table."""
    said = re.search(r"(\d+) ?GB", name)
    return int(said[1]) if said else peak.memory
