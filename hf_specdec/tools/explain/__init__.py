"""One generation taken apart, round by round: what was drafted, what was kept, and where the time went."""
