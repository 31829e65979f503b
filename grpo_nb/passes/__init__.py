"""Passes that score and train completions of Llama-like models with LoRA in half precision: one flat line of tokens."""

from grpo_nb.passes.flat import FlatBatch, flatten
from grpo_nb.passes.model import serves, shares, token_stats, unserved

__all__ = ["FlatBatch", "flatten", "serves", "shares", "token_stats", "unserved"]
