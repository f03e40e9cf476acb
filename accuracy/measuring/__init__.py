"""Measurements of one machine with PyTorch: kernels, training steps, static inference, in the schema of `validate`."""
