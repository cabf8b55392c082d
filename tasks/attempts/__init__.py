"""Attempts of the training: how one begins, how it ended, and whether another one follows."""
