"""Models as users bring them: of which kind, with which tensors, left as they were found."""
