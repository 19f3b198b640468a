"""Corpora, tokenizer, packing and input pipelines."""
