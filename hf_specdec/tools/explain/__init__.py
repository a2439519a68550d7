"""One generation, round by round: what was drafted, what was accepted, and where the time went."""
