"""What Onward takes from torch that torch may change in a minor release: its private names, and classes it overrides.

A test compares this list with the source, so that nothing is used that is not here; `onward doctor` names what is gone
from a torch that is newer than the newest one that was tried.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PARTS: Mapping[str, Sequence[str]] = {
    "optimizers (trainer/optim)": (
        *("torch._foreach_add_", "torch._foreach_addcdiv_", "torch._foreach_addcmul_", "torch._foreach_copy_"),
        *("torch._foreach_div", "torch._foreach_div_", "torch._foreach_lerp", "torch._foreach_lerp_"),
        *("torch._foreach_mul_", "torch._foreach_norm", "torch._foreach_sign_", "torch._foreach_sqrt"),
        *("torch._foreach_sqrt_", "torch._fused_adamw_"),
    ),
    "groups of FSDP2 (trainer/parallel/replicas/fsdp_groups.py)": (
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        "torch.distributed.fsdp.FSDPModule._set_unshard_async_op",
        "torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward",
    ),
    "schedules of pipelines (trainer/parallel/pipeline/stage_schedules.py)": (
        "torch.distributed.pipelining.PipelineStage",
        "torch.distributed.pipelining.schedules.PipelineScheduleMulti",
        "torch.distributed.pipelining.schedules.PipelineScheduleSingle",
        "torch.nn.Module._compiled_call_impl",
    ),
    "process groups (trainer/distributed, trainer/parallel/replicas)": (
        "torch.distributed._broadcast_coalesced",
        "torch.distributed._functional_collectives",
        "torch.distributed.device_mesh.DeviceMesh._flatten",
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "torch.distributed.ProcessGroup._get_backend",
        "torch.ops._c10d_functional",
    ),
    "tensors without values (trainer/parallel/cost.py, trainer/parallel/planning/dry_run.py)": (
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.fake_tensor.is_fake",
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        "torch.Tensor._cdata",
        "torch.Tensor._version",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ),
    "graphs and their passes (trainer/onnx_import)": (
        "torch._assert_async",
        "torch.fx.Node._erased",
        "torch.fx.graph._custom_builtins",
        "torch.fx.graph_module.reduce_graph_module",
        "torch.utils._pytree",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map",
        "torch.utils._pytree.tree_map_only",
    ),
    "operators (trainer/parallel, trainer/export)": (
        "torch._decomp",
        "torch._decomp.core_aten_decompositions",
        "torch._decomp.global_decomposition_table",
        "torch._ops",
        "torch._ops.OpOverload",
        "torch.ops.aten.add.Tensor._schema",
        "torch._sample_dirichlet",
        "torch.ops.aten._safe_softmax",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "torch.ops.mkldnn._linear_pointwise",
    ),
    "the compiler (trainer/model/compile.py, trainer/onnx_import/tracing/probed_calls.py)": (
        "torch._compile",
        "torch._compile._disable_dynamo",
        "torch._disable_dynamo",
        "torch._dynamo",
        "torch._dynamo.config.recompile_limit",
        "torch._dynamo.disable",
        "torch._dynamo.maybe_mark_dynamic",
        "torch._inductor",
        "torch._inductor.config",
        "torch._inductor.config.deterministic",
        "torch._inductor.custom_graph_pass.CustomGraphPass",
        "torch._inductor.custom_graph_pass.get_hash_for_files",
        "torch._inductor.list_mode_options",
        "torch._inductor.runtime.cache_dir_utils.default_cache_dir",
    ),
    "memory and traces (trainer/checkpoint/background.py, trainer/parallel)": (
        "torch._C",
        "torch._C._current_graph_task_id",
        "torch.autograd._get_sequence_nr",
        "torch.autograd._profiler_enabled",
        "torch.cuda._pin_memory_utils.pin_memory",
        "torch.cuda._pin_memory_utils.unpin_memory",
        "torch.cuda.memory._dump_snapshot",
        "torch.cuda.memory._record_memory_history",
    ),
}
"""What needs them -> dotted names."""


def moved(parts: Mapping[str, Sequence[str]] = PARTS) -> Iterator[str]:
    """Yield a sentence for each name that the installed torch does not have."""
    for subject, names in parts.items():
        if absent := [name for name in names if not _exists(name)]:
            yield f"{', '.join(absent)}: needed by {subject}"


def _exists(name: str) -> bool:
    first, *others = name.split(".")
    value: Any = importlib.import_module(first)
    path = first
    for part in others:
        path = f"{path}.{part}"
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        if part in (*getattr(value, "__annotations__", ()), *_set_by(value)):
            return True
        try:
            value = importlib.import_module(path)
        except ImportError:
            return False
    return True


def _set_by(value: Any) -> tuple[str, ...]:
    """Return the names that a class gives its instances when they are made, among others."""
    made = getattr(getattr(value, "__init__", None), "__code__", None)
    return made.co_names if made else ()


if __name__ == "__main__":  # for `onward doctor`, which has no torch of its own
    print(*moved(), sep="\n")
