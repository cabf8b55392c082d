"""The sizes of dynamic dimensions at which an import traces the graph (see tracing.py for why there are two)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx

from onward.trainer.onnx_graph.index import length_of

Lengths = Mapping[tuple[str, int], tuple[int, int]]
"""(input name, dimension) -> the two lengths at which it is traced; equal ones for a static dimension."""

# Row 0 of each table is for the batch, the others for further dynamic dimensions. Two unrelated dimensions must not
# agree by chance, neither in themselves nor in the results of shape arithmetic on them.
SMALL = ((3, 5), (7, 11), (13, 19), (17, 29), (23, 41), (31, 47))
"""No two pairs have the same difference or ratio."""
LARGE = ((3, 5), (224, 320), (256, 416), (288, 512), (352, 640), (384, 736))
"""For images of dynamic size, which a network halves several times."""
MIXED = ((6, 17), (40, 171), (66, 229), (98, 309), (130, 357), (162, 425))
"""One even and one odd length whose difference is prime, so that remainders and numbers of blocks differ too."""
SHORT = ((3, 5), (7, 11), (6, 9), (8, 13), (4, 10), (2, 12))
"""For lookup tables with few rows, such as position embeddings of short sequences."""


def declared_batch(graph: onnx.GraphProto, stored: Collection[str] = ()) -> int:
    """Return the batch size that all inputs declare as their first dimension; 0 if it is dynamic or they differ.

    stored: names of initializers, which are not inputs. Exporters often fix the batch to that of the example input.
    """
    names = {*stored, *(tensor.name for tensor in graph.initializer)}
    shapes = [value.type.tensor_type.shape.dim for value in graph.input if value.name not in names]
    leading = {length_of(dims[0]) for dims in shapes if dims}
    return leading.pop() or 0 if len(leading) == 1 else 0


def trial_sizes(
    graph: onnx.GraphProto, stored: set[str], *, widen: bool | None = None
) -> Iterable[tuple[Lengths, int | None]]:
    """Yield the sizes to try, one after the other, until an import succeeds without assumptions.

    stored: names of initializers, which are not inputs. Beside the lengths stands the batch size that the file declares
    when it is to be treated as dynamic. widen: always treat a declared batch so, or never; None: so first.
    """
    inputs = [value for value in graph.input if value.name not in stored]
    batch = declared_batch(graph, stored)
    # a dynamic batch first: a model traced at any batch size is more useful than one of fixed size
    for free in [batch, None] if batch and widen is None else [batch if batch and widen else None]:
        # SMALL suits most models; the others are for lengths that a network halves, divides or looks up
        for table in (SMALL, LARGE, MIXED, SHORT):
            yield _lengths(inputs, table, free_batch=free is not None), free
    if not (batch and widen) and any(_is_empty(dim) for value in inputs for dim in value.type.tensor_type.shape.dim):
        yield _lengths(inputs, SMALL, free_batch=False, empty=True), None


def _is_empty(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Return whether a length of 0 is declared; some exporters write it for an unknown length."""
    return dim.HasField("dim_value") and dim.dim_value == 0


def _lengths(
    inputs: Sequence[onnx.ValueInfoProto], table: tuple[tuple[int, int], ...], *, free_batch: bool, empty: bool = False
) -> Lengths:
    """Assign a row of the table to each symbol (`dim_param`) and each unnamed dynamic dimension.

    free_batch: treat a declared leading dimension as dynamic. empty: take a declared length of 0 literally.
    """
    rows: dict[str, int] = {"": 0}  # symbol -> row; the batch is row 0, whatever its symbol
    lengths: dict[tuple[str, int], tuple[int, int]] = {}
    for value in inputs:
        for position, dim in enumerate(value.type.tensor_type.shape.dim):
            fixed = dim.dim_value > 0 or (empty and _is_empty(dim))
            if fixed and not (free_batch and position == 0):
                lengths[value.name, position] = (dim.dim_value, dim.dim_value)
                continue
            unnamed = "" if position == 0 else f"{value.name}[{position}]"
            if position == 0 and dim.dim_param:
                rows.setdefault(dim.dim_param, 0)
            number = rows.setdefault(dim.dim_param or unnamed, len(set(rows.values())))
            first, second = table[number % len(table)]
            further = number // len(table)  # more symbols than rows: use the table again, shifted
            lengths[value.name, position] = (first + 50 * further, second + 90 * further)
    return lengths
