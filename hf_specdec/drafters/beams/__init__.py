"""Beam search, its questions answered in advance (Leviathan et al. 2023, appendix A.4)."""

from .search import Search, search_beams, why_not

__all__ = ["Search", "search_beams", "why_not"]
