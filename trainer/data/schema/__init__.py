"""Name and describe columns: types, signature of the model, axes of labels, what is computed of rows and batches."""
