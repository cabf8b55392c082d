"""A second model, whose outputs the trained one learns."""
