"""This machine: what it has, how it is used, and priorities and imports of this process."""
