"""Commands for people: demo, bench, audit and explain, and what they share."""
