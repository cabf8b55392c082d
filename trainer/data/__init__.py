"""From data sources to batches of tensors.

    schema         columns, the signature of the model, axes and numbers of labels: read by all others
    formats        a reader for each format of files, and their table
    reading        sources: which files, which rows are held out, which columns
    images audio text tables     what is computed of such columns, of rows and of batches
    storage        shards: written once (`sharding`), read by row number (`shards`)
    batches        tensors from a position in the sample stream

From outside, import `sharding.make_training_shards`, `inferred_schema.infer_schema`, `shards`, `signature`,
`input_columns` and `batches`. Only what computes batches imports torch, so that a configuration is checked without it.
Nothing here is collective.
"""
