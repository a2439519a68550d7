"""One forward of any model over its cache, and what each model can do."""
