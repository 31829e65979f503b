"""SFT and GRPO: the step, what it holds in memory, and the loop that saves it."""
