"""The judge of a round: pure tensor functions at the bottom, what decides which tokens are kept above them."""
