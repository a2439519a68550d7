"""What methods made of prompts, for the terminal: a table, and where their texts part."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..instruments.audit import audit
from .compare import Outcome


def table(outcomes: Sequence[Sequence[Outcome]], compared: bool = True) -> Table:
    """One line per method, over all prompts.

    Args:
        outcomes: per prompt, the methods' outcomes, plain decoding's first.
        compared: whether the texts should be the same.
    """
    lines = Table("", "tokens/s", "tokens/call", "speed-up", "text", box=None)
    speeds: list[float] = []
    for rows in zip(*outcomes, strict=True):
        speeds.append(speed(rows))
        same = sum(row.tokens == prompt[0].tokens for row, prompt in zip(rows, outcomes, strict=True))
        text = f"plain's own in {same} of {len(rows)}" if compared else "sampled"
        lines.add_row(
            rows[0].name,
            f"{speeds[-1]:.1f}",
            f"{sum(row.mean_acceptance_length for row in rows) / len(rows):.2f}",
            f"{speeds[-1] / speeds[0]:.2f}x",
            "" if len(speeds) == 1 else text,
        )
    return lines


def speed(rows: Sequence[Outcome]) -> float:
    """Tokens per second of one method over all prompts."""
    return sum(len(row.tokens) for row in rows) / sum(row.seconds for row in rows)


def differences(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, Any],
    outcomes: Sequence[Outcome],
) -> Iterator[str]:
    """A sentence for each method whose text left plain decoding's, with the logits that decided."""
    plain, *others = outcomes
    for other in others:
        found = audit(target, inputs["input_ids"], plain.tokens, other.tokens, pad_token_id=tokenizer.pad_token_id)
        if found is None:
            continue
        if found.gap is None:
            yield f"{other.name} ends where plain decoding goes on, or the other way round, at token {found.position}"
            continue
        tokens = [tokenizer.decode([token]) for token in (found.plain_token, found.other_token)]
        verdict = "a near tie of plain's own top two" if found.near_tie else "NOT a near tie"
        yield (
            f"{other.name} differs first at new token {found.position}, {tokens[1]!r} for {tokens[0]!r}: {verdict}, "
            f"{found.gap:.4f} apart, where {str(target.dtype).removeprefix('torch.')} rounds to {found.rounding:.4f}"
        )
