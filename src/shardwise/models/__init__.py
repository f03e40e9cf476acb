"""What a model is."""
