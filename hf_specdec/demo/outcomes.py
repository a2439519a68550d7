"""What methods made of prompts, for the terminal: a table, and where their texts part."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..instruments.audit import Audit
from .compare import Outcome


def table(outcomes: Mapping[str, Sequence[Outcome]], compared: bool = True) -> Table:
    """One line per method: its speed-up on each kind of prompt, and over all that every method decoded.

    Args:
        outcomes: per kind, the methods' outcomes, plain decoding's first; a method may be missing from a kind,
            and the figures over all are then of the other kinds.
        compared: whether the texts should be the same.
    """
    kinds = list(outcomes) if len(outcomes) > 1 else []
    lines = Table(box=None)
    lines.add_column("", no_wrap=True)
    for title in (*kinds, *(("all",) if kinds else ("tokens/s", "speed-up")), "tokens\n/call", "same\ntext"):
        lines.add_column(title, justify="right", no_wrap=True)
    names = list(dict.fromkeys(found.name for row in outcomes.values() for found in row))
    shared = [row for row in outcomes.values() if len(row) == len(names)] or list(outcomes.values())
    plain_speed = speed([row[0] for row in shared])
    for name in names:
        mine = {kind: found for kind, row in outcomes.items() for found in row if found.name == name}
        overall = [found for row in shared for found in row if found.name == name]
        gains = [f"{speed([mine[k]]) / speed(outcomes[k][:1]):.2f}x" if k in mine else "refused" for k in kinds]
        same = sum(found.rows == outcomes[kind][0].rows for kind, found in mine.items())
        lines.add_row(
            name,
            *(gains or (f"{speed(overall):.1f}",)),
            f"{speed(overall) / plain_speed:.2f}x",
            f"{sum(found.mean_acceptance_length for found in overall) / len(overall):.2f}",
            "" if name == names[0] else f"{same} of {len(mine)}" if compared else "sampled",
        )
    return lines


def speed(outcomes: Sequence[Outcome]) -> float:
    """Tokens per second over all prompts."""
    return sum(found.count for found in outcomes) / sum(found.seconds for found in outcomes)


def differences(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, Any],
    outcomes: Sequence[Outcome],
) -> Iterator[str]:
    """A sentence for each method and row whose text left plain decoding's, with the logits that decided."""
    plain, *others = outcomes
    prompts = [ids[None, mask.bool()] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    options = {"pad_token_id": tokenizer.pad_token_id}
    audits = [Audit(target, prompt, row, **options) for prompt, row in zip(prompts, plain.rows, strict=True)]
    for other in others:
        for b, (audit, row) in enumerate(zip(audits, other.rows, strict=True)):
            found = audit.difference(row)
            if found is None:
                continue
            name = other.name if len(plain.rows) == 1 else f"{other.name}, row {b + 1},"
            if found.gap is None:
                yield f"{name} ends where plain decoding goes on, or the other way round, at token {found.position}"
                continue
            tokens = [tokenizer.decode([token]) for token in (found.plain_token, found.other_token)]
            tied = f"a near tie of plain's own {'top two' if found.top_two else 'best'}"
            verdict = tied if found.near_tie else "NOT a near tie"
            yield (
                f"{name} differs first at new token {found.position}, {tokens[1]!r} for {tokens[0]!r}: {verdict}, "
                f"{found.gap:.4f} apart, where {_dtype(target)} rounds to {found.rounding:.4f}"
            )


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
