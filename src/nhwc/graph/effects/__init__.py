"""What a `forward` leaves behind in modules, globals and torch: noticed, undone, kept apart."""
