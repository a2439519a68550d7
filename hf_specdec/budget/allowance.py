"""`Allowance`: what finding out may cost. Whether a draft pays is seen where it is tried alone, and trying may lose."""

SHARE = 0.02
"""of the rounds that go by, what may be lost"""
GIVEN, AT_HAND = 1.5, 3.0
"""plain rounds that are there at first, as little is known of what is new; and that can be saved up at most"""
OWED = 20.0
"""plain rounds that are made up for at most: what a try is said to take may have been disturbed"""
DEARER = 4
"""times its price, at most, that a try is charged where others have been in vain: each in a row doubles it"""


class Allowance:
    """An account of plain rounds: a share of those in which nothing else is done comes in, what tries take goes out,
    and what they gain comes back.

    So tries lose `GIVEN` plain rounds and `SHARE` of the time at most. They come at intervals that grow as long as
    they are in vain, and one after the other as long as they gain what they take.
    """

    def __init__(self) -> None:
        self.left = GIVEN
        self.vain = 0
        """tries in a row that have gained less than they took"""
        self._tried: float | None = None
        """the price of what is being tried"""

    def begin(self) -> None:
        """Another text: what was in vain may gain there."""
        self.vain = 0

    def try_for(self, price: float) -> bool:
        """Whether something is tried in this round that takes so many plain ones beside its own. If so, it is paid."""
        charged = price * min(2**self.vain, DEARER)
        self.left = min(self.left + SHARE, AT_HAND)
        if self.left < min(charged, AT_HAND):
            return False
        self.left, self.vain = max(self.left - charged, -OWED), self.vain + 1
        self._tried = price
        return True

    def gain(self, rounds: float) -> None:
        """What was tried has gained so many plain rounds."""
        if self._tried is not None:
            self.left = min(self.left + rounds, AT_HAND)
            if rounds >= self._tried:
                self.vain = 0
        self._tried = None
