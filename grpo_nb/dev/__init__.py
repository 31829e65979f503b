"""Tools for the project's own development: benchmarks, checked claims, rendered notebooks and reference pages."""
