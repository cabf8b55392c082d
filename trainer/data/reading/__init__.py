"""Read data sources: local files and URLs, CSV, JSON Lines, Parquet, directories of text, saved datasets."""
