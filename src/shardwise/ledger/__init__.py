"""The types that every layer above speaks: numbers, operators, tensors, collectives, weights."""
