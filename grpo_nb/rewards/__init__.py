"""Reward functions and the rubric that names and weighs them, in addition to the task's own score."""
