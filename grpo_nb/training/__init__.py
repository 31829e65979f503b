"""SFT and GRPO: the step, its state in memory, and the loop that saves it."""
