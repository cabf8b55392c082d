"""Models that are built in code: references of known size, small models, and their builder."""
