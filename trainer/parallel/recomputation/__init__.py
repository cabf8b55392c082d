"""Activations that are computed again or stored compressed."""
