"""The run directory: settings, knobs, logs, checkpoints and lock of one run. It is the shared state of all tools."""
