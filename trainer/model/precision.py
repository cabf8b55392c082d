"""Compute the forward pass in bf16 or fp16 under torch's autocast. The loss scale is in optim/loss_scaler.py."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from onward.trainer.config.sections.training import PrecisionConfig

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass: matrix products and convolutions compute in `precision.compute`.

    `auto` must have been resolved (distributed/arithmetic.py). In fp32 and tf32 nothing is cast.
    """
    assert config.compute != "auto", "precision.compute has not been resolved for this device"
    if config.compute not in COMPUTE:
        return nullcontext()
    return torch.autocast(device.type, dtype=COMPUTE[config.compute])
