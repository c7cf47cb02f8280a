"""A small language for kernels: Python expressions that become machine code."""
