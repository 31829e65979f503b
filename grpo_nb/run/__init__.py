"""The run directory: settings, knobs, logs, checkpoints and lock of one run. Everything else meets here."""
