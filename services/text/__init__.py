"""Text in and out of token ids: tokenizer, chat template, detokenizer, stop strings. Loads no torch
and no transformers.
"""
