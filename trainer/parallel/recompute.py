"""Activations computed again in the backward pass instead of kept: whole units, or all of a unit but its products.

    kept by a unit     none                    selective                              whole
    until backward     what autograd saves     inputs, and results of products        inputs
    computed again     nothing                 what is cheap                          everything

Gradients are the same bits: the second time a unit runs with the random numbers, the running statistics and the
autocasting of the first, and leaves statistics as they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from onward.trainer.errors import ConfigError, UnsupportedModel
from onward.trainer.parallel.cost import NodeCost
from onward.trainer.parallel.pipeline.stage import Chain, Part

Mode = Literal["none", "whole", "selective"]


def recompute(chain: Chain, mode: Mode, chosen: Collection[int]) -> None:
    """Wrap the chosen units of a chain, in place. Parameters keep their paths inside the unit, which is `.unit` now.

    A compiled unit is compiled again with its recomputation: the compiler then leaves out what need not be computed
    again, and gradients are the same but for rounding. In eager mode selective costs time for every operation, which is
    for GPUs: on a CPU it may take longer than computing all again.
    """
    if mode == "none":
        return
    for number in chosen:
        unit = chain.units[number]
        if hasattr(unit, "_orig_mod"):  # compiled; to import the class costs a second
            plain: Any = unit._orig_mod
            make: Any = type(unit)
            chain.units[number] = make(Recomputed(plain, selective=mode == "selective"), unit.dynamo_ctx)
        else:
            chain.units[number] = Recomputed(unit, selective=mode == "selective")


class Recomputed(nn.Module):
    """A unit that is run a second time in the backward pass. Called as the unit; without training it is the unit."""

    def __init__(self, unit: nn.Module, *, selective: bool) -> None:
        super().__init__()
        self.unit = unit
        self.selective = selective
        self.train(unit.training)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        if not (self.training and torch.is_grad_enabled()):
            return self.unit(*values)  # type: ignore[no-any-return]
        how: dict[str, Any] = {"use_reentrant": False}
        if not torch.compiler.is_compiling():
            how["context_fn"] = partial(_twice, self.unit, selective=self.selective)
        elif self.selective:  # the compiler decides from these; statistics are changed after what it recomputes
            how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self.unit, *values, **how)  # type: ignore[no-any-return]


# -- the second time


def _twice(unit: nn.Module, *, selective: bool) -> tuple[Any, Any]:
    """What the unit runs in the first time and the second."""
    kept: dict[Any, list[Any]] = {}
    first = _Keep(kept) if selective else ExitStack()
    return first, _Again(unit, _Give(kept) if selective else ExitStack())


class _Again:
    """The state of a unit as it is now, for when it runs again.

    Running statistics are those of now: swapped in, not written over, since other micro-batches are on their way and
    the loop's own must stay as they are. What is changed then is the copy.
    """

    def __init__(self, unit: nn.Module, given: Any) -> None:
        self._unit = unit
        self._given = given
        self._then = [(owner, leaf, buffer.clone()) for owner, leaf, buffer in _statistics(unit)]
        self._now: list[Tensor] = []

    def __enter__(self) -> None:
        self._now = [owner.get_buffer(leaf) for owner, leaf, _ in self._then]
        self._was_training = self._unit.training
        for owner, leaf, buffer in self._then:
            setattr(owner, leaf, buffer)
        if not self._was_training:  # an evaluation came in between
            self._unit.train()
        self._given.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._given.__exit__(*error)
        for (owner, leaf, _), buffer in zip(self._then, self._now, strict=True):
            setattr(owner, leaf, buffer)
        if not self._was_training:
            self._unit.eval()
        self._now = []


def _statistics(unit: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """(module, attribute, tensor) of each buffer that checkpoints keep: constants of the graph are not persistent."""
    for owner in unit.modules():
        for leaf, buffer in owner.named_buffers(recurse=False):
            if leaf not in owner._non_persistent_buffers_set:
                yield owner, leaf, buffer


# -- what is kept of a unit: products, attention and what came from other ranks


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps results while a unit runs the first time.

    torch's own (`create_selective_checkpoint_contexts`) counts every operation, not only those it keeps, and refuses
    the second run when it makes one more: autocast's cast of a weight that the first run found in the cache.
    """

    def __init__(self, kept: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._places: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self._check_written(func, args)
        result = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            self._kept.setdefault(func, []).append(tree_map_only(Tensor, torch.detach, result))
            self._places |= {x.untyped_storage()._cdata for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result

    def _check_written(self, func: Any, args: Sequence[Any]) -> None:
        """What is kept must not be written over; no operator of the table does that, a converter of one's own may."""
        for x, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write and isinstance(x, Tensor)
            if written and x.untyped_storage()._cdata in self._places:
                raise UnsupportedModel(
                    f"recompute.mode 'selective' keeps a matrix product of shape {list(x.shape)} that {func} writes "
                    "over in place; use recompute.mode 'whole'"
                )


class _Give(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the results that were kept, in order, instead of computing them again."""

    def __init__(self, kept: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._next: dict[Any, Iterator[Any]] = {}

    def __enter__(self) -> Any:
        self._next = {func: iter(results) for func, results in self._kept.items()}
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_kept(func, args, kwargs or {}):
            return tree_map_only(Tensor, torch.detach, next(self._next[func]))
        return func(*args, **(kwargs or {}))


ATTENTION_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"  # torch counts no FLOPs of this one
PRODUCTS = frozenset(flop_registry) | {getattr(torch.ops.aten, ATTENTION_ON_CPU)}
"""Matrix products, convolutions, attention: whatever torch counts FLOPs of."""
COLLECTIVES = frozenset({"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"})
"""What came from other ranks is not sent again. To wait for it a second time costs nothing."""


def _is_kept(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func.namespace == "_c10d_functional":
        return func._opname in COLLECTIVES
    return func._overloadpacket in PRODUCTS and not _draws(func, args, kwargs)


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a kernel makes a dropout mask of its own. Left out the second time, it would leave its random numbers
    to the next one that draws."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))


def _policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = isinstance(func, torch._ops.OpOverload) and _is_kept(func, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


# -- which units


@dataclass(frozen=True)
class UnitCost:
    """One unit and one micro-batch."""

    flops: int
    """Of its forward pass."""
    kept_bytes: int
    """What it keeps for its backward pass when nothing is recomputed."""
    product_bytes: int
    """Results of its matrix products, convolutions and attention: what selective keeps besides the inputs."""
    boundary_bytes: int
    """Its inputs."""

    def stored(self, mode: Mode) -> int:
        """What is kept of it from the forward to the backward pass."""
        selective = self.boundary_bytes + self.product_bytes
        return {"none": self.kept_bytes, "selective": selective, "whole": self.boundary_bytes}[mode]

    def again(self, mode: Mode) -> int:
        """What is computed again: FLOPs."""
        return self.flops if mode == "whole" else 0


def unit_costs(parts: Sequence[Part], costs: Mapping[str, NodeCost]) -> list[UnitCost]:
    """What each part takes. costs: of the whole graph's nodes, for one micro-batch.

    A node that makes several products (attention with dropout where no kernel has both; a recurrent layer) counts
    with the result it gives.
    """
    found = []
    for part in parts:
        nodes = [costs[name] for name in part.nodes]
        found.append(
            UnitCost(
                flops=sum(node.flops for node in nodes),
                kept_bytes=sum(node.kept_bytes for node in nodes),
                product_bytes=sum(node.output_bytes for node in nodes if node.flops),
                boundary_bytes=sum(costs[name].output_bytes for name in part.input_names if name in costs),
            )
        )
    return found


def by_name(chain: Chain, patterns: Sequence[str], *, elsewhere: Iterable[Part] = ()) -> tuple[int, ...]:
    """The units that compute a tensor, or use a weight, whose name matches a glob pattern.

    `elsewhere`: parts of other stages, where a pattern may find its match as well. Raises ConfigError for every
    pattern that matches nothing anywhere.
    """
    names = [_names(part) for part in chain.parts]
    known = set().union(*names, *map(_names, elsewhere))
    problems = []
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = difflib.get_close_matches(pattern, sorted(known), n=3, cutoff=0.3)
            problems.append(f"recompute.units: no tensor matches {pattern!r}; there is {', '.join(near) or 'none'}")
    if problems:
        raise ConfigError(problems)
    return tuple(
        number
        for number, own in enumerate(names)
        if any(fnmatchcase(name, pattern) for name in own for pattern in patterns)
    )


def _names(part: Part) -> set[str]:
    names = set(part.output_names)
    for module in part.module.modules():
        names.update(getattr(module, "onnx_names", {}).values())
        if isinstance(module, fx.GraphModule):
            nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
            names.update(name for node in nodes for name in (node.name, *node.meta.get("onnx", ())))
    return names


def peak_bytes(units: Sequence[UnitCost], mode: Mode, chosen: Collection[int], *, in_flight: int) -> int:
    """Activations at their most, of `in_flight` micro-batches, while the oldest goes back through the units.

    Units behind the one in its backward pass have been freed by then; a recomputed one has all it keeps for a moment.
    """
    stored = [unit.stored(mode if number in chosen else "none") for number, unit in enumerate(units)]
    most, before = 0, 0
    for number, unit in enumerate(units):
        whole = max(unit.kept_bytes, stored[number]) if number in chosen else stored[number]
        most = max(most, before + whole)
        before += stored[number]
    return (in_flight - 1) * sum(stored) + most


def by_budget(
    units: Sequence[UnitCost],
    *,
    in_flight: int,
    budget_bytes: int,
    modes: Sequence[Mode] = ("none", "selective", "whole"),
) -> tuple[Mode, tuple[int, ...]]:
    """The mode and the units of the least recomputation with which activations fit into `budget_bytes`.

    Least FLOPs first, then fewest units: the modes as ordered, units that save most for their FLOPs before others.
    Raises ConfigError when not even recomputing all is enough.
    """
    everything = range(len(units))
    for mode in modes:
        if (chosen := _fewest(units, mode, in_flight=in_flight, budget_bytes=budget_bytes)) is not None:
            return (mode, chosen) if chosen else ("none", ())
    least = min(peak_bytes(units, mode, everything, in_flight=in_flight) for mode in modes)
    raise ConfigError(
        f"activations of {in_flight} micro-batches take {least:,} bytes with all {len(units)} units recomputed, but "
        f"{budget_bytes:,} are left for them: take smaller micro-batches, more units (parallel.units), more stages or "
        "a larger parallel.tensor, or raise parallel.memory_gib"
    )


def _fewest(units: Sequence[UnitCost], mode: Mode, *, in_flight: int, budget_bytes: int) -> tuple[int, ...] | None:
    """Units that fit the budget, found greedily and then thinned out; None if all together do not."""

    def fits(chosen: Collection[int]) -> bool:
        return peak_bytes(units, mode, chosen, in_flight=in_flight) <= budget_bytes

    def price(number: int) -> tuple[float, int]:
        saved = max(units[number].stored("none") - units[number].stored(mode), 1)
        return units[number].again(mode) / saved, -saved

    useful = [number for number in range(len(units)) if units[number].stored(mode) < units[number].kept_bytes]
    chosen: list[int] = []
    for number in sorted(useful if mode != "none" else (), key=price):
        if fits(chosen):
            break
        chosen.append(number)
    if not fits(chosen):
        return None
    for number in sorted(chosen, key=lambda number: -units[number].again(mode)):
        if fits([other for other in chosen if other != number]):
            chosen.remove(number)
    return tuple(sorted(chosen))
