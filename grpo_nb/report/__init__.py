"""Readable output of a run: its page, tables, rollouts and small worked examples."""
