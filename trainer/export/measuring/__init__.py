"""Run an exported file: sessions, samples, metrics, differences, times."""
