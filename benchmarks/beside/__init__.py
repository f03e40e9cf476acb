"""Two tools side by side: the same settings asked of each, and every difference traced to a named law."""
