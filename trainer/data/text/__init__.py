"""Raw text: which inputs of a graph a tokenizer feeds, tokenizing while the data is read, and what a batch needs.

`text_columns` matches [data.text] with the inputs of the graph, `tokenizer` opens the tokenizer, `tokenized_rows`
computes the columns of token ids, and `checks` finds what does not fit before anything starts. The library `tokenizers`
is imported in `tokenizer` only.
"""
