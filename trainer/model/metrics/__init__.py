"""The metrics of an evaluation, exact over all ranks."""
