"""Choose the device of the examination: the first GPU, or in a rehearsal the CPU."""

from __future__ import annotations

import os
import subprocess

import torch

REHEARSAL = os.environ.get("ONWARD_GPU_REHEARSAL") == "1"
"""Whether the CPU stands in the GPU's place, with tiny sizes."""
DEVICE = torch.device("cpu" if REHEARSAL else "cuda:0")


def _reason() -> str:
    if REHEARSAL:
        return ""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


REASON = _reason()
"""Why there is no device; empty when there is one."""


def available() -> bool:
    """Return whether there is a device to examine."""
    return not REASON


def synchronize() -> None:
    """Wait until the device has computed everything that was queued; on the CPU nothing is queued."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def describe() -> dict[str, str]:
    """Return {"device": its name, then the versions that belong to it}, or raise RuntimeError with the reason."""
    if REASON:
        raise RuntimeError(REASON)
    if REHEARSAL:
        return {"device": "CPU (rehearsal)"}
    properties = torch.cuda.get_device_properties(DEVICE)
    capability = f"{properties.major}.{properties.minor}"
    return {
        "device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability {capability}",
        "driver": _driver(),
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _driver() -> str:
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


if __name__ == "__main__":
    import json
    import sys

    try:
        print(json.dumps(describe()))
    except RuntimeError as error:
        sys.exit(str(error))
