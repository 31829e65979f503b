"""The table of metric keys: the keys that a row of metrics.jsonl or sft.jsonl may hold."""
