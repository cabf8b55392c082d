"""Estimate the time and memory of layouts, and choose one."""
