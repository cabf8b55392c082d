"""Propose a configuration for a model and its data: settings with the reasons for them, and the questions left open."""
