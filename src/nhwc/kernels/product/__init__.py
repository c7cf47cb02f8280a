"""The matrix product in registers, and how pixels and weights are laid out for it."""
