"""The language model that learns: loading, adapters, tokenization, its reference, and the memory that it needs."""
