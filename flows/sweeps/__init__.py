"""Sweeps: what is tried (settings.py, making.py, choice.py), one trial (trials.py), what is shown (report.py)."""
