"""Compute a teacher in a type of its own: each of its products has a context of autocast around it.

    student in fp32    x (fp32) ---- linear ---- fp32
    teacher in bf16    x (fp32) ---- [autocast(bf16): linear] ---- fp32         its weight is stored in bf16
    teacher in fp32    x (any) -> fp32 ---- [no autocast: linear] ---- fp32     beside a student in bf16

Every result is fp32 again, so that what comes between products needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.model.precision import COMPUTE
from onward.trainer.model.weight_casts import PRODUCTS, VIEWS
from onward.trainer.onnx_import.imported_graph import TEACHER_MODULE, ImportedGraph

CAST = PRODUCTS | {F.scaled_dot_product_attention, torch.einsum}
"""Functions whose operands autocast casts."""


class Computed(nn.Module):
    """Call a function or a module in one type of products, whatever the context; floats come out as fp32."""

    def __init__(self, called: Callable[..., Any], compute: str) -> None:
        super().__init__()
        self.called = called
        self.dtype = COMPUTE.get(compute)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `called` returns; the arguments are its own."""
        device = next((arg.device.type for arg in args if isinstance(arg, Tensor)), "cpu")
        # a teacher in fp32 beside a student in half precision: its operands are widened first
        if self.dtype is None:
            args = tuple(_widened(arg) for arg in args)
        with torch.autocast(device, dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return torch.utils._pytree.tree_map(_widened, self.called(*args, **kwargs))


def _widened(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


def teacher_compute(teacher: TeacherConfig, precision: PrecisionConfig) -> str:
    """Return the type in which the teacher computes; "" if it is the model's, which needs nothing."""
    wanted = teacher.compute
    own = precision.compute
    return "" if not teacher.path or wanted in ("auto", own) else wanted


def compute_teacher_apart(module: ImportedGraph, config: RunConfig) -> None:
    """Let the teacher compute in its own type, in place; to be called once layers have been searched for."""
    compute = teacher_compute(config.teacher, config.precision)
    nodes = [node for node in module.graph.nodes if node.meta.get("teacher")]
    if not compute or not nodes:  # soft labels that were computed before have no teacher beside the model
        return
    # in the teacher's submodule, with which they stay in inference form
    beside = module.get_submodule(TEACHER_MODULE)
    for number, node in enumerate(nodes):
        if node.op == "call_function" and node.target in CAST:
            beside.add_module(f"computed_{number}", Computed(node.target, compute))
        elif node.op == "call_module":
            beside.add_module(f"computed_{number}", Computed(module.get_submodule(str(node.target)), compute))
        else:
            continue
        node.op = "call_module"
        node.target = f"{TEACHER_MODULE}.computed_{number}"
    beside.eval()
    # ZeRO gathers the weights of a unit as one type
    if compute in COMPUTE and not config.parallel.zero:
        _store_in_half(module, nodes, COMPUTE[compute])
    module.recompile()


def _store_in_half(module: ImportedGraph, nodes: list[fx.Node], dtype: torch.dtype) -> None:
    """Store those weights of the teacher in half precision that nothing reads but products."""
    for node in nodes:
        if node.op == "get_attr" and _for_products(module, node):
            owner, _, name = str(node.target).rpartition(".")
            weight = getattr(module.get_submodule(owner), name)
            if isinstance(weight, nn.Parameter) and weight.dtype == torch.float32:
                setattr(module.get_submodule(owner), name, nn.Parameter(weight.to(dtype), requires_grad=False))


def _for_products(module: ImportedGraph, node: fx.Node) -> bool:
    for user in node.users:
        is_view = user.op == "call_method" and user.target in VIEWS
        called = module.get_submodule(str(user.target)) if user.op == "call_module" else None
        is_product = isinstance(called, Computed) and not isinstance(called.called, nn.Module)
        if not is_product and not (is_view and _for_products(module, user)):
            return False
    return True
