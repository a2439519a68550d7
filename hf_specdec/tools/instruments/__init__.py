"""Instruments that show what a generation does and costs."""
