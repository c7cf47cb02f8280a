"""Seeing a model run: every operator call, its copies, what it did to the format, and why."""
