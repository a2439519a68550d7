"""Measure what speculation gains: prompts in, a result file out, and pages that explain it.

One prompt is the unit of work: all methods decode it in turn, in rotated order, and the result file is written anew.
"""
