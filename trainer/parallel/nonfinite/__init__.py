"""Find where a loss or a gradient became infinite or NaN: the step is replayed, with every node looked at."""
