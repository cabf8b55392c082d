"""Autocast computes in the configured type."""

from __future__ import annotations

import pytest
import torch

from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.model.precision import autocast


@pytest.mark.parametrize(
    ("compute", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrix_products_are_computed_in_the_configured_type(compute: str, dtype: torch.dtype) -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    with autocast(PrecisionConfig.model_validate({"compute": compute}), torch.device("cpu")):
        product = torch.ones(2, 4) @ weight
    assert product.dtype == dtype
    product.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
