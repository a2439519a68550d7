"""Trainings of drafters: n-gram tables, DISCO's classifier, draft models and streams."""
