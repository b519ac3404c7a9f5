"""Models of one rank: loading, paged attention, the forward pass of a mixed batch, tokenizer
export.
"""
