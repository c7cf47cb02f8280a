"""Kernels that look at each pixel, or at the pixels around it, without a matrix product."""
