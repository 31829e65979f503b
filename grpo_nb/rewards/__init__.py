"""Reward functions and the rubric that names and weighs them beside the task's own score."""
