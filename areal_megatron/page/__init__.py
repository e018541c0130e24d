"""The page of a run: served while it goes on, or written into one file."""
