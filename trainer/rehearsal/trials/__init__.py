"""What a rehearsal tries: compilation, precisions, preprocessing, rows of the model's own kind."""
