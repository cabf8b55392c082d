"""Which nodes of a graph are rematerialised: computed in every part that reads them, so that they never cross a cut.

These are values that depend on weights, constants and lengths alone, such as transposed weights, position numbers and
shapes for Reshape. All other nodes belong to exactly one part.

    w   = get_attr "w"          rematerialised: a stored tensor
    w_t = w.t()                 rematerialised: reads w alone
    n   = x.size(1)             rematerialised: a length, a plain number
    h   = x @ w_t               partitioned: reads the data x
    m   = rand_like(w)          partitioned: a second draw would give other numbers
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from onward.trainer.onnx_import.tracing.shape_assumptions import is_impure

RANDOM_FUNCTIONS = ("rand", "dropout", "bernoulli", "normal_", "uniform", "multinomial")
"""Parts of the names of functions that draw random numbers."""


def partitioned_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that a cut assigns to exactly one part, in the order in which they run."""
    computed = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    return [node for node in computed if not is_rematerialised(node)]


def is_rematerialised(node: fx.Node) -> bool:
    """Return whether a node is computed again in every part that reads it."""
    # kept in `meta`, or a chain of n such nodes would be walked n times
    if "rematerialised" not in node.meta:
        if node.op == "get_attr":
            result = True
        # a module may hold state, such as the statistics of a BatchNormalization
        elif node.op not in ("call_function", "call_method") or is_impure(node) or node.is_impure():
            result = False
        else:
            result = is_length(node) or (not _is_random(node) and all(map(is_rematerialised, node.all_input_nodes)))
        node.meta["rematerialised"] = result
    return bool(node.meta["rematerialised"])


def is_length(node: fx.Node) -> bool:
    """Return whether a node is `x.size(dim)`: a plain number, of any tensor x."""
    return node.op == "call_method" and node.target == "size" and len(node.args) == 2


def tensors_read(node: fx.Node) -> set[fx.Node]:
    """Return the inputs of a node that must come from its own part, from an earlier one, or from the data."""
    return {read for read in node.all_input_nodes if not is_rematerialised(read)}


def rematerialised_for(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return all rematerialised nodes that some nodes need, directly or through others, themselves included."""
    found: set[fx.Node] = set()
    pending = [read for node in nodes for read in (node, *node.all_input_nodes)]
    while pending:
        node = pending.pop()
        if node not in found and is_rematerialised(node):
            found.add(node)
            pending += node.all_input_nodes
    return found


def _is_random(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return any(function in name for function in RANDOM_FUNCTIONS)
