"""The policy: loading, adapters, tokenization, its reference, and the memory that it needs."""
