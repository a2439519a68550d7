"""Train a drafter for a model: count n-grams, or fit DISCO's stop classifier."""
