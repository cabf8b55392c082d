"""Runs as jobs of a scheduler, which starts them where and when there is room."""
