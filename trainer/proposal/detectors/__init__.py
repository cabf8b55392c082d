"""Propose how a detector is trained on boxes: where they are, and which outputs of the file predict them."""
