"""`Rules`: the options of verification. All but `lenience` are exact."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..errors import SpeculationError, shown

EXACT = 1.0
"""lenience that changes nothing"""


@dataclass(frozen=True)
class Rules:
    """What `speculation={...}` may hold beside a drafter's options."""

    SAMPLING: ClassVar = ("independent", "coupled")
    VERIFICATION: ClassVar = ("block", "token")
    FORWARDS: ClassVar = ("auto", "eager", "captured", "bitwise")

    verification: Literal["block", "token"] = "block"
    """of draws: a whole chain together, which never accepts fewer tokens in expectation; or one token after the other
    (Algorithm 1). Both are exact. Trees, and drafts that go on beside the forward (PEARL), are always verified by the
    latter."""
    sampling: Literal["independent", "coupled"] = "independent"
    """`coupled`: a position's random numbers come from seed and position alone, so that one seed gives one text,
    whatever the drafter, window, batch or schedule. Each text has exactly the target's distribution."""
    lenience: float = EXACT
    """l of Leviathan A.5, from 0 (not itself) to 1. Sampled: no token is more than 1/l times as likely as the target
    finds it. Greedy: a drafted token stands whose probability is at least l times the likeliest one's."""

    forwards: Literal["auto", "eager", "captured", "bitwise"] = "auto"
    """of target and draft model. `eager`: as the model is called. `captured`: over static buffers, at a few fixed
    widths, and replayed as CUDA graphs on a GPU. `auto`: captured on a GPU, or if compiled, where that can be, but for
    float16; else eager. `bitwise`: captured, at widths whose rows round alike, so that one text comes out in any dtype,
    whatever drafter, window or schedule."""

    adapt: bool = False
    """whether what is drafted goes by what forwards take in this call, too. Else it goes by what they took when this
    machine first met target and drafter: the same call drafts the same, in a new process and on a busy machine."""

    def __post_init__(self) -> None:
        if not isinstance(self.adapt, bool):
            raise SpeculationError(
                f"adapt must be True or False, got {shown(self.adapt)}; set it in speculation={{...}}"
            )
        for name in ("verification", "sampling", "forwards"):
            allowed, got = getattr(self, name.upper()), getattr(self, name)
            if got not in allowed:
                raise SpeculationError(
                    f"{name} must be {' or '.join(map(repr, allowed))}, got {shown(got)}; set it in speculation={{...}}"
                )
        number = isinstance(self.lenience, (int, float)) and not isinstance(self.lenience, bool)
        if not (number and 0 < self.lenience <= EXACT):  # NaN is in no range
            raise SpeculationError(
                f"lenience must be a number above 0 and up to 1 (1 is exact), got {shown(self.lenience)}; set it in "
                "speculation={...}"
            )
        if not self.exact and self.coupled:
            raise SpeculationError(
                "lenience and sampling='coupled' cannot be combined, because each decides which tokens are accepted; "
                "set one of them"
            )

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def split(cls, options: Any) -> tuple[dict[str, Any], Any]:
        """`speculation={...}` split into rules of verification and the drafter's options."""
        if not isinstance(options, dict):
            return {}, options
        mine = {name: value for name, value in options.items() if name in cls.names()}
        return mine, {name: value for name, value in options.items() if name not in mine}

    @property
    def exact(self) -> bool:
        """Whether the text is the target's own, or has its distribution."""
        return self.lenience == EXACT

    @property
    def coupled(self) -> bool:
        return self.sampling == "coupled"

    @property
    def by_engine(self) -> bool:
        """Whether a call without drafts is the engine's, too, because transformers' loop does not know the option."""
        return self.coupled or self.forwards in ("captured", "bitwise")

    @property
    def binding(self) -> str:
        """The option that transformers' loop cannot stand in for, in its words; empty if there is none."""
        return "sampling='coupled'" if self.coupled else "forwards='bitwise'" * (self.forwards == "bitwise")

    def note(self) -> str:
        """For `last_stats.notes`: how the text differs from the target's own; empty where it does not."""
        if self.exact:
            return ""
        return (
            f"lenience={self.lenience:g}: the text is no longer exactly the target's. In sampling a token "
            f"can be up to {1 / self.lenience:.3g} times as likely as the target finds it; in greedy "
            f"decoding a drafted token is kept if it is at least {self.lenience:g} times as likely as the "
            "likeliest one. Drafts are judged token by token"
        )
