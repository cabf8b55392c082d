"""Preprocessing beside an exported file, or as nodes in front of it."""
