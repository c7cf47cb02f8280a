"""A whole model as one call: its steps recorded, improved, placed in memory, and run."""
