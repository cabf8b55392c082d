"""Write quantities as people read them: times, sizes and shapes."""

from __future__ import annotations

from collections.abc import Sequence


def duration(seconds: float) -> str:
    """Return a time in its two largest units: 12.3 ms, 3.44 s, 5 min 20 s, 3 h 05 min, 2 d 04 h."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def shown_size(num_bytes: float) -> str:
    """Return a number of bytes in a unit that fits: 12 bytes, 1.5 kB, 2.5 GB."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while abs(num_bytes) >= 1000 and len(units) > 1:
        num_bytes /= 1000
        units.pop(0)
    return f"{num_bytes:.3g} {units[0]}"


def mb(num_bytes: float) -> str:
    """Return a number of bytes in whole megabytes, for sizes that are compared with each other: 1,234 MB."""
    return f"{num_bytes / 1e6:,.0f} MB"


def gib(num_bytes: float) -> str:
    """Return a number of bytes as memory is counted: 79.1 GiB."""
    return f"{num_bytes / 2**30:.3g} GiB"


def shown_shape(dims: Sequence[int | None] | None) -> str:
    """Return a shape, None being a length that is not known: [8, ?, 3]."""
    if dims is None:
        return "of unknown shape"
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in dims) + "]"
