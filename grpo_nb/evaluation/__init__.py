"""Held-out evaluation: measures with intervals, paired comparisons, the Pareto front, forgetting, predictions."""
