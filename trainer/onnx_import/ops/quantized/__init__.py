"""Operators on integers with scales."""
