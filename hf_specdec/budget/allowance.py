"""`Allowance`: what finding out may cost. Whether a draft pays is seen where it is tried alone, and trying may lose."""

SHARE = 0.02
"""of the rounds that go by, what may be lost"""
GIVEN, AT_HAND = 1.5, 3.0
"""plain rounds that are there at first, as little is known of what is new; and that can be saved up at most"""
OWED = 20.0
"""plain rounds that are made up for at most: what a try is said to take may have been disturbed"""
DOUBLED = 2
"""times that the charge for a try is doubled at most, once for each one in a row that was in vain"""


class Allowance:
    """An account of plain rounds: a share of those in which nothing else is done comes in, what tries take goes out,
    and what they gain comes back.

    So tries lose `GIVEN` plain rounds and `SHARE` of the time at most, where one takes no more than `OWED`. They come
    at intervals that grow as long as they are in vain, and one after the other as long as they gain what they take.
    """

    def __init__(self) -> None:
        self.left = GIVEN
        self.vain = 0
        """tries in a row that have gained less than they took"""
        self.away = 0
        """rounds to go before what was refused last can be paid"""

    def begin(self) -> None:
        """Another text: what was in vain may gain there."""
        self.vain = 0

    def wait(self) -> None:
        """A round goes by."""
        self.left = min(self.left + SHARE, AT_HAND)

    def try_for(self, price: float) -> bool:
        """Whether something is tried in this round that takes so many plain ones beside its own. If so, it is paid."""
        charged = price * 2 ** min(self.vain, DOUBLED)
        self.wait()
        missing = min(charged, AT_HAND) - self.left
        if missing > 0:
            self.away = int(missing / SHARE)
            return False
        self.left, self.vain = max(self.left - charged, -OWED), self.vain + 1
        return True

    def gain(self, rounds: float, price: float) -> None:
        """What was tried for this price has gained so many plain rounds."""
        self.left = min(self.left + rounds, AT_HAND)
        if rounds >= price:
            self.vain = 0
