"""Faces of a run in a notebook: core ipywidgets only, fed by files, writing nothing but knobs."""
