"""What a drafter takes over texts and times that are known: the engine plays, and no model is asked.

Greedy text is the target's whoever drafts. So it is recorded once, with what target and draft model find likely at each
of its places, and stands in for both models on a clock of measured times. Behind a wrong token a model goes on with
what is recorded of the next place: nothing there is kept in any case.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ... import clock
from ...drafters import Drafter, PromptLookupDrafter
from ...target.devices import input_device
from ...theory import interpolate_widths
from ..instruments.bare import time_bare_forwards
from ..instruments.ends import end_tokens, until_end
from ..instruments.forwards import cached_tokens
from ..instruments.meter import Forward, Role
from ..loading.models import Pair

LIKELIEST = 16
"""tokens that are recorded of a place"""
WIDTHS: dict[Role, tuple[int, ...]] = {"target": (1, 2, 3, 5, 9, 17, 33), "draft": (1, 2, 5, 9)}
"""of the forwards that are timed"""
TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}


class Said(NamedTuple):
    """What a model finds likely at each place of a text, the likeliest first."""

    tokens: Tensor
    """[N, k]"""
    chances: Tensor
    """[N, k]"""

    @classmethod
    def of(cls, logits: Tensor) -> "Said":
        """From logits [N, V]."""
        chances, tokens = logits.float().softmax(-1).topk(min(LIKELIEST, logits.shape[-1]))
        return cls(tokens.cpu(), chances.cpu())


class Recording(NamedTuple):
    """A prompt, the target's text, and what the models say behind the prompt's last token and each further one."""

    prompt: list[int]
    text: list[int]
    target: Said
    draft: Said | None


@torch.inference_mode()
def record(pair: Pair, prompt: list[int], new_tokens: int) -> Recording:
    """Plain decoding's text, and one forward of the draft model over it."""
    ids = torch.tensor([prompt], device=input_device(pair.target))
    output: Any = pair.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=pair.tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_scores=True,  # behind the model's own processors, which choose the text
        speculation_type="none",
    )
    text = until_end(pair.target, output.sequences[0, len(prompt) :].tolist())
    said, draft = Said.of(torch.cat(output.scores)[: len(text)]), None
    if pair.draft is not None:
        read = torch.tensor([prompt + text[:-1]], device=input_device(pair.draft))
        draft = Said.of(pair.draft(read).logits[0, len(prompt) - 1 :])
    return Recording(prompt, text, said, draft)


def forward_seconds(role: Role, model: PreTrainedModel, recordings: Sequence[Recording]) -> dict[int, float]:
    """Seconds of a forward by its width, over the mean length of these texts."""
    length = sum(len(one.prompt) + len(one.text) // 2 for one in recordings) // len(recordings)
    longest = max((one.prompt + one.text for one in recordings), key=len)
    ids = torch.tensor([longest], device=input_device(model))
    timed = time_bare_forwards({role: model}, [Forward(role, 1, width, length, 0.0) for width in WIDTHS[role]], ids)
    return {width: seconds for (_, _, width), seconds in timed.items()}


class Recorded(LlamaForCausalLM):
    """Says at each place of a text what was recorded, whatever it reads, and takes the time that is set.

    It is a tiny model otherwise, which keeps a cache as others do.
    """

    def __init__(self, model: PreTrainedModel, seconds: dict[int, float], watch: "Watch") -> None:
        """
        Args:
            model: whom it stands in for.
            seconds: of a forward by its width.
        """
        config = model.config.get_text_config(decoder=True)
        room = getattr(config, "max_position_embeddings", None) or 1 << 20
        super().__init__(LlamaConfig(vocab_size=config.vocab_size, max_position_embeddings=room, **TINY))
        self.generation_config.eos_token_id = sorted(end_tokens(model)) or None
        self.generation_config.pad_token_id = 0
        self.seconds, self.watch = interpolate_widths(seconds), watch
        self.eval()

    def recall(self, prompt: Sequence[int], said: Said) -> None:
        """From now on it reads this prompt and says this behind it."""
        self.said = len(prompt) - 1, said  # together: a number alone would make it another model to the engine

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **options: Any) -> Any:
        """As a model's of the class, with other logits."""
        held, (first, said) = cached_tokens(options), self.said
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **options)
        self.watch.now += self.seconds(input_ids.shape[1])
        places = torch.arange(held, held + input_ids.shape[1])[None] if position_ids is None else position_ids
        kept = options.get("logits_to_keep", 0)
        places = places[:, -kept:] if isinstance(kept, int) else places[:, kept]
        places = (places - first).clamp(0, len(said.tokens) - 1)  # of the prompt nothing is asked
        tokens, chances = said.tokens[places], said.chances[places]  # [1, T, k]
        others = (1 - chances.sum(-1, keepdim=True)).clamp(min=1e-9) / output.logits.shape[-1]
        output.logits = others.expand(output.logits.shape).scatter(-1, tokens, chances).log()
        return output


class Watch:
    """The time of what is played."""

    now = 0.0


class Stage:
    """Recordings, and models that say them, on one clock."""

    def __init__(self, pair: Pair, recordings: Sequence[Recording]) -> None:
        """The forwards of both models are timed."""
        self.recordings, self.watch = recordings, Watch()
        self.seconds = {"target": forward_seconds("target", pair.target, recordings)}
        if pair.draft is not None:
            self.seconds["draft"] = forward_seconds("draft", pair.draft, recordings)
        self.target = Recorded(pair.target, self.seconds["target"], self.watch)
        self.draft = None if pair.draft is None else Recorded(pair.draft, self.seconds["draft"], self.watch)
        self.play(PromptLookupDrafter(), recordings[:1])  # the first call asks what kind of model this is

    def play(self, drafter: Drafter | None, recordings: Sequence[Recording] | None = None) -> float:
        """Seconds in which all texts are decoded; plainly with None."""
        began = self.watch.now
        with clock.use(lambda: self.watch.now):
            for prompt, text, target, draft in self.recordings if recordings is None else recordings:
                self.target.recall(prompt, target)
                if self.draft is not None and draft is not None:
                    self.draft.recall(prompt, draft)
                ids = torch.tensor([prompt])
                options: dict[str, Any] = {"max_new_tokens": len(text), "do_sample": False, "assistant_model": drafter}
                output: Any = self.target.generate(ids, attention_mask=torch.ones_like(ids), **options)
                assert output[0, len(prompt) :].tolist() == text
        return self.watch.now - began
