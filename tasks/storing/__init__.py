"""Sending a run to its store beside the training (`checkpoint.store`)."""
