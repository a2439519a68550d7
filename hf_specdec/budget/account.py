"""`Account`: how much time drafting may lose. Whether it pays is seen only where it is tried, and tries may lose."""

from math import ceil

SHARE = 0.01
"""plain rounds that come in with each round that does not draft: what finding out may cost"""
GIVEN, SAVED = 1.25, 3.0
"""plain rounds that are there at first, as little is known of a new drafter; and that can be saved up"""
OWED = 20.0
"""plain rounds that the account can be short of: what a try is said to take may have been disturbed"""


class Account:
    """Plain rounds that tries may lose.

    A share of the rounds without drafts comes in, what tries lose is charged, what they gain comes back. A pause is as
    long as the account needs to pay for the next try.
    """

    def __init__(self) -> None:
        self.left = GIVEN

    def wait(self) -> None:
        """A round goes by that is no try."""
        self.left = max(self.left, min(self.left + SHARE, SAVED))

    def missing(self, price: float) -> int:
        """Rounds to wait until a try is paid for that may lose so many plain rounds."""
        return max(0, ceil((min(price, SAVED) - self.left) / SHARE - 1e-6))

    def charge(self, lost: float) -> None:
        """Drafting has lost so many plain rounds; below 0 gained."""
        self.left = max(min(self.left - lost, max(self.left, SAVED)), -OWED)
