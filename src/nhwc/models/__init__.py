"""Models as users bring them: check their kind, list their tensors, leave them as found."""
