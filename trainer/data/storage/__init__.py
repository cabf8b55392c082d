"""Store the data as shards: files of rows with a manifest, once for each content."""
