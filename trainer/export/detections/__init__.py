"""How the outputs of a detector's file hold what it has found, learned by running its end on known values."""
