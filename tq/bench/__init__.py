"""Measuring: cases over the registries, peers by name, device time."""
