"""Choose the units to recompute: by name, or as few as a memory budget requires.

The memory of activations is largest while the oldest of the micro-batches in flight runs backward. With 2 micro-batches
in flight and units A, B, C of which B is recomputed in mode `whole` (10 = what a unit keeps, 1 = its inputs):

    the younger micro-batch    A 10   B 1    C 10
    backward of C              A 10   B 1    C 10
    backward of B              A 10   B 10               B is recomputed, so all that it keeps is there for a moment
    backward of A              A 10

The peak is 21 + 21 = 42, at the backward pass of C. Choosing the units with the fewest recomputed FLOPs for a budget is
a knapsack problem. It is solved greedily: units are added in the order of FLOPs per byte saved until the budget is
kept, and then each that turns out to be unnecessary is removed, the most expensive first.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from onward.trainer.errors import ConfigError
from onward.trainer.parallel.cost import NodeCost
from onward.trainer.parallel.pipeline.stage import Chain, Part
from onward.trainer.parallel.recomputation.recompute import Mode

# -- by name


def choose_by_name(chain: Chain, patterns: Sequence[str], *, elsewhere: Iterable[Part] = ()) -> tuple[int, ...]:
    """Return the units that compute a tensor, or use a weight, whose name matches one of the glob patterns.

    elsewhere: parts of other stages, which count as matches too. Raises ConfigError for every pattern without a match.
    """
    names_of_units = [_names(part) for part in chain.parts]
    # a name of another rank's stage is no mistake of the user
    known = set().union(*names_of_units, *map(_names, elsewhere))
    problems = []
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            close = difflib.get_close_matches(pattern, sorted(known), n=3, cutoff=0.3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            problems.append(f"recompute.units: no tensor or weight of the graph matches {pattern!r}{hint}")
    if problems:
        raise ConfigError(problems)
    chosen = []
    for number, names in enumerate(names_of_units):
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            chosen.append(number)
    return tuple(chosen)


def _names(part: Part) -> set[str]:
    """Return the names of the tensors that a part computes, in the file and in the fx graph, and of its weights."""
    names = set(part.output_names)
    for module in part.module.modules():
        names.update(getattr(module, "onnx_names", {}).values())
        if isinstance(module, fx.GraphModule):
            nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
            names.update(name for node in nodes for name in (node.name, *node.meta.get("onnx", ())))
    return names


# -- by memory


@dataclass(frozen=True)
class UnitCost:
    """What one unit takes for one micro-batch."""

    flops: int
    """Of its forward pass."""
    kept_bytes: int
    """What it keeps for its backward pass without recomputation."""
    product_bytes: int
    """Results of its matrix products, convolutions and attention, which mode `selective` keeps."""
    input_bytes: int
    """Its inputs, which every mode keeps."""

    def stored_bytes(self, mode: Mode) -> int:
        """Return what stays of it between its forward and its backward pass."""
        selective = self.input_bytes + self.product_bytes
        return {"none": self.kept_bytes, "selective": selective, "whole": self.input_bytes}[mode]

    def recomputed_flops(self, mode: Mode) -> int:
        """Return the FLOPs of its second forward pass."""
        return self.flops if mode == "whole" else 0


def unit_costs(parts: Sequence[Part], costs: Mapping[str, NodeCost]) -> list[UnitCost]:
    """Return what each part takes. costs: of all nodes of the graph, for one micro-batch.

    Of a node that makes several products inside (attention with dropout where no kernel has both, a recurrent layer)
    only the result counts.
    """
    result = []
    for part in parts:
        nodes = [costs[name] for name in part.nodes]
        inputs = [costs[name] for name in part.input_names if name in costs]
        products = [node for node in nodes if node.flops]
        flops = sum(node.flops for node in nodes)
        kept_bytes = sum(node.kept_bytes for node in nodes)
        product_bytes = sum(node.output_bytes for node in products)
        input_bytes = sum(node.output_bytes for node in inputs)
        result.append(UnitCost(flops, kept_bytes, product_bytes, input_bytes))
    return result


def peak_bytes(units: Sequence[UnitCost], mode: Mode, chosen: Collection[int], *, in_flight: int) -> int:
    """Return the largest memory of activations of `in_flight` micro-batches, as drawn above."""
    stored = [unit.stored_bytes(mode if number in chosen else "none") for number, unit in enumerate(units)]
    # units behind the one in its backward pass have been freed by then
    peak = 0
    before = 0
    for number, unit in enumerate(units):
        # a recomputed unit has all that it would have kept, while its own backward pass runs
        in_backward = max(unit.kept_bytes, stored[number]) if number in chosen else stored[number]
        peak = max(peak, before + in_backward)
        # units before it wait with what they keep
        before += stored[number]
    # the other micro-batches are between their forward and their backward pass
    return (in_flight - 1) * sum(stored) + peak


def choose_by_budget(units: Sequence[UnitCost], mode: Mode, *, in_flight: int, budget_bytes: int) -> tuple[int, ...]:
    """Return units with whose recomputation the activations fit into `budget_bytes`; () if they fit without.

    Raises ConfigError when recomputing all units is not enough.
    """

    def fits(chosen: Collection[int]) -> bool:
        return peak_bytes(units, mode, chosen, in_flight=in_flight) <= budget_bytes

    def price(number: int) -> tuple[float, int]:
        # at least one byte, since the FLOPs are divided by it
        saved = max(units[number].stored_bytes("none") - units[number].stored_bytes(mode), 1)
        return units[number].recomputed_flops(mode) / saved, -saved

    # a unit that keeps little more than its inputs is not worth recomputing
    useful = [number for number in range(len(units)) if units[number].stored_bytes(mode) < units[number].kept_bytes]
    chosen: list[int] = []
    for number in sorted(useful, key=price):
        if fits(chosen):
            break
        chosen.append(number)
    if not fits(chosen):
        least = min(peak_bytes(units, each, range(len(units)), in_flight=in_flight) for each in ("none", mode))
        raise ConfigError(
            f"activations of {in_flight} micro-batches take {least:,} bytes with all {len(units)} units recomputed, "
            f"but {budget_bytes:,} are left for them: take smaller micro-batches, more units (parallel.units), more "
            "stages or a larger parallel.tensor, or raise parallel.memory_gib"
        )
    # the last unit added may have saved enough to make earlier ones unnecessary
    for number in sorted(chosen, key=lambda number: -units[number].recomputed_flops(mode)):
        if fits([other for other in chosen if other != number]):
            chosen.remove(number)
    return tuple(sorted(chosen))
