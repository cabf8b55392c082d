"""What the commands know of runs: their state, index, logs, and why they ended."""
