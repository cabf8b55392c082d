"""What is to be changed in the graph for one region: noted by the rules, made by rewrite.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from onward.trainer.parallel.tensor.tensor_shardings import Sharding


@dataclass(frozen=True)
class LocalLength:
    """An argument of a call that must become this rank's length, such as the number of heads in a reshape."""

    node: str
    argument: tuple[int | str, ...]
    """Index in args (or name in kwargs), then index in the list that is there."""
    sharding: Sharding
    periods: int = 1
    """A constant argument is set to `periods` times the local length; a computed one is scaled."""


@dataclass
class RegionEdits:
    """What is to be changed in the graph for one region, by names of nodes."""

    row_products: list[str] = field(default_factory=list)
    sharded: list[str] = field(default_factory=list)
    """Every node whose output is sharded."""
    weights: dict[str, Sharding] = field(default_factory=dict)
    """Path of a weight or running statistic -> how it is sharded."""
    weight_readers: dict[str, list[str]] = field(default_factory=dict)
    """Path -> the nodes that read the sharded weight."""
    copied: list[str] = field(default_factory=list)
    """Replicated values with a gradient that the region reads: each goes through copy_to_region."""
    sliced: dict[tuple[str, str], Sharding] = field(default_factory=dict)
    """(node, replicated operand): the node reads only this rank's part of it."""
    local_lengths: list[LocalLength] = field(default_factory=list)
    size_calls: list[tuple[str, Sharding]] = field(default_factory=list)
    """Calls of `size` for the sharded dimension: their result is scaled back to the full length."""
    random_modules: list[str] = field(default_factory=list)
    """Modules that must draw different random numbers on each rank."""
    has_attention: bool = False
