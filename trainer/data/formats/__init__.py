"""Read files of each format in blocks of rows."""
