"""The notebook's side: sessions, workers, dashboard and controls."""
