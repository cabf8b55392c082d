"""Write a table for the examples: 20 columns of numbers, some missing, and what depends on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

ROWS = 4000
NUM_FEATURES = 20
MISSING = 0.03
"""The share of cells that are empty."""


def write_table(folder: Path) -> None:
    """Write `table.parquet`: `f0` to `f19` of different means and scales, and `price`, which depends on eight of them.

    price = f0 + 0.5 f1 - f2 + |f3| + f4 f5 + sin(2 f6) - 0.5 max(f7, 0) + noise      (of the standardised columns)
    """
    import pyarrow as pa
    from pyarrow import parquet

    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, NUM_FEATURES))
    # linear terms, a product, a sine and a kink: a linear model explains a part only
    price = x[:, 0] + 0.5 * x[:, 1] - x[:, 2] + np.abs(x[:, 3]) + x[:, 4] * x[:, 5] + np.sin(2 * x[:, 6])
    price += -0.5 * x[:, 7].clip(0) + random.normal(0, 0.1, ROWS)
    # six orders of magnitude, so that a run without standardised columns fails visibly
    scales = 10.0 ** random.uniform(-2, 4, NUM_FEATURES)
    means = random.uniform(-3, 3, NUM_FEATURES)
    cells = (x + means) * scales
    # after the price was computed: what is missing had an influence
    cells[random.random(cells.shape) < MISSING] = np.nan
    columns = {f"f{place}": pa.array(column, from_pandas=True) for place, column in enumerate(cells.T)}
    parquet.write_table(pa.table({**columns, "price": price}), folder / "table.parquet")
