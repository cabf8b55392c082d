"""Files whose batch size is written into their shapes."""
