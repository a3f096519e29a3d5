"""Which kernel multiplies a problem: compute modes, measured tables, time models."""
