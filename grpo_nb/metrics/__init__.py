"""The table of metric keys: what a row of metrics.jsonl or sft.jsonl may hold."""
