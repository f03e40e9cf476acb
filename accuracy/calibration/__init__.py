"""Fits of the cost layer's constants to tables of measured kernels and collectives."""
