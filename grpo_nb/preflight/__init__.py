"""Checks before any work: requirements of the settings and data, and the content that a run depends on."""
