"""A T5 and a Whisper, trained here in minutes, write what they read: how many calls drafts save them, in batches, too.

Run as `python docs/laboratory/encoder_decoder.py`. The T5 copies its source and shifts each token of its second half by
one place in the alphabet; the Whisper transcribes a sound in which every token has a pitch of its own. Drafts have one
layer and half of the training. Texts are held against plain decoding's, and calls counted.
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
import transformers as tf
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import trange
from typer import Option, run

from hf_specdec import Drafter, DraftModelDrafter, HybridDrafter, PromptLookupDrafter

VOCAB, LONGEST, BEGIN, END = 40, 20, 2, 1
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 96, "pad_token_id": 0, "eos_token_id": END, "decoder_start_token_id": BEGIN,
}  # fmt: skip


def t5(layers: int) -> Any:
    """Small."""
    return tf.T5ForConditionalGeneration(
        tf.T5Config(**SIZES, d_kv=24, num_heads=4, d_ff=192, num_layers=layers, dropout_rate=0.0)
    )


def whisper(layers: int) -> Any:
    """Small."""
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192}
    places = {"max_source_positions": LONGEST, "max_target_positions": 64, "num_mel_bins": 16, "bos_token_id": BEGIN}
    config = tf.WhisperConfig(
        **SIZES, **heads, **places, encoder_layers=layers, decoder_layers=layers, suppress_tokens=[],
        begin_suppress_tokens=[],
    )  # fmt: skip
    return tf.WhisperForConditionalGeneration(config)


def texts(count: int, dice: torch.Generator) -> Tensor:
    """Tokens [B, T] of one length, some of them said twice."""
    half = torch.randint(3, VOCAB, (count, LONGEST // 2), generator=dice)
    return torch.cat([half, half], dim=1)


def read(count: int, dice: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """What a T5 reads, and is to write."""
    ids = texts(count, dice)
    said = ids.clone()
    said[:, LONGEST // 2 :] = 3 + (said[:, LONGEST // 2 :] - 2) % (VOCAB - 3)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, _ended(said)


def heard(count: int, dice: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """What a Whisper hears, two frames a token, and is to write."""
    ids = texts(count, dice)
    pitch = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(0))
    sound = pitch[ids].repeat_interleave(2, dim=1).transpose(1, 2)
    return {"input_features": sound + 0.1 * torch.randn(sound.shape, generator=dice)}, _ended(ids)


def _ended(ids: Tensor) -> Tensor:
    return torch.cat([ids, torch.full((len(ids), 1), END)], dim=1)


def train(model: Any, examples: Callable[[int, torch.Generator], Any], steps: int) -> Any:
    """Cross-entropy of what is to be written."""
    dice = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in trange(steps, desc=type(model).__name__, unit="step"):
        inputs, said = examples(64, dice)
        optimizer.zero_grad()
        model(**inputs, labels=said).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def main(steps: Annotated[int, Option(help="Of training, of the targets.")] = 2000) -> None:
    """Train, and count."""
    torch.manual_seed(0)
    table = Table(box=None)
    for title in ("", "drafter", "batch", "right", "calls", "plain calls", "same text"):
        table.add_column(title)
    for name, make, examples in (("T5", t5, read), ("Whisper", whisper, heard)):
        target, draft = train(make(3), examples, steps), train(make(1), examples, steps // 2)
        drafters: dict[str, Drafter] = {
            "draft model": DraftModelDrafter(draft, num_draft_tokens=5),
            "lookup": PromptLookupDrafter(),
            "hybrid": HybridDrafter(draft, num_draft_tokens=5),
        }
        for rows in (1, 8):
            inputs, said = examples(rows, torch.Generator().manual_seed(7))
            options: dict[str, Any] = {"max_new_tokens": LONGEST + 4, "do_sample": False}
            plain = tf.GenerationMixin.generate(target, **inputs, **options)
            wrote = torch.nn.functional.pad(plain[:, 1:], (0, said.shape[1]))[:, : said.shape[1]]
            right = float((wrote == said).float().mean())
            for kind, drafter in drafters.items():
                text = tf.GenerationMixin.generate(target, **inputs, **options, assistant_model=drafter)
                assert drafter.last_stats is not None
                stats = drafter.last_stats
                same = "yes" if torch.equal(text, plain) else "NO"
                table.add_row(
                    name, kind, str(rows), f"{right:.0%}", str(stats.target_calls), str(1 + stats.plain_steps), same
                )
    Console().print(table)


if __name__ == "__main__":
    run(main)
