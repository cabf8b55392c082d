"""Compute columns of a table: patterns of names, class names, standardisation, missing values, time-series windows."""
