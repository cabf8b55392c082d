"""Find which of torch's attention kernels is taken for each form of mask. About 1 minute on an H200.

    spelled out in a file                                  by hand
    softmax(q k.T / sqrt(w) + mask) v  --imported-->       scaled_dot_product_attention(q, k, v, ...)

Both sides have the same weights and run forward and backward; the kernel is known by the operator that launches it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onward.trainer.onnx_import.driver import to_module
from tests.bench.handwritten import exported
from tests.gpu.device import DEVICE, REHEARSAL
from tests.gpu.measure import arithmetic
from tests.gpu.results import attempt
from tests.gpu.traces import PROFILED, Event, profile_calls

BATCH, LENGTH, HEADS, HEAD_WIDTH = (2, 16, 4, 8) if REHEARSAL else (8, 1024, 12, 64)
WIDTH = HEADS * HEAD_WIDTH
FORMS = ("no mask", "causal", "padding", "causal and padding", "additive bias", "causal, grouped heads")
CHECKS = tuple(f"{form}, {compute}" for form in FORMS for compute in ("bf16", "fp32"))
KERNELS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash on a CPU",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
    "aten::_scaled_dot_product_attention_math": "math",
}


class Attention(nn.Module):
    """Self-attention, x [B, T, width] -> the same; `mask` [B, T] is 0 where a key is padding."""

    triangle: Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.spelled_out = form, False
        self.groups = 4 if "grouped" in form else 1
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // self.groups)
        if "bias" in form:  # of the relative position, as T5 learns it
            self.bias = nn.Parameter(torch.randn(1, HEADS, LENGTH, LENGTH))
        self.register_buffer("triangle", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)

        q, (k, v) = heads(self.query(x)), map(heads, self.key_value(x).chunk(2, dim=-1))
        mixed = (self._spelled_out if self.spelled_out else self._fused)(q, k, v, mask)
        return mixed.transpose(1, 2).flatten(2)

    def _spelled_out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention as files have it."""
        if self.groups > 1:
            k, v = (y[:, :, None].expand(-1, -1, self.groups, -1, -1).flatten(1, 2) for y in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_WIDTH)
        least = torch.finfo(scores.dtype).min
        if "causal" in self.form:
            scores = scores.masked_fill(~self.triangle, least)
        if "bias" in self.form:
            scores = scores + self.bias
        if mask is not None:
            scores = scores + (1.0 - mask[:, None, None, :].to(scores.dtype)) * least
        return scores.softmax(-1) @ v

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention as one writes it."""
        chosen = None if mask is None else mask[:, None, None, :].bool()
        is_causal = "causal" in self.form and chosen is None
        if "causal" in self.form and chosen is not None:
            chosen = chosen & self.triangle
        if "bias" in self.form:
            chosen = self.bias.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, chosen, is_causal=is_causal, enable_gqa=self.groups > 1)


def kernel(events: Sequence[Event]) -> str:
    """Return the kernel that attention was computed by."""
    found = {event["name"] for event in events}
    return " and ".join(name for operator, name in KERNELS.items() if operator in found) or "none: matrix products"


def chosen(form: str, compute: str) -> dict[str, Any]:
    """Return both sides' kernel, and the microseconds of all their kernels, forward and backward."""
    torch.manual_seed(0)
    module = Attention(form)
    inputs = {"x": torch.randn(BATCH, LENGTH, WIDTH)}
    if "padding" in form:
        inputs["mask"] = (torch.arange(LENGTH) < LENGTH - torch.arange(BATCH)[:, None]).long()
    module.spelled_out = True
    imported = to_module(exported(copy.deepcopy(module), {name: value[:2] for name, value in inputs.items()}))
    module.spelled_out = False
    values = [value.to(DEVICE) for value in inputs.values()]
    found: dict[str, Any] = {}
    results = []
    for name, side in (("onward", imported), ("by_hand", module)):
        side.to(DEVICE).train()

        def passes(side: nn.Module = side) -> Tensor:
            side.zero_grad(set_to_none=True)
            with arithmetic(compute):
                output: Tensor = side(*values)
            output.float().square().mean().backward()
            return output.detach()

        results.append(passes())
        events = profile_calls(passes)
        found[f"{name}_kernel"] = kernel(events)
        found[f"{name}_us"] = sum(event["dur"] for event in events if event.get("cat") == "kernel") / PROFILED
    torch.testing.assert_close(*results, rtol=3e-2, atol=3e-2)
    return found


def main() -> None:
    """Make each check."""
    for check in CHECKS:
        form, _, compute = check.rpartition(", ")
        attempt(check, partial(chosen, form, compute))


if __name__ == "__main__":
    main()
