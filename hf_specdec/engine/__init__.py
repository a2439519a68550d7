"""The round: rows, schedules, stops, pauses, and the guard against drafters that fail."""
