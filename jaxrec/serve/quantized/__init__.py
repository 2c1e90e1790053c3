"""Tables of few bits and of few rows, for prediction."""
