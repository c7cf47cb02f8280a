"""What the source and the compiled code of a model say, read before it runs."""
