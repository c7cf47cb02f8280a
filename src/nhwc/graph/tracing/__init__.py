"""How a model becomes a graph: it is traced, or recorded; what cannot be stays a call."""
