"""Recompute activations in the backward pass in place of keeping them (activation checkpointing), unit by unit.

One unit, and what stays in memory between its forward and its backward pass in each mode:

    x ──► linear ──► gelu ──► linear ──► add ──► y
            a          b         c

                 kept                                   computed again in the backward pass
    none         x, a, b, ...   all autograd saves      -
    selective    x, a, c        inputs and products     b, add       cheap operators
    whole        x              inputs                  a, b, c, add

Gradients are bit for bit the same: the second forward pass has the random numbers, the running statistics and the
autocast of the first one, and leaves running statistics as they are. recompute_choice.py chooses the units.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from onward.trainer.errors import UnsupportedModel
from onward.trainer.parallel.pipeline.stage import Chain

Mode = Literal["none", "whole", "selective"]
"""Values of the setting `recompute.mode`."""


def recompute(chain: Chain, mode: Mode, chosen: Collection[int]) -> None:
    """Wrap the chosen units of a chain in `Recomputed`, in place.

    Gradients of compiled units are equal up to rounding. In eager mode `selective` costs time for every operator, which
    pays on GPUs; on a CPU it may be slower than `whole`.
    """
    if mode == "none":
        return
    for number in chosen:
        chain.units[number] = Recomputed(chain.units[number], selective=mode == "selective")


class Recomputed(nn.Module):
    """A unit whose forward pass runs a second time in the backward pass. Outside training it is the unit alone."""

    def __init__(self, unit: nn.Module, *, selective: bool) -> None:
        super().__init__()
        self.unit = unit
        self.selective = selective
        # a new module begins in training mode, whatever the mode of what it wraps
        self.train(unit.training)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        if not (self.training and torch.is_grad_enabled()):
            return self.unit(*values)  # type: ignore[no-any-return]
        options: dict[str, Any] = {"use_reentrant": False}
        # nothing about random numbers here: `checkpoint` itself restores their state for the second pass
        if not torch.compiler.is_compiling():
            options["context_fn"] = partial(_contexts, self.unit, selective=self.selective)
        elif self.selective:
            # the compiler understands torch's own policy only; it updates running statistics outside of what it repeats
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self.unit, *values, **options)  # type: ignore[no-any-return]


# -- the second forward pass


def _contexts(unit: nn.Module, *, selective: bool) -> tuple[Any, Any]:
    """Return the contexts in which torch runs the first and the second forward pass of a unit."""
    # results by operator, in the order of the calls: the second pass makes the same calls
    kept: dict[Any, list[Any]] = {}
    first = _KeepResults(kept) if selective else ExitStack()
    return first, _SecondPass(unit, _ReuseResults(kept) if selective else ExitStack())


class _SecondPass:
    """A context in which a unit has the state that it has now.

    The running statistics of now are swapped in, and the unit updates these copies. They are not written over those of
    the training loop, which must keep what later micro-batches have added meanwhile.
    """

    def __init__(self, unit: nn.Module, inner: Any) -> None:
        self._unit = unit
        self._inner = inner
        # copies: the unit updates its statistics in place during the first pass
        self._first = [(owner, name, buffer.clone()) for owner, name, buffer in _running_statistics(unit)]
        self._current: list[Tensor] = []

    def __enter__(self) -> None:
        self._current = [owner.get_buffer(name) for owner, name, _ in self._first]
        self._was_training = self._unit.training
        for owner, name, buffer in self._first:
            setattr(owner, name, buffer)
        # an evaluation may have run between the forward and the backward pass
        if not self._was_training:
            self._unit.train()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for (owner, name, _), buffer in zip(self._first, self._current, strict=True):
            setattr(owner, name, buffer)
        if not self._was_training:
            self._unit.eval()
        self._current = []


def _running_statistics(unit: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield (module, attribute, tensor) of each persistent buffer; constants of the graph are not persistent."""
    for owner in unit.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield owner, name, buffer


# -- selective: keep the results of products, attention and collectives


class _EagerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that is never compiled: torch.compile has `_policy`. torch hides other modes from its compiler, which
    takes longer in each call than what these two do."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _KeepResults(_EagerMode):
    """Keep the results of selected operators in the first forward pass.

    torch's own mode (`create_selective_checkpoint_contexts`) also counts all other operators, and refuses a second pass
    with one more: autocast's cast of a weight, which the first pass found in autocast's cache.
    """

    def __init__(self, kept: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind(func)
        if kind.writes:
            self._refuse_overwriting(func, args)
        result = func(*args, **(kwargs or {}))
        if kind.is_kept and _keeps_result(func, args, kwargs):
            # autograd attaches its history to the result itself, which would keep the graph of the first pass alive
            self._kept.setdefault(func, []).append(_detached(result))
            self._storages |= {x.untyped_storage()._cdata for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result

    def _refuse_overwriting(self, func: Any, args: Sequence[Any]) -> None:
        """Raise UnsupportedModel if an operator writes over a kept result. Only a user's own converter may do that."""
        for x, argument in zip(args, func._schema.arguments, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write and isinstance(x, Tensor)
            if is_written and x.untyped_storage()._cdata in self._storages:
                raise UnsupportedModel(
                    f"recompute.mode 'selective' keeps a matrix product of shape {list(x.shape)} that {func} writes "
                    "over in place; use recompute.mode 'whole'"
                )


class _ReuseResults(_EagerMode):
    """Return the kept results, in order, in place of running their operators in the second forward pass."""

    def __init__(self, kept: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._next: dict[Any, Iterator[Any]] = {}

    def __enter__(self) -> Any:
        # from the start each time: a backward pass in two steps runs the unit twice
        self._next = {func: iter(results) for func, results in self._kept.items()}
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _kind(func).is_kept and _keeps_result(func, args, kwargs):
            return _detached(next(self._next[func]))
        return func(*args, **(kwargs or {}))


# torch counts no FLOPs for this one
ATTENTION_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = frozenset(flop_registry) | {getattr(torch.ops.aten, ATTENTION_ON_CPU)}
"""Matrix products, convolutions and attention: every operator for which torch counts FLOPs."""
COLLECTIVES = frozenset({"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"})
"""Collectives, whose results are kept so that nothing is sent twice. Waiting a second time costs nothing."""


def _detached(result: Any) -> Any:
    # most operators have one result, for which torch's function for trees of them takes ten times as long
    return result.detach() if isinstance(result, Tensor) else tree_map_only(Tensor, torch.detach, result)


class _Kind(NamedTuple):
    """What the modes do with an operator."""

    func: Any
    is_kept: bool
    """A product or a collective: its result is kept, unless it draws a dropout mask."""
    may_drop: bool
    """It may draw one."""
    writes: bool
    """It changes an argument."""


_KINDS: dict[int, _Kind] = {}
"""By the address of the operator, whose own hash is slow; the entry keeps the operator alive."""


def _kind(func: Any) -> _Kind:
    kind = _KINDS.get(id(func))
    if kind is None:
        is_collective = func.namespace == "_c10d_functional"
        kind = _KINDS[id(func)] = _Kind(
            func,
            is_kept=func._opname in COLLECTIVES if is_collective else func._overloadpacket in PRODUCTS,
            may_drop=torch.Tag.nondeterministic_seeded in func.tags,
            writes=func._schema.is_mutable,
        )
    return kind


def _keeps_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    kind = _kind(func)
    if not kind.is_kept or not kind.may_drop:
        return kind.is_kept
    return not _draws_dropout(func, args, kwargs or {})


def _draws_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a kernel that may draw a dropout mask does. If the second pass skipped it, the next operator that
    draws would get its random numbers."""
    # the ratio may be given by position or by name
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))


def _policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Make the same selection in the form that torch.compile understands."""
    keeps = isinstance(func, torch._ops.OpOverload) and _keeps_result(func, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
